"""Decisions about control daemons: the restart after a death, the steps of a drain or restart, and wedged servers.

Imported by: cli/commands, cli/web, daemon/api, daemon/canary, daemon/control, daemon/leases, daemon/node.
"""
