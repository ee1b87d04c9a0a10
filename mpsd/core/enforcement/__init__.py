"""What the limits must be, whether they are, and what breaks a lease.

Imported by: daemon/api, daemon/control, daemon/ends, daemon/leases, daemon/node.
"""
