"""What each GPU has to give, who holds how much of it, and who waits in which order.

Imported by: core/metrics, daemon, daemon/accounting, daemon/api, daemon/ends, daemon/leases, daemon/metrics,
    daemon/node.
"""
