"""HTTP/1.1 on a unix socket: connections, their peers, and errors as answers. It does not depend on the node.

Imported by: daemon/api, daemon/metrics, mpsd/__main__.py.
"""
