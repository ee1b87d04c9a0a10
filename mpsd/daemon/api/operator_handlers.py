"""The operator routes. A command to a control daemon is stored, and can be queried until it is finished."""

import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from mpsd.core.errors import InvalidRequestError, NotFoundError, NotPermittedError
from mpsd.core.reload import ReloadResult
from mpsd.core.supervision.drain import Intent, OperatorCommand, Outcome
from mpsd.core.supervision.wedge import Cause, Suspicion
from mpsd.daemon.api import schema
from mpsd.daemon.api.request import Request, RequestBody
from mpsd.daemon.api.schema import about
from mpsd.daemon.control.supervisor import Supervisor
from mpsd.daemon.node.node import Node
from mpsd.system import clock

_MOST_DIGITS: Final = 10
"""Digits of the largest uid."""

_MOST_DONE: Final = 256
"""Completed operations that can still be queried."""


class ReloadOut(msgspec.Struct):
    __doc__ = "The result of reloading the configuration."

    applied: Annotated[list[str], about("Settings that changed and are now in force, except where `daemons` has them.")]
    needs_restart: Annotated[list[str], about("Settings that changed and take effect at the next start of mpsd.")]
    daemons: Annotated[
        dict[str, list[str]],
        about(
            "By control daemon, the settings that it gets when it next starts, which is not before its leases and"
            " clients have ended."
        ),
    ]
    unknown: Annotated[str, about("A sentence about unknown names of users and groups; empty where all are known.")]


_Reason: TypeAlias = Annotated[
    Annotated[str, Meta(max_length=200)] | None,
    about(
        "In the operator's words, for users whose requests are refused because of it; one line without control"
        " characters."
    ),
]


class HoldRequest(RequestBody):
    __doc__ = "The reason why admission is stopped."

    reason: _Reason = None


class DrainRequest(RequestBody):
    __doc__ = "The time that the present clients have, and the reason for the drain."

    timeout: Annotated[
        Annotated[float, Meta(ge=0, le=1e9)] | None, about("Seconds after which they are ended; null: no limit.")
    ] = None
    reason: _Reason = None


class OperatorHandlers:
    """The handlers of the operator routes, on one node."""

    def __init__(self, node: Node, reload: Callable[[], Awaitable[ReloadResult]]) -> None:
        """Take `reload`, which reads the configuration again and raises ConfigurationError."""
        self._node = node
        self._reload = reload
        self._operations: OrderedDict[str, schema.OperationOut] = OrderedDict()

    async def reload(self, request: Request) -> ReloadOut:  # noqa: ARG002 - a handler's signature
        """Read the configuration again, and apply what changed; an invalid one changes nothing."""
        done = await self._reload()
        daemons = {name: [*settings] for name, settings in done.daemons.items()}
        return ReloadOut(list(done.applied), list(done.needs_restart), daemons, done.unknown)

    async def reset(self, request: Request) -> schema.OperationOut:
        """Clear a control daemon's deaths, and the reports and the compute mode's state of its GPU; then try again."""
        supervisor = self._node.control_daemons.supervisor(request.names["name"])
        supervisor.reset()
        self._node.gpus.reset(supervisor.gpu.uuid)
        return self._done(request, supervisor, "reset", "reset")

    async def hold(self, request: Request) -> schema.OperationOut:
        """Stop admission to a control daemon until it is resumed; stored before the answer."""
        assert isinstance(request.body, HoldRequest)  # noqa: S101 - the route table says so
        supervisor = self._node.control_daemons.supervisor(request.names["name"])
        because = f"uid {request.credentials.uid} holds it{_quoted(request.body.reason)}"
        supervisor.intend(OperatorCommand(Intent.HOLD, because))
        return self._done(request, supervisor, "hold", "holds")

    async def resume(self, request: Request) -> schema.OperationOut:
        """Resume admission; stored before the answer."""
        supervisor = self._node.control_daemons.supervisor(request.names["name"])
        self._node.control_daemons.resume(supervisor, f"uid {request.credentials.uid} resumed it")
        return self._done(request, supervisor, "resume", "resumed")

    async def drain(self, request: Request) -> schema.OperationOut:
        """Stop admission, and wait until no client or lease is left; stored before the answer."""
        return self._begun(request, Intent.DRAIN, "drains it")

    async def restart(self, request: Request) -> schema.OperationOut:
        """Replace a control daemon when no client or lease is left; stored before the answer."""
        return self._begun(request, Intent.RESTART, "restarts it")

    def _begun(self, request: Request, intent: Intent, does: str) -> schema.OperationOut:
        """Begin a long operation, or join one that has begun already, and return it."""
        assert isinstance(request.body, DrainRequest)  # noqa: S101 - the route table says so
        supervisor, timeout = self._node.control_daemons.supervisor(request.names["name"]), request.body.timeout
        if timeout is not None and not request.admin:
            raise NotPermittedError(
                "a drain with a timeout ends the leases of other users, which needs the role admin",
                hint="drain without a timeout, or ask an administrator",
                limit="timeout",
            )
        because = f"uid {request.credentials.uid} {does}{_quoted(request.body.reason)}"
        operation = supervisor.drainer.operation(
            supervisor.intend(OperatorCommand(intent, because, _operation_id(), timeout))
        )
        assert operation is not None  # noqa: S101 - it was stored just now
        return schema.OperationOut.of(operation)

    def _done(self, request: Request, supervisor: Supervisor, verb: str, did: str) -> schema.OperationOut:
        """Keep a finished operation, and return it."""
        name, now, state = supervisor.name, clock.now(), supervisor.snapshot().state
        because = f"uid {request.credentials.uid} {did} {name}; it is {state}"
        done = schema.OperationOut(_operation_id(), name, verb, Outcome.DONE, because, now, now, [])
        self._operations[done.id] = done
        while len(self._operations) > _MOST_DONE:
            self._operations.popitem(last=False)
        return done

    async def canary(self, request: Request) -> schema.CanaryOut:
        """Send a canary to a control daemon, after one that runs."""
        supervisor = self._node.control_daemons.supervisor(request.names["name"])
        reason = Suspicion(Cause.COMMAND, f"uid {request.credentials.uid} wants to know whether it serves")
        return schema.CanaryOut.of(supervisor.name, await self._node.control_daemons.examine(supervisor, reason))

    async def pardon(self, request: Request) -> None:
        """Lift the quarantine of a uid; stored before the answer."""
        uid = request.names["uid"]
        if not (uid.isascii() and uid.isdecimal() and len(uid) <= _MOST_DIGITS):
            raise NotFoundError(f"{uid!r} is not a uid", hint="those that are quarantined: mpsctl status")
        self._node.quarantine.pardon(int(uid), request.credentials.uid)

    async def operation(self, request: Request) -> schema.OperationOut:
        operation = request.names["id"]
        if operation in self._operations:
            return self._operations[operation]
        found = self._node.control_daemons.operation(operation)
        if found is None:
            raise NotFoundError(
                f"there is no operation {operation!r}",
                hint="operations are kept until mpsd restarts; of drains and restarts, the last few of each"
                " control daemon are kept for good",
            )
        return schema.OperationOut.of(found)


def _quoted(reason: str | None) -> str:
    """Return an operator's reason in the form for sentences. Raises InvalidRequestError for more than one line."""
    words = "" if reason is None else reason.strip()
    if not words.isprintable():
        raise InvalidRequestError(
            "reason has characters that cannot be printed", hint="write it as one line of text", limit="reason"
        )
    return f" ({words})" if words else ""


def _operation_id() -> str:
    return f"op-{secrets.token_hex(5)}"
