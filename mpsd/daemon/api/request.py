"""What a handler gets of a request."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from mpsd.core.roles import UserIdentity
from mpsd.daemon.api import lease_schema, schema
from mpsd.system.credentials import PeerCredentials
from mpsd.system.process import Process


class Request(NamedTuple):
    """A request as a handler gets it: who calls, what the path names, and the body's value."""

    credentials: PeerCredentials
    user: UserIdentity
    admin: bool
    process: Callable[[], Process | None]
    """Watches the process that connected, for as long as its connection is open; None where it is not to be seen."""
    has_left: Callable[[], bool]
    """Tells whether nobody waits for the answer any more."""
    names: Mapping[str, str]
    body: lease_schema.LeaseRequest | lease_schema.RenewRequest | schema.DrainRequest | None = None
