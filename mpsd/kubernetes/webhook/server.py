"""The webhook's server: HTTPS, with a thread for each connection, and one request in each.

The API server alone has a reason to call. Any other caller that reaches the port learns nothing, since the answer is
made of its own question; it can only occupy places. Each connection therefore has one deadline and one bound for all
that it sends, and the number of places is small. A connection is not kept: the API server would send a pod's review on
one that is about to be closed, and the pod would start without its share.
"""

import base64
import io
import json
import signal
import socket
import ssl
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import msgspec

from mpsd.core.errors import ConfigurationError
from mpsd.core.kubernetes import webhook
from mpsd.core.kubernetes.settings import Settings
from mpsd.core.kubernetes.webhook import Review
from mpsd.core.sanitize import text
from mpsd.kubernetes.log import EventName, Log
from mpsd.kubernetes.webhook import certificate
from mpsd.system import clock

_MOST: Final = 16
"""Connections at a time; further ones wait in the kernel. A review takes a few milliseconds."""

_DEADLINE: Final = 5.0
"""Seconds for a connection, with its handshake; the API server waits for 2 s (`timeoutSeconds` in the chart)."""

_LONGEST: Final = 4 * 1024 * 1024
"""Maximum bytes that a connection sends. The API server itself accepts requests of 3 MiB."""

_LOGS: Final = 60.0
"""Seconds in which one failure of a caller is logged."""

_LINGER: Final = 3.0
"""Seconds for which it serves after SIGTERM, until no kube-proxy leads to it any more."""

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Certificate:
    """The certificate in a directory, in its latest usable form."""

    def __init__(self, directory: Path, log: Log) -> None:
        self._files = (directory / "tls.crt", directory / "tls.key")
        self._log = log
        self._lock = threading.Lock()
        self._loaded: tuple[object, ...] = ()
        self._context: ssl.SSLContext | None = None
        self._end = 0.0

    @property
    def has_expired(self) -> bool:
        return clock.now().timestamp() >= self._end

    def context(self) -> ssl.SSLContext:
        """Return the certificate for a connection; read it again first, if its files have changed.

        kubelet replaces both files at once by a link, but a reader may see one from before and one from after: the
        previous certificate then serves this connection, too. Raises OSError where there is none yet.
        """
        with self._lock:
            try:
                self._load()
            except (OSError, ValueError) as error:
                if self._log.is_new("certificate", str(error)):
                    self._log.warning(EventName.CERTIFICATE_NOT_LOADED, because=text(str(error)))
            if self._context is None:
                raise FileNotFoundError("there is no certificate yet")
            return self._context

    def _load(self) -> None:
        stamps = tuple((stat.st_mtime_ns, stat.st_ino) for stat in (each.stat() for each in self._files))
        if stamps == self._loaded:
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self._files)
        self._end = certificate.end_of(self._files[0].read_text(encoding="ascii"))
        self._context, self._loaded = context, stamps
        left = round(self._end - clock.now().timestamp())
        self._log.solved("certificate")
        self._log.info(EventName.CERTIFICATE_LOADED, file=str(self._files[0]), seconds_left=left)


class _Input(io.RawIOBase):
    """The input of a connection, with its deadline and its bound."""

    def __init__(self, connection: socket.socket, end: float) -> None:
        self._connection = connection
        self._end = end
        self._left = _LONGEST

    def readable(self) -> bool:
        """Return True: the stream can be read."""
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - io's signature
        """Receive bytes; return 0 at the end of the input and beyond the bound. Raises TimeoutError."""
        self._connection.settimeout(_until(self._end))
        count = self._connection.recv_into(memoryview(buffer)[: self._left]) if self._left else 0
        self._left -= count
        return count


def _until(end: float) -> float:
    """Return the seconds until a deadline. Raises TimeoutError."""
    left = end - clock.monotonic()
    if left <= 0:
        raise TimeoutError("it took too long")
    return left


class Server(ThreadingHTTPServer):
    """The server. `server_close` waits for the connections that are open."""

    daemon_threads = False

    def __init__(self, settings: Settings, log: Log, deadline: float = _DEADLINE) -> None:
        """Listen on the port of the settings, on all addresses; 0 chooses a free one. Raises ConfigurationError."""
        super().__init__(("", settings.webhook_port), BaseHTTPRequestHandler, bind_and_activate=False)
        self.socket.close()
        has_both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if has_both else socket.AF_INET
        try:
            self.socket = socket.create_server(self.server_address, family=family, backlog=128, dualstack_ipv6=has_both)
        except OSError as error:
            raise ConfigurationError(
                f"webhook_port: {settings.webhook_port} cannot be listened on: {error}", hint="set another port"
            ) from None
        self.port = int(self.socket.getsockname()[1])
        self.settings = settings
        self.log = log
        self._deadline = deadline
        self.certificate = Certificate(settings.webhook_certificate, log)
        self._places = threading.BoundedSemaphore(_MOST)
        self._logs_at = 0.0
        """When the next failure of a caller is logged."""

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - socketserver's signature
        """Serve a connection in a thread of its own, as soon as there is a place."""
        self._places.acquire()
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # there is no thread for it
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - socketserver's signature
        """Serve a connection, and release its place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def finish_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - socketserver's signature
        """Speak TLS with the caller, then HTTP. Raises OSError for a caller that cannot, or not in time."""
        end = clock.monotonic() + self._deadline
        context = self.certificate.context()
        with context.wrap_socket(request, server_side=True, do_handshake_on_connect=False) as connection:
            connection.settimeout(self._deadline)
            connection.do_handshake()
            _Handler(connection, client_address, self, end)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401, ARG002 - socketserver's signature
        """Log why the TLS of a caller failed, as of an API server that does not trust this certificate, and defects."""
        error = sys.exception()
        if not isinstance(error, OSError) or isinstance(error, ssl.SSLError):
            self.log_failure(f"{type(error).__name__}: {error}")

    def log_failure(self, because: str) -> None:
        """Log why a caller has no answer, once in a while: any pod that reaches the port can cause it at any rate."""
        now = clock.monotonic()
        if now >= self._logs_at:
            self._logs_at = now + _LOGS
            self.log.warning(EventName.REVIEW_FAILED, because=text(because))


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def __init__(self, connection: socket.socket, address: Any, server: Server, end: float) -> None:  # noqa: ANN401 - socketserver's signature
        self._end = end
        super().__init__(connection, address, server)

    def setup(self) -> None:
        """Replace the input by one with a deadline."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Input(self.connection, self._end))

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - http.server's signature
        """Log nothing of a request itself."""

    def do_GET(self) -> None:
        """Answer kubelet's probe: an expired certificate is of no use to the API server."""
        if self.server.certificate.has_expired:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "the certificate has expired")
        else:
            self._send(b"ok\n", "text/plain")

    def do_POST(self) -> None:
        """Answer a review; what is none is an error, upon which the API server admits the pod as it is."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal() and len(length) < 10):  # noqa: PLR2004 - digits of a size
            self.send_error(HTTPStatus.LENGTH_REQUIRED)
            return
        if int(length) > _LONGEST:
            self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        try:
            review = msgspec.json.decode(self.rfile.read(int(length)), type=Review)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self.server.log_failure(str(error))
            self.send_error(HTTPStatus.BAD_REQUEST, "it is no AdmissionReview of a pod")
            return
        self._send(json.dumps(self._answer(review)).encode(), "application/json")

    def _answer(self, review: Review) -> object:
        request = review.request
        found = webhook.answer(request.object, self.server.settings)
        metadata = request.object.metadata
        pod = f"{request.namespace}/{metadata.name or metadata.generate_name}"
        for event, said in ((EventName.SHARE_GIVEN, found.given), (EventName.SHARE_NOT_GIVEN, found.warnings)):
            if said:
                self.server.log.info(event, pod=pod, because="; ".join(said))
        response: dict[str, object] = {"uid": request.uid, "allowed": True}
        if found.warnings:
            response["warnings"] = found.warnings
        if found.patch:
            patch = base64.b64encode(json.dumps(found.patch).encode()).decode("ascii")
            response |= {"patchType": "JSONPatch", "patch": patch}
        return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}

    def _send(self, body: bytes, media_type: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", f"{len(body)}")
        self.end_headers()
        self.connection.settimeout(_until(self._end))
        self.wfile.write(body)


def run(settings: Settings, log: Log) -> None:
    """Serve until SIGTERM or SIGINT, and a little longer. Raises ConfigurationError for a port in use."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # in all threads: this one waits for them
    with Server(settings, log) as server:
        serving = threading.Thread(target=server.serve_forever, name="webhook")
        serving.start()
        log.info(EventName.WEBHOOK_STARTED, port=server.port, resources=settings.resources.value)
        signal.sigwait(_SIGNALS)
        signal.sigtimedwait(_SIGNALS, _LINGER)  # a second signal ends it at once
        server.shutdown()
        serving.join()
    log.info(EventName.WEBHOOK_ENDED)
