"""The node: it owns what the rooms below make, and decides in which order a request meets them.

Imported by: daemon, daemon/accounting, daemon/api, daemon/metrics.
"""
