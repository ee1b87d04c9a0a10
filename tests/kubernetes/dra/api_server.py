"""A stand-in for the API server: the few routes that the driver uses, over TLS on loopback, with its refusals.

It behaves as observed in kube-apiserver 1.36.2: it trusts a bearer token, stores objects with a resourceVersion,
refuses the second of two writers with 409, omits empty lists, and drops fields of a feature that is switched off. It
records every written object, which the tests check against Kubernetes' own schemas.
"""

import copy
import http.server
import json
import re
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs

import trustme

Document = dict[str, Any]

TOKEN: Final = "a-token"  # noqa: S105 - of the stand-in's own
SLICES: Final = "/apis/resource.k8s.io/v1/resourceslices"


@dataclass
class Request:
    """A request that was made."""

    method: str
    path: str
    status: int
    at: float
    """The time of the answer, on the monotonic clock."""


@dataclass
class ApiServer:
    """The stand-in, which listens from `start` on."""

    folder: Path
    objects: dict[str, Document] = field(default_factory=dict)
    """By path."""
    written: list[Document] = field(default_factory=list)
    """Every object that was created or replaced, as it was sent."""
    requests: list[Request] = field(default_factory=list)
    token: str = TOKEN
    shares_devices: bool = True
    """Whether the feature gate DRAConsumableCapacity is on."""
    rights: frozenset[str] = frozenset({"resourceclaims/status", "resourceclaims/driver"})
    """What the service account may write of claims; the second is asked for since 1.36."""
    taints_devices: bool = True
    """Whether the feature gate DRADeviceTaints is on (by default since 1.36)."""
    refusal: int | None = None
    """The HTTP status of all answers; None for the correct one."""
    retry_after: str | None = None
    """The header Retry-After of the first refusal, after which the answers are correct."""
    forbidden: frozenset[str] = frozenset()
    """Methods that the service account may not use."""
    after_get: Callable[[str], object] = lambda _: None
    """Called with the path of each object that was read, before its reader has it."""
    version: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)
    server: http.server.ThreadingHTTPServer | None = None
    port: int = 0

    def __post_init__(self) -> None:
        """Make the service account's directory, like kubelet for a pod."""
        authority = trustme.CA()
        self.folder.mkdir(exist_ok=True)
        authority.cert_pem.write_to_path(str(self.folder / "ca.crt"))
        (self.folder / "token").write_text(self.token)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(self.context)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def start(self) -> "ApiServer":
        """Listen; after a stop, at the same port as before."""
        stand_in = self

        class Handler(_Handler):
            api_server = stand_in

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Handler, bind_and_activate=False)
        self.server.daemon_threads = True
        self.server.allow_reuse_address = True
        self.server.server_bind()
        self.server.server_activate()
        self.server.socket = self.context.wrap_socket(
            self.server.socket, server_side=True, do_handshake_on_connect=False
        )
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def stop(self) -> None:
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None

    def put(self, path: str, document: Document) -> Document:
        """Store an object, like another writer of the API server."""
        with self.lock:
            self.version += 1
            stored = copy.deepcopy(document)
            metadata = stored.setdefault("metadata", {})
            metadata.setdefault("uid", str(uuid.uuid4()))
            metadata["resourceVersion"] = str(self.version)
            self.objects[path] = stored
            return stored

    def asked(self, method: str, part: str) -> list[Request]:
        """Return the requests of a kind."""
        with self.lock:
            return [each for each in self.requests if each.method == method and part in each.path]

    def slice(self) -> Document | None:
        with self.lock:
            found = [each for path, each in self.objects.items() if path.startswith(SLICES)]
        assert len(found) <= 1
        return found[0] if found else None

    # -- what it answers -----------------------------------------------------------------------------------------------

    def answer(self, method: str, path: str, body: Document | None, token: str, kind: str) -> tuple[int, Document]:
        """Return the status and the object of the answer."""
        with self.lock:
            status, document = self._answer(method, path, body, token, kind)
            self.requests.append(Request(method, path, status, time.monotonic()))
            return status, document

    def _answer(  # noqa: PLR0911 - a table of what is answered
        self, method: str, path: str, body: Document | None, token: str, kind: str
    ) -> tuple[int, Document]:
        if self.refusal is not None:
            return self.refusal, _status("the server is currently unable to handle the request")
        if token != f"Bearer {self.token}":
            return 401, _status("Unauthorized")
        if method in self.forbidden:
            return 403, _status(f'User "mpsd" cannot {method.lower()} resource "{path}"')
        path, _, query = path.partition("?")
        is_dry = query == "dryRun=All"
        match method:
            case "GET" if path in self.objects:
                found = self.objects[path]
                self.after_get(path)
                return 200, found
            case "DELETE" if path in self.objects:
                del self.objects[path]
                return 200, _status("")
            case "POST" if body is not None and re.search(r"/(resourceslices|events)\Z", path):
                return self._create(path, body, is_dry=is_dry)
            case "PUT" if path in self.objects and body is not None:
                return self._replace(path, body)
            case "PATCH" if path.endswith("/status") and body is not None and kind == "application/apply-patch+yaml":
                return self._apply(path.removesuffix("/status"), body, query)
            case "PATCH" if path in self.objects and body is not None and kind == "application/merge-patch+json":
                return self._merge(path, body)
        return 404, _status(f'"{path}" not found')

    def _create(self, path: str, body: Document, *, is_dry: bool) -> tuple[int, Document]:
        self.written.append(copy.deepcopy(body))
        metadata = body["metadata"]
        name = metadata.get("name") or metadata["generateName"] + uuid.uuid4().hex[:5]
        if f"{path}/{name}" in self.objects:
            return 409, _status(f'"{name}" already exists')
        kept = self._kept({**body, "metadata": {**metadata, "name": name}}, None)
        return 201, kept if is_dry else self.put(f"{path}/{name}", kept)

    def _merge(self, path: str, body: Document) -> tuple[int, Document]:
        version = self.objects[path]["metadata"]["resourceVersion"]
        if body.get("metadata", {}).get("resourceVersion", version) != version:
            return 409, _status("the object has been modified; please apply your changes to the latest version")
        return 200, self.put(path, merged(self.objects[path], body))

    def _replace(self, path: str, body: Document) -> tuple[int, Document]:
        self.written.append(copy.deepcopy(body))
        before = self.objects[path]["metadata"]
        if body["metadata"].get("resourceVersion") != before["resourceVersion"]:
            return 409, _status("the object has been modified; please apply your changes to the latest version")
        return 200, self.put(
            path, self._kept({**body, "metadata": {**body["metadata"], "uid": before["uid"]}}, self.objects[path])
        )

    def _apply(self, path: str, body: Document, query: str) -> tuple[int, Document]:
        """Apply the status of a claim on the server's side: entries of devices are merged by their keys."""
        if "resourceclaims/status" not in self.rights:
            return 403, _status('cannot patch resource "resourceclaims/status"')
        found = self.objects.get(path)
        if found is None:
            return 404, _status(f'"{path}" not found')
        if body["metadata"].get("uid", found["metadata"]["uid"]) != found["metadata"]["uid"]:
            return 409, _status("Precondition failed: UID in precondition")
        allocated = [_key(each) for each in found["status"]["allocation"]["devices"]["results"]]
        if "resourceclaims/driver" not in self.rights:  # an error of validation, of the whole object
            needed = 'resource="resourceclaims/driver", verb="[associated-node:patch arbitrary-node:patch]"'
            return 422, _status(f"status.devices: Forbidden: changing status.devices requires {needed} permission")
        for device in body["status"]["devices"]:
            check_device_status(device)
            if _key(device) not in allocated:
                return 422, _status("status.devices: must be an allocated device in the claim")
        applied = {_key(each): each for each in found["status"].get("devices", [])}
        # An entry that the manager applied before, and does not now, is removed: it owns those of its driver.
        (manager,) = parse_qs(query)["fieldManager"]
        others = {key: each for key, each in applied.items() if each["driver"] != manager}
        status = {**found["status"], "devices": [*others.values(), *body["status"]["devices"]]}
        return 200, self.put(path, {**found, "status": status})

    def _kept(self, body: Document, before: Document | None) -> Document:
        """Return an object in its stored form, in the place of another one.

        A field of a feature that is off is dropped, unless the other object has it. A taint gets the present time,
        unless it has one.
        """
        kept = copy.deepcopy(body)
        spec = kept.get("spec", {})
        if "devices" in spec and not spec["devices"]:
            del spec["devices"]
        for device in [] if self.shares_devices else spec.get("devices", []):
            device.pop("allowMultipleAllocations", None)
            for capacity in device["capacity"].values():
                capacity.pop("requestPolicy", None)
        had_taints = any(each.get("taints") for each in (before or {}).get("spec", {}).get("devices", []))
        for device in spec.get("devices", []):
            if not (self.taints_devices or had_taints):
                device.pop("taints", None)
            check_device(device)
            for taint in device.get("taints", []):
                check_taint(taint)
                taint.setdefault("timeAdded", f"at version {self.version}")
        return kept


def _key(device: Mapping[str, Any]) -> tuple[Any, ...]:
    return device["driver"], device["pool"], device["device"], device.get("shareID")


def check_device_status(device: Mapping[str, Any]) -> None:
    """Check an entry of a claim's status like Kubernetes: its conditions, and the size of its data."""
    assert len(device["conditions"]) <= 8
    for each in device["conditions"]:
        assert each["status"] in {"True", "False", "Unknown"}
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", each["reason"])
        assert len(each["message"]) <= 32768
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", each["lastTransitionTime"])
    assert isinstance(device["data"], dict)
    assert len(json.dumps(device["data"])) <= 10 * 1024


_DOMAIN: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_NAME: Final = re.compile(rf"((?=.{{1,63}}/){_DOMAIN}/)?[a-zA-Z_][a-zA-Z0-9_]{{0,31}}")
"""A qualified name: a C identifier, perhaps with a domain. Source: QualifiedName, resource.k8s.io/v1."""

_SEMVER: Final = re.compile(r"(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)")


def check_device(device: Mapping[str, Any]) -> None:
    """Check a device like Kubernetes: its name, and the names, number, types and lengths of its attributes."""
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", device["name"])
    assert len(device["attributes"]) + len(device["capacity"]) <= 32
    for name in (*device["attributes"], *device["capacity"]):
        assert _NAME.fullmatch(name), name
    for value in device["attributes"].values():
        ((kind, one),) = value.items()
        types: dict[str, type] = {"int": int, "string": str, "version": str, "bool": bool}
        assert isinstance(one, types[kind])
        assert kind != "version" or _SEMVER.fullmatch(str(one)), one
        assert len(str(one)) <= 64


def check_taint(taint: Mapping[str, Any]) -> None:
    """Check a taint of a device like Kubernetes: the key is a label's name, the value a label's, the effect known."""
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", taint["key"])
    assert re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", taint["value"])
    assert taint["effect"] in {"None", "NoSchedule", "NoExecute"}


def merged(document: Mapping[str, Any], patch: Mapping[str, Any]) -> Document:
    """Return an object with a merge patch applied, as in RFC 7386."""
    result = copy.deepcopy(dict(document))
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict):
            before = result.get(name)
            result[name] = merged(before if isinstance(before, dict) else {}, value)
        else:
            result[name] = value
    return result


def _status(message: str) -> Document:
    return {"kind": "Status", "apiVersion": "v1", "message": message}


class _Handler(http.server.BaseHTTPRequestHandler):
    api_server: ApiServer
    protocol_version = "HTTP/1.1"
    timeout = 30

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length", "0"))
        raw = self.rfile.read(length)
        body = json.loads(raw) if raw else None
        token = self.headers.get("Authorization", "")
        kind = self.headers.get("Content-Type", "")
        status, document = self.api_server.answer(self.command, self.path, body, token, kind)
        encoded = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if self.api_server.retry_after is not None:
            self.send_header("Retry-After", self.api_server.retry_after)
            self.api_server.refusal = self.api_server.retry_after = None
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815 - as the library calls them

    def log_message(self, *_: object) -> None:
        """Log nothing."""
