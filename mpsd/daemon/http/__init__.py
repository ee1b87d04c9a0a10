"""HTTP/1.1 on a unix socket: connections, who is connected, and errors as answers. It knows no node.

Imported by: daemon/api, daemon/metrics, mpsd/__main__.py.
"""
