"""HTTP/1.1 on a unix socket: connections, their peers, and errors as answers. It does not depend on the node."""
