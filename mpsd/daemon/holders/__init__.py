"""What holds a lease: processes and control groups, each known for certain, and watched until it is gone.

Imported by: daemon/api, daemon/leases, daemon/node.
"""
