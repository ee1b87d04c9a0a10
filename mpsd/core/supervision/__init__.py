"""When a control daemon that died starts again, what a drain or restart does next, and whether a server serves at all.

Imported by: cli/commands, cli/web, daemon/api, daemon/canary, daemon/control, daemon/leases, daemon/node.
"""
