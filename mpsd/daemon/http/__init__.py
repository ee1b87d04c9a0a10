"""HTTP/1.1 on a unix socket: connections, who is connected, and errors as answers. It knows nothing of the node."""
