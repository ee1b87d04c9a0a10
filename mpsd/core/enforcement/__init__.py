"""The limits that must be in force, whether they are, and what breaches a lease.

Imported by: daemon/api, daemon/control, daemon/ends, daemon/holders, daemon/leases, daemon/node,
daemon/violations.
"""
