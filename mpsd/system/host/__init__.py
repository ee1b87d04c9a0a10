"""The machine and its service manager: settings, logs, units and mpsd's own installation."""
