"""What the limits must be, whether they are, and what breaks a lease.

Imported by: daemon/api, daemon/control, daemon/leases, daemon/node.
"""
