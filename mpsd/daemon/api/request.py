"""The form in which a handler gets a request, and the base classes of the two values that a request may contain."""

from collections.abc import Mapping
from typing import ClassVar

from msgspec import Struct

from mpsd.core.model import Lease
from mpsd.core.roles import Role, UserIdentity
from mpsd.core.settings import Settings
from mpsd.daemon.http.peer import Peer
from mpsd.system.sockets.credentials import PeerCredentials


class RequestBody(Struct, forbid_unknown_fields=True):
    """The base of each type that a route takes as its JSON body; an unknown field is refused."""

    forms: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """For a body that must have one of several sets of fields: each set by the name of its schema in the API's
    document."""


class RequestQuery(Struct, frozen=True):
    """The base of each type that a route takes as its query parameters; `decoding.parameter` describes a field."""


class Request(Struct, frozen=True):
    """A request as its handler gets it: the caller, the names in the path, and the typed query and body.

    `query` and `body` have the types that the route's row names, and are None where it names none.
    """

    credentials: PeerCredentials
    user: UserIdentity
    admin: bool
    operator: bool
    """Whether it may hold, drain and resume control daemons, as an administrator may too."""
    role: Role
    peer: Peer
    """The process that connected, and whether it still waits for the answer."""
    names: Mapping[str, str]
    query: RequestQuery | None = None
    body: RequestBody | None = None
    accept: str = ""
    """The media types that the caller accepts, if its request names any."""


def is_own(request: Request, lease: Lease) -> bool:
    """Tell whether a lease is the caller's own, or the caller an administrator."""
    return request.admin or lease.owner.uid == request.credentials.uid


def may_see(request: Request, settings: Settings, lease: Lease) -> bool:
    """Tell whether the caller may see this lease, and not only sums that include it."""
    return settings.api.open or is_own(request, lease)
