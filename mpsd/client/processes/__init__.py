"""Programs and functions that run in processes of their own, each under a lease.

A program of `spawn` holds its lease itself, so that both end together, whatever ends them. The leases of `Pool` and
`process` are held by the process that makes them, with which their workers end.
"""
