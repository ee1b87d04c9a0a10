"""The metrics of a node: the table of families, what counts events, and both forms of exposition. Pure.

Imported by: daemon/api, daemon/metrics, daemon/record, system.
"""
