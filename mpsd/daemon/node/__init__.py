"""The node: it owns the objects of the lower rooms, and decides in which order they handle a request.

Imported by: daemon, daemon/accounting, daemon/api, daemon/metrics.
"""
