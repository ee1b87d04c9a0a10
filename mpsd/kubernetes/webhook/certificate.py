"""The certificate of the webhook: made by OpenSSL's program, stored in a Secret, and trusted by the API server.

It is its own authority: the configuration of the webhook trusts it, and nothing else does. A job of the cluster renews
it, with the right to read and to patch these two objects; the webhook itself has no rights.
"""

import base64
import binascii
import re
import ssl
import threading
from collections.abc import Mapping, Sequence
from typing import Final, cast

from mpsd.core.errors import ConfigurationError, InternalError, UnreachableError
from mpsd.core.kubernetes.settings import Settings
from mpsd.kubernetes import api_server
from mpsd.kubernetes.api_server import ApiServer, ConflictError, Document
from mpsd.kubernetes.log import EventName, Log
from mpsd.system import clock
from mpsd.system.processes import foreground

_DAYS: Final = 365
_RENEWED_BEFORE: Final = 180 * 86400
"""Seconds before its end in which a certificate is renewed: half a year of failures harms nobody."""

_TRIES: Final = 3
"""Attempts beside other jobs that write the same objects."""

_CERTIFICATE: Final = re.compile(r"-----BEGIN CERTIFICATE-----[^-]+-----END CERTIFICATE-----\n")
_CONFIGURATIONS: Final = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


def end_of(certificate: str, host: str = "") -> float:
    """Return when a certificate in PEM ends, in seconds since 1970; 0.0 if it is none, or none for this host."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=certificate)
    except (ssl.SSLError, ValueError):
        return 0.0
    found = context.get_ca_certs()
    if len(found) != 1 or (host and ("DNS", host) not in cast("Sequence[object]", found[0].get("subjectAltName", ()))):
        return 0.0
    return float(ssl.cert_time_to_seconds(str(found[0]["notAfter"])))


def run(settings: Settings, environment: Mapping[str, str], name: str, log: Log) -> None:
    """Renew the certificate of this name in the namespace of this pod, if it is due. Raises MpsdError."""
    api = ApiServer(api_server.place(settings, environment), threading.Event())
    try:
        namespace = (settings.service_account / "namespace").read_text(encoding="ascii")
    except OSError as error:
        raise ConfigurationError(f"the namespace is not known: {error}", hint="run it in a pod of the chart") from None
    renewal = Renewal(api, namespace, name, log)
    for _ in range(_TRIES):
        try:
            renewal.run()
        except ConflictError:
            continue
        return
    raise UnreachableError(f"others write to Secret {name} all the time", hint="see which other jobs have this name")


class Renewal:
    """Brings a certificate for the Service of a name to the Secret and the configuration of the same name."""

    def __init__(self, api: ApiServer, namespace: str, name: str, log: Log) -> None:
        self._api = api
        self._log = log
        self._host = f"{name}.{namespace}.svc"
        self._secret = f"/api/v1/namespaces/{namespace}/secrets/{name}"
        self._configuration = f"{_CONFIGURATIONS}/{name}"

    def run(self) -> None:
        """Renew the certificate if it is due, and have the configuration trust it.

        A new one is trusted before it is stored, beside the previous one: the webhook has either of them until kubelet
        has brought it the new one. Raises MpsdError, and ConflictError where another writer was faster.
        """
        now = clock.now().timestamp()
        secret, configuration = self._api.document("GET", self._secret), self._api.document("GET", self._configuration)
        stored = _decoded(_member(secret, "data").get("tls.crt"))
        if end_of(stored, self._host) > now + _RENEWED_BEFORE:
            self._trust(configuration, stored, "")
            return
        certificate, key = make(self._host)
        self._trust(configuration, certificate, stored if end_of(stored) > now else "")
        data = {"tls.crt": _encoded(certificate), "tls.key": _encoded(key)}
        self._api.document("PATCH", self._secret, {"metadata": _version(secret), "data": data})
        self._log.info(EventName.CERTIFICATE_RENEWED, host=self._host, days=_DAYS)

    def _trust(self, configuration: Document, certificate: str, before: str) -> None:
        """Have the configuration trust a certificate, and the one before it; nothing where it does already."""
        webhooks = cast("Sequence[Document]", configuration.get("webhooks") or ())
        clients = [_member(each, "clientConfig") for each in webhooks]
        if all(certificate in _decoded(each.get("caBundle")) for each in clients):
            return
        bundle = _encoded(certificate + before)
        changed = [
            {**each, "clientConfig": {**client, "caBundle": bundle}}
            for each, client in zip(webhooks, clients, strict=True)
        ]
        self._api.document("PATCH", self._configuration, {"metadata": _version(configuration), "webhooks": changed})
        self._log.info(EventName.CERTIFICATE_TRUSTED, host=self._host)


def make(host: str) -> tuple[str, str]:
    """Make a certificate for a host, and its key, in PEM. Raises ConfigurationError and InternalError."""
    extensions = (
        f"subjectAltName=DNS:{host}", "basicConstraints=critical,CA:TRUE",
        "keyUsage=critical,digitalSignature,keyCertSign", "extendedKeyUsage=serverAuth",
    )  # fmt: skip
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
        "-config", "/dev/null", "-days", f"{_DAYS}", "-subj", "/O=mpsd/CN=webhook", "-keyout", "-", "-out", "-",
        *(word for each in extensions for word in ("-addext", each)),
    ]  # fmt: skip
    try:
        status, said = foreground.output(command, {}, quiet=True)  # it writes a line of dashes
    except FileNotFoundError:
        raise ConfigurationError("there is no openssl here", hint="run it in mpsd's image, which has it") from None
    found = _CERTIFICATE.search(f"{said}\n")
    if status or found is None:
        raise InternalError(f"openssl made no certificate: status {status}", hint="report this, with openssl's version")
    return found[0], f"{said[: found.start()]}"


def _decoded(value: object) -> str:
    try:
        return base64.b64decode(value if isinstance(value, str) else "", validate=True).decode("ascii")
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode("ascii")).decode("ascii")


def _member(document: Document, name: str) -> Document:
    found = document.get(name)
    return cast("Document", found) if isinstance(found, dict) else {}


def _version(document: Document) -> Document:
    """Return the metadata by which the API server refuses a patch of an object that has changed since."""
    return {"resourceVersion": _member(document, "metadata").get("resourceVersion")}
