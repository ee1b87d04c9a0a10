"""The configuration file of mpsd, as text: parsed to settings, and printed from them."""
