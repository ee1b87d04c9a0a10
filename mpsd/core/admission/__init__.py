"""What each GPU has to give, who holds how much of it, and who waits in which order.

Imported by: daemon, daemon/accounting, daemon/api, daemon/ends, daemon/leases, daemon/node.
"""
