"""Which requests are served: what a request says about where it comes from, and what is refused. Pure.

Any page in the same browser can send requests to a loopback port, and by a name of its own that resolves there (DNS
rebinding) even read the answers. So a request has to name this very server as its host, come from this page, and, for
all that is about the node, carry a session, which a browser does not add by itself as it does a cookie.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from mpsd.cli.web.sessions import ANOTHER_LINK

_OWN: Final = frozenset({"same-origin"})
_BY_HAND: Final = frozenset({"same-origin", "none"})
_DOCUMENT: Final = "document"
_SAFE: Final = frozenset({"GET", "HEAD"})
_BEARER: Final = "Bearer "


class Refusal(NamedTuple):
    """Why a request is not served, as the fields of a problem document."""

    status: int
    code: str
    detail: str
    hint: str


class Head(NamedTuple):
    """What a request says before its body; the names of headers are in lower case."""

    method: str
    path: str
    headers: Mapping[str, Sequence[str]]

    def only(self, name: str) -> str | None:
        """Return the one value of a header; None where it is absent, or there several times."""
        values = self.headers.get(name, ())
        return values[0] if len(values) == 1 else None

    @property
    def session(self) -> str:
        """The session that it carries; an empty text for none."""
        said = self.only("authorization") or ""
        return said.removeprefix(_BEARER) if said.startswith(_BEARER) else ""


def refusal_of_site(head: Head, port: int, *, is_page: bool, is_asset: bool) -> Refusal | None:
    """Return why a request of another site is refused; None for one of this page, or of a user's own hand.

    `is_page` is the document itself, which holds nothing of the node and may be opened from anywhere, but not framed;
    `is_asset` what that loads.
    """
    host = head.only("host")
    if host not in {f"127.0.0.1:{port}", f"localhost:{port}"}:
        return Refusal(
            403,
            "not_permitted",
            "the request does not name this server as its host",
            f"open http://127.0.0.1:{port}/; through ssh, forward the same port: ssh -L {port}:127.0.0.1:{port}",
        )
    if "sec-fetch-site" in head.headers:
        site = head.only("sec-fetch-site")
        if is_page and head.method in _SAFE:
            foreign = head.only("sec-fetch-dest") != _DOCUMENT
        else:
            foreign = site not in (_BY_HAND if is_asset else _OWN)
        if foreign:
            return _OTHER_SITE
    if "origin" in head.headers or head.method not in _SAFE:
        return None if head.only("origin") == f"http://{host}" else _OTHER_SITE
    return None


NO_SESSION: Final = Refusal(401, "no_session", "the request has no session of this mpsctl web", ANOTHER_LINK)

_OTHER_SITE: Final = Refusal(
    403, "not_permitted", "the request comes from another site", "open the link that mpsctl web printed"
)
