"""Requests and answers of HTTP/1.1 as bytes, for callers that mpsd's death, or their own hostility, interrupts."""

import json
from typing import Any


def request(method: str, path: str, body: object = None) -> bytes:
    """Return a request, after whose answer mpsd closes the connection."""
    raw = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: mpsd\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def parsed(said: bytes) -> tuple[int, Any]:
    """Return the status and the decoded body of an answer. Raises ValueError if it is missing or incomplete."""
    head, end, content = said.partition(b"\r\n\r\n")
    if not end:
        raise ValueError("the answer was cut off")
    return int(head.split()[1]), json.loads(content or b"{}")
