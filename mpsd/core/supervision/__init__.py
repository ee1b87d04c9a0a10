"""When a control daemon that died starts again, and what a drain or restart does next.

Imported by: cli/commands, daemon/api, daemon/control, daemon/leases, daemon/node.
"""
