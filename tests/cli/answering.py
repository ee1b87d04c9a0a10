"""A server on a unix socket with any answers that a test chooses: in pieces, too slow, partial, or nonsense."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path


class Answering:
    """Accepts connections one after another, and answers each request on them with the next of its answers.

    An answer is one piece of bytes or several, each sent by itself. `None` in place of an answer sends nothing and
    leaves the connection open; `hang_up` as the last piece closes it.
    """

    hang_up = b""

    def __init__(self, path: Path, answers: Sequence["bytes | Iterable[bytes] | None"]) -> None:
        self.requests: list[bytes] = []
        self.connections = 0
        self.asked = threading.Event()
        """Set once a request was received."""
        self._answers = list(answers)
        self._over = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, name=f"answers on {path}")
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # the listener is shut down at the end
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                with connection, contextlib.suppress(ConnectionError):
                    connection.settimeout(30)
                    self._converse(connection)

    def _converse(self, connection: socket.socket) -> None:
        received = b""
        while more := connection.recv(65536):
            received += more
            if not _whole(received):
                continue
            self.requests.append(received)
            self.asked.set()
            received = b""
            answer = self._answers.pop(0)
            if answer is None:
                self._over.wait()
                return
            for piece in [answer] if isinstance(answer, bytes) else answer:
                if piece == self.hang_up:
                    return
                connection.sendall(piece)

    def close(self) -> None:
        """Stop serving."""
        self._over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=30)
        self._listener.close()
        assert not self._thread.is_alive()


def _whole(request: bytes) -> bool:
    head, end, body = request.partition(b"\r\n\r\n")
    length = next((line.split(b":")[1] for line in head.split(b"\r\n") if line.startswith(b"Content-Length:")), b"0")
    return bool(end) and len(body) >= int(length)


@contextlib.contextmanager
def answering(path: Path, *answers: "bytes | Iterable[bytes] | None") -> Iterator[Answering]:
    """Serve as long as the block lasts."""
    server = Answering(path, answers)
    try:
        yield server
    finally:
        server.close()


def http(body: object, status: str = "200 OK", *headers: str) -> bytes:
    """Return an answer with a JSON body, in mpsd's form."""
    raw = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status}", "Content-Type: application/json", f"Content-Length: {len(raw)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + raw
