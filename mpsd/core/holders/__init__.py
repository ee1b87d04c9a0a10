"""The holders of a lease, and their names for users. Pure.

Imported by: cli/commands, core/admission, core/enforcement, daemon/api, daemon/holders, daemon/leases, daemon/node.
"""
