"""A socket that listens on TCP, for the metrics that mpsd serves to other machines."""

import socket
from typing import Final

_BACKLOG: Final = 64


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at a numeric address. Raises OSError, such as for a port in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
