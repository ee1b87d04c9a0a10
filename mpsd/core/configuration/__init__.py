"""The configuration file of mpsd, as text: parsed to settings, and printed from them.

Imported by: cli, daemon/api, mpsd/__main__.py, system.
"""
