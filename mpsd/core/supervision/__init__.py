"""When a control daemon that died starts again, and what a drain or restart does next. `daemon/control` calls it."""
