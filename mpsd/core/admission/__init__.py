"""The capacity of each GPU, the shares that are granted of it, and the queue of the requests that wait for some.

Imported by: core/metrics, daemon, daemon/accounting, daemon/api, daemon/ends, daemon/leases, daemon/metrics,
    daemon/node, daemon/violations.
"""
