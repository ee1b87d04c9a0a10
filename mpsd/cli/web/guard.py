"""The checks of a request's origin, by its headers, and the refusals. Pure.

Any page in the same browser can send requests to a loopback port; under a name of its own that resolves to the loopback
address (DNS rebinding), it can even read the answers. A request must therefore name this server as its host and come
from this page. A request about the node also needs a session, which a browser does not add by itself as it adds a
cookie.
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
    """The reason why a request is not served, as the fields of a problem document."""

    status: int
    code: str
    detail: str
    hint: str


class Head(NamedTuple):
    """The request line and the headers of a request; the names of headers are in lower case."""

    method: str
    path: str
    headers: Mapping[str, Sequence[str]]

    def only(self, name: str) -> str | None:
        """Return the value of a header; None if it is absent or occurs several times."""
        values = self.headers.get(name, ())
        return values[0] if len(values) == 1 else None

    @property
    def session(self) -> str:
        """The session in the request; an empty text for none."""
        said = self.only("authorization") or ""
        return said.removeprefix(_BEARER) if said.startswith(_BEARER) else ""


def refusal_of_site(head: Head, port: int, *, is_page: bool, is_asset: bool) -> Refusal | None:
    """Return the refusal of a request from another site; None for a request of this page, or one that the user typed.

    `is_page` stands for the document itself, which contains nothing about the node: any site may link to it, but none
    may frame it. `is_asset` stands for the document and the files that it loads.
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
