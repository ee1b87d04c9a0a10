"""What holds a lease, and what people call it: pure.

Imported by: cli/commands, core/admission, core/enforcement, daemon/api, daemon/holders, daemon/leases, daemon/node.
"""
