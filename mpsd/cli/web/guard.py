"""What a request of a browser may do: the checks of its origin, links and sessions, and the routes that are passed on.

Any page in the same browser can send requests to a loopback port; under a name of its own that resolves to the loopback
address (DNS rebinding), it can even read the answers. A request must therefore name this server as its host and come
from this page. A request about the node also needs a session, which a browser does not add by itself as it adds a
cookie.
"""

import re
import secrets
import threading
from collections import deque
from email.message import Message
from hmac import compare_digest
from typing import Final, NamedTuple

from mpsd.core.errors import NotPermittedError

# -- the origin of a request -------------------------------------------------------------------------------------------

ANOTHER_LINK: Final = "press Enter in the terminal of mpsctl web for another link, or start it again"
_OWN: Final = frozenset({"same-origin"})
_BY_HAND: Final = frozenset({"same-origin", "none"})
_DOCUMENT: Final = "document"
_SAFE: Final = frozenset({"GET", "HEAD"})
_BEARER: Final = "Bearer "


def no_session() -> NotPermittedError:
    """Return the refusal of a request about the node without a session; its code is the page's, not of mpsd's API."""
    error = NotPermittedError("the request has no session of this mpsctl web", hint=ANOTHER_LINK)
    error.status, error.code = 401, "no_session"
    return error


class Head(NamedTuple):
    """The method and the headers of a request."""

    method: str
    headers: Message

    def only(self, name: str) -> str | None:
        """Return the value of a header; None if it is absent or occurs several times."""
        values = self.headers.get_all(name, ())
        return values[0] if len(values) == 1 else None

    @property
    def session(self) -> str:
        """The session in the request; an empty text for none."""
        said = self.only("authorization") or ""
        return said.removeprefix(_BEARER) if said.startswith(_BEARER) else ""


def check_site(head: Head, port: int, *, is_page: bool, is_asset: bool) -> None:
    """Raise NotPermittedError for a request from another site; neither this page nor the user has sent that.

    `is_page` stands for the document itself, which contains nothing about the node: any site may link to it, but none
    may frame it. `is_asset` stands for the document and the files that it loads.
    """
    host = head.only("host")
    if host not in {f"127.0.0.1:{port}", f"localhost:{port}"}:
        raise NotPermittedError(
            "the request does not name this server as its host",
            hint=f"open http://127.0.0.1:{port}/; through ssh, forward the same port: ssh -L {port}:127.0.0.1:{port}",
        )
    foreign = False
    if "sec-fetch-site" in head.headers:
        site = head.only("sec-fetch-site")
        if is_page and head.method in _SAFE:
            foreign = head.only("sec-fetch-dest") != _DOCUMENT
        else:
            foreign = site not in (_BY_HAND if is_asset else _OWN)
    if "origin" in head.headers or head.method not in _SAFE:
        foreign = foreign or head.only("origin") != f"http://{host}"
    if foreign:
        raise NotPermittedError("the request comes from another site", hint="open the link that mpsctl web printed")


# -- links and sessions: a link opens the page in one browser, which gets a session for it -----------------------------

_MOST: Final = 8
"""Unused links, used links, and sessions at most, each; one more makes the oldest void."""

_BYTES: Final = 32


class Sessions:
    """Links and sessions, each a random text of 256 bits. It is safe to use from several threads."""

    def __init__(self) -> None:
        """Begin without links and sessions."""
        self._lock = threading.Lock()
        self._links: deque[str] = deque(maxlen=_MOST)
        self._used: deque[str] = deque(maxlen=_MOST)
        self._sessions: deque[str] = deque(maxlen=_MOST)

    def link(self) -> str:
        """Return a token that opens one session."""
        token = secrets.token_urlsafe(_BYTES)
        with self._lock:
            self._links.append(token)
        return token

    def open(self, token: str) -> str:
        """Return a new session for a link, and make the link void. Raises NotPermittedError for any other token."""
        with self._lock:
            if _is_among(token, self._links):
                self._links.remove(token)
                self._used.append(token)
                self._sessions.append(secrets.token_urlsafe(_BYTES))
                return self._sessions[-1]
            if _is_among(token, self._used):
                raise NotPermittedError("this link was used before, and a link opens the page once", hint=ANOTHER_LINK)
        raise NotPermittedError("this link is not one of this mpsctl web", hint=ANOTHER_LINK)

    def knows(self, session: str) -> bool:
        """Tell whether a text is a valid session."""
        with self._lock:
            return _is_among(session, self._sessions)


def _is_among(text: str, secret: deque[str]) -> bool:
    """Tell whether a text is one of the secrets, in a time that reveals nothing about the other secrets."""
    raw = text.encode(errors="surrogateescape")
    return any(compare_digest(raw, each.encode()) for each in secret)


# -- routes ------------------------------------------------------------------------------------------------------------
#
# The server passes on these requests of the API for the page, and no others. It compares a path as it was sent and
# decodes nothing in it, so it passes on no other spelling of a path.

NAME: Final = r"(?!\.+(?:/|\Z))[A-Za-z0-9._-]{1,128}"
"""The name of a lease, a control daemon or an operation, or a pid, as one segment of a path."""


PASSED_ON: Final = (
    ("GET", "/v1/operations/{}"),
    ("POST", "/v1/leases/{}/renew"),
    ("DELETE", "/v1/leases/{}"),
    ("POST", "/v1/clients/{}/end"),
    *(("POST", f"/v1/daemons/{{}}/{verb}") for verb in ("hold", "drain", "resume", "restart", "reset")),
)


def methods_of(target: str) -> frozenset[str]:
    """Return the methods allowed for a path of the API; an empty set for all other paths, and for any query."""
    return frozenset(method for method, path in PASSED_ON if re.fullmatch(path.format(NAME), target, re.ASCII))
