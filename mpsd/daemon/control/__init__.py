"""One control daemon: started or adopted, proved, watched, drained and restarted.

Imported by: daemon, daemon/api, daemon/canary, daemon/leases, daemon/node.
"""
