"""Leases from request to end: stored, tied to processes, and held to their limits."""
