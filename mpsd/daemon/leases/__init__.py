"""Leases from request to end: stored, tied to processes, and held to their limits.

Imported by: daemon, daemon/accounting, daemon/canary, daemon/node, daemon/violations.
"""
