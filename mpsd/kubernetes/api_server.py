"""A client of the API server: a few routes, over TLS, as the service account of its pod.

It uses the standard library, since it needs only a request, an answer and a deadline. Kubernetes' own client for Python
brings some 30 MB of generated types and a connection pool; an HTTP library would still leave the errors to this module,
and the token, which is replaced on disk every hour. Requests are few (see `docs/internals/scale.md`), so each has its
own connection, and a request never waits for a connection that died silently.

Its callers are separate threads, or calls of kubelet that need the answer: nothing else waits for it.
"""

import http.client
import json
import os
import ssl
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple, cast
from urllib.parse import quote, urlsplit

import msgspec

from mpsd.core.dra.allocation import ResourceClaim
from mpsd.core.errors import ConfigurationError, InternalError, NotFoundError, NotPermittedError, UnreachableError
from mpsd.core.kubernetes.settings import Settings
from mpsd.core.sanitize import text
from mpsd.core.units import briefly
from mpsd.system import clock, retry

Document = Mapping[str, object]

PATIENCE: Final = 15.0
"""Seconds for which a call is retried while the API server is unavailable or busy; kubelet itself waits 45 s for a
claim."""

_ATTEMPT: Final = 5.0
"""Seconds for one attempt, from connecting to the last byte."""

_MOST: Final = 4 * 1024 * 1024
"""Maximum bytes of an answer; the API server stores no object of more than 1.5 MiB."""

_PIECE: Final = 64 * 1024
_TOKEN_BYTES: Final = 64 * 1024
_ROLE: Final = "give the service account of mpsd-kubernetes its role: container/kubernetes"
_RESOURCE: Final = "/apis/resource.k8s.io/v1"
_NOT_FOUND, _CONFLICT, _TOO_MANY, _ERRORS = 404, 409, 429, 500


class ConflictError(Exception):
    """The object exists already, or has changed since it was read."""


class Place(NamedTuple):
    """The address of the API server, and the directory of the credentials for it."""

    host: str
    port: int
    account: Path


def is_known(settings: Settings, environment: Mapping[str, str]) -> bool:
    """Tell whether the address of the API server is known and there is a token for it."""
    has_token = (settings.service_account / "token").exists()
    return has_token and bool(settings.api_server or environment.get("KUBERNETES_SERVICE_HOST"))


def place(settings: Settings, environment: Mapping[str, str]) -> Place:
    """Return the address of the API server: the configured one, or else the one in each pod's environment.

    Raises ConfigurationError.
    """
    folder = settings.service_account
    if url := settings.api_server:
        parts = urlsplit(url)
        if parts.scheme != "https" or not parts.hostname or parts.path not in {"", "/"}:
            raise ConfigurationError(
                f"api_server: {briefly(url)} is not https://HOST:PORT", hint="correct it", limit="api_server"
            )
        return Place(parts.hostname, parts.port or 443, folder)
    host, port = environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not port.isdecimal():
        raise ConfigurationError(
            "the API server is not known: KUBERNETES_SERVICE_HOST is not set, as it is in a pod",
            hint='run it in a pod, or set api_server = "https://HOST:PORT" and service_account',
            limit="api_server",
        )
    return Place(host, int(port), folder)


class ApiServer:
    """The API server. Any thread may call.

    Every method raises UnreachableError when the server is unavailable, or too busy, for longer than `PATIENCE`;
    NotPermittedError for actions that the service account may not do; and InternalError for an answer that is not
    Kubernetes'.
    """

    def __init__(self, found: Place, ended: threading.Event) -> None:
        """`ended` is set when this program ends: all waits then end."""
        self._place = found
        self._ended = ended

    def claim(self, namespace: str, name: str) -> ResourceClaim:
        """Return a ResourceClaim. Raises NotFoundError."""
        path = f"{_RESOURCE}/namespaces/{_segment(namespace)}/resourceclaims/{_segment(name)}"
        raw = self._ask("GET", path, what=f"ResourceClaim {namespace}/{name}")
        try:
            return msgspec.json.decode(raw, type=ResourceClaim)
        except msgspec.MsgspecError as error:
            raise _garbled(f"ResourceClaim {namespace}/{name}", error) from None

    def apply_claim_status(self, document: Document, manager: str) -> None:
        """Apply the entries of a driver to the status of a ResourceClaim. Raises NotFoundError and ConflictError."""
        match document:
            case {"metadata": {"namespace": str(namespace), "name": str(name)}}:
                path = f"{_RESOURCE}/namespaces/{_segment(namespace)}/resourceclaims/{_segment(name)}/status"
                query = f"?fieldManager={quote(manager)}&force=true"
                try:
                    self._ask("PATCH", path + query, document, what=f"the status of ResourceClaim {namespace}/{name}")
                except InternalError as error:
                    if "resourceclaims/driver" not in error.detail:
                        raise
                    raise NotPermittedError(error.detail, hint=_ROLE, limit="rbac") from None  # since 1.36, by a 422

    def slice(self, name: str) -> Document | None:
        """Return a ResourceSlice; None where there is none."""
        try:
            return self.document("GET", f"{_RESOURCE}/resourceslices/{_segment(name)}")
        except NotFoundError:
            return None

    def create_slice(self, document: Document, *, is_dry: bool = False) -> Document:
        """Create a ResourceSlice, and return it as the server accepted it. Raises ConflictError where it exists.

        `is_dry`: the server only tells what it would accept.
        """
        return self.document("POST", f"{_RESOURCE}/resourceslices{'?dryRun=All' * is_dry}", document)

    def replace_slice(self, name: str, document: Document) -> Document:
        """Replace a ResourceSlice by one with its resourceVersion, and return it as the server accepted it.

        Raises ConflictError where it has changed since, and NotFoundError.
        """
        return self.document("PUT", f"{_RESOURCE}/resourceslices/{_segment(name)}", document)

    def delete_slice(self, name: str) -> None:
        """Delete a ResourceSlice, if there is one."""
        try:
            self._ask("DELETE", f"{_RESOURCE}/resourceslices/{_segment(name)}", what=f"ResourceSlice {name}")
        except NotFoundError:
            return

    def node(self, name: str) -> Document:
        """Return a Node. Raises NotFoundError."""
        return self.document("GET", f"/api/v1/nodes/{_segment(name)}")

    def patch_node(self, name: str, patch: Document) -> None:
        """Merge a patch into a Node. Raises NotFoundError."""
        self._ask("PATCH", f"/api/v1/nodes/{_segment(name)}", patch, what=f"Node {name}")

    def create_event(self, namespace: str, event: Document) -> None:
        """Try to create an Event, once: a lost event is not worth a retry."""
        path = f"/api/v1/namespaces/{_segment(namespace)}/events"
        self._ask("POST", path, event, what=f"Events in {namespace}", retries=False)

    def document(self, method: str, path: str, body: Document | None = None) -> Document:
        """Make a request, and return the object that answers it. Raises NotFoundError and ConflictError."""
        what = " ".join(path.split("/")[-2:])
        raw = self._ask(method, path, body, what=what)
        try:
            found = json.loads(raw)
        except ValueError as error:
            raise _garbled(what, error) from None
        if not isinstance(found, dict):
            raise _garbled(what, ValueError("it is not an object"))
        return cast("Document", found)

    # -- one request ---------------------------------------------------------------------------------------------------

    def _ask(self, method: str, path: str, body: Document | None = None, *, what: str, retries: bool = True) -> bytes:
        try:
            answer: bytes = retry.api_server(PATIENCE if retries else 0.0, self._ended)(
                self._once, method, path, body, what
            )
        except retry.ApiServerAwayError as error:
            raise UnreachableError(
                f"the API server at {self._place.host}:{self._place.port} does not answer: {error}",
                hint="see whether it runs; what is prepared on this node stays as it is meanwhile",
            ) from None
        return answer

    def _once(self, method: str, path: str, body: Document | None, what: str) -> bytes:
        """Make one attempt. Raises ApiServerAwayError where another attempt may succeed."""
        try:
            status, answer, after = self._exchange(method, path, body)
        except (OSError, http.client.HTTPException) as error:
            raise retry.ApiServerAwayError(text(str(error) or type(error).__name__)) from None
        if status < 300:  # noqa: PLR2004 - HTTP: success
            return answer
        raise _refusal(status, answer, after, f"{method} of {what}")

    def _exchange(self, method: str, path: str, body: Document | None) -> tuple[int, bytes, float]:
        """Return the status, the body, and the seconds after which the server wants to be asked again."""
        end = clock.monotonic() + _ATTEMPT
        context = ssl.create_default_context(cafile=os.fspath(self._place.account / "ca.crt"))
        connection = http.client.HTTPSConnection(self._place.host, self._place.port, timeout=_ATTEMPT, context=context)
        headers = {"Authorization": f"Bearer {self._token()}", "Accept": "application/json"}
        headers["User-Agent"] = "mpsd-kubernetes"
        if body is not None:
            kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
            if "fieldManager=" in path:  # server-side apply, which takes YAML, of which JSON is a part
                kind = "application/apply-patch+yaml"
            headers["Content-Type"] = kind
        try:
            connection.request(method, path, None if body is None else json.dumps(body).encode(), headers)
            answer = connection.getresponse()
            after = answer.headers.get("Retry-After", "")
            return answer.status, _read(answer, end), float(after) if after.isdecimal() else 0.0
        finally:
            connection.close()

    def _token(self) -> str:
        """Return the current token: kubelet replaces it long before it expires."""
        with (self._place.account / "token").open(encoding="ascii") as file:
            return file.read(_TOKEN_BYTES).strip()


def _refusal(status: int, answer: bytes, after: float, what: str) -> Exception:
    because = _message(answer) or f"HTTP status {status}"
    if status == _NOT_FOUND:
        return NotFoundError(
            f"{what}: {because}", hint="see whether it exists: kubectl get; the setting `node` names the Node"
        )
    if status == _CONFLICT:
        return ConflictError(because)
    if status in {401, 403}:
        return NotPermittedError(f"the API server refuses {what}: {because}", hint=_ROLE, limit="rbac")
    if status == _TOO_MANY or status >= _ERRORS:
        return retry.ApiServerAwayError(because, after)
    return InternalError(f"the API server rejects {what}: {because}", hint="report this, with Kubernetes' release")


def _garbled(what: str, error: Exception) -> InternalError:
    return InternalError(f"the API server answered something else than {what}: {error}", hint="see what listens there")


def _message(answer: bytes) -> str:
    """Return the message of a Status object, in a form that can be logged."""
    try:
        found = json.loads(answer)
    except ValueError:
        return ""
    said = found.get("message") if isinstance(found, dict) else None
    return text(said)[:1000] if isinstance(said, str) else ""


def _read(answer: http.client.HTTPResponse, end: float) -> bytes:
    """Return a body. Raises OSError for a body that takes too long, or is too large."""
    pieces, size = [], 0
    while piece := answer.read1(_PIECE):
        pieces.append(piece)
        size += len(piece)
        if clock.monotonic() > end:
            raise TimeoutError(f"its answer took longer than {_ATTEMPT:g} s")
        if size > _MOST:
            raise OSError(f"its answer has more than {_MOST} bytes")
    return b"".join(pieces)


def _segment(name: str) -> str:
    return quote(name, safe="")
