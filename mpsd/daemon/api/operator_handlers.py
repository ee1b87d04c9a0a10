"""The operator routes. A command to a control daemon is stored, and can be queried until it is finished."""

import secrets
from collections.abc import Awaitable, Callable
from typing import Annotated, Final

from mpsd.client import answer_types
from mpsd.core.errors import InvalidRequestError, NotFoundError, NotPermittedError
from mpsd.core.lifecycle import State
from mpsd.core.reload import ReloadResult
from mpsd.core.supervision.drain import Intent, OperatorCommand, Outcome
from mpsd.core.supervision.wedge import Cause, Suspicion
from mpsd.daemon.api import rendering
from mpsd.daemon.api.bodies import DrainRequest, HoldRequest
from mpsd.daemon.api.decoding import parameter
from mpsd.daemon.api.table import Request, RequestOf, RequestQuery
from mpsd.daemon.control.supervisor import Supervisor
from mpsd.daemon.node.node import Node
from mpsd.system import clock

_MOST_DIGITS: Final = 10
"""Digits of the largest uid; a pid has fewer."""

_MOST_DONE: Final = 256
"""Completed operations that can still be queried."""


class QuarantineQuery(RequestQuery, frozen=True):
    """The quarantined control group that a caller pardons."""

    cgroup: Annotated[str, parameter("The path of the control group, as `/v1/quarantines` has it.")] = ""


class OperatorHandlers:
    """The handlers of the operator routes, on one node."""

    def __init__(self, node: Node, reload: Callable[[], Awaitable[ReloadResult]]) -> None:
        """Take `reload`, which reads the configuration again and raises ConfigurationError."""
        self._node = node
        self._reload = reload
        self._operations: dict[str, answer_types.Operation] = {}

    async def reload(self, _: Request) -> answer_types.Reload:
        """Read the configuration again, and apply what changed; an invalid one changes nothing."""
        done = await self._reload()
        daemons = {name: [*settings] for name, settings in done.daemons.items()}
        return answer_types.Reload(
            applied=list(done.applied), needs_restart=list(done.needs_restart), daemons=daemons, unknown=done.unknown
        )

    async def reset(self, request: Request) -> answer_types.Operation:
        """Clear a control daemon's deaths, and the reports and the compute mode's state of its GPU; then try again."""
        supervisor = self._node.control_daemons.supervisor(request.names["name"])
        supervisor.reset()
        self._node.gpus.reset(supervisor.gpu.uuid)
        return self._done(request, supervisor, "reset", "reset")

    async def hold(self, request: RequestOf[HoldRequest]) -> answer_types.Operation:
        """Stop admission to a control daemon until it is resumed; stored before the answer."""
        supervisor = self._node.control_daemons.supervisor(request.names["name"])
        because = f"uid {request.uid} holds it{_quoted(request.content.reason)}"
        supervisor.intend(OperatorCommand(Intent.HOLD, because))
        return self._done(request, supervisor, "hold", "holds")

    async def resume(self, request: Request) -> answer_types.Operation:
        """Resume admission; stored before the answer."""
        supervisor = self._node.control_daemons.supervisor(request.names["name"])
        self._node.control_daemons.resume(supervisor, f"uid {request.uid} resumed it")
        return self._done(request, supervisor, "resume", "resumed")

    async def drain(self, request: RequestOf[DrainRequest]) -> answer_types.Operation:
        """Stop admission, and wait until no client or lease is left; stored before the answer."""
        return self._begun(request, Intent.DRAIN, "drains it")

    async def restart(self, request: RequestOf[DrainRequest]) -> answer_types.Operation:
        """Replace a control daemon when no client or lease is left; stored before the answer."""
        return self._begun(request, Intent.RESTART, "restarts it")

    def _begun(self, request: RequestOf[DrainRequest], intent: Intent, does: str) -> answer_types.Operation:
        """Begin a long operation, or join one that has begun already, and return it."""
        supervisor, timeout = self._node.control_daemons.supervisor(request.names["name"]), request.content.timeout
        if timeout is not None and not request.principal.admin:
            raise NotPermittedError(
                "a drain with a timeout ends the leases of other users, which needs the role admin",
                hint="drain without a timeout, or ask an administrator",
                limit="timeout",
            )
        because = f"uid {request.uid} {does}{_quoted(request.content.reason)}"
        operation = supervisor.drainer.operation(
            supervisor.intend(OperatorCommand(intent, because, _operation_id(), timeout))
        )
        assert operation is not None  # noqa: S101 - it was stored just now
        return rendering.operation(operation)

    def _done(self, request: Request, supervisor: Supervisor, verb: str, did: str) -> answer_types.Operation:
        """Keep a finished operation, and return it."""
        name, now, state = supervisor.name, rendering.time(clock.now()), supervisor.snapshot().state
        because = f"uid {request.uid} {did} {name}; it {'starts' if state is State.DOWN else f'is {state}'}"
        done = answer_types.Operation(
            id=_operation_id(),
            daemon=name,
            verb=verb,
            state=Outcome.DONE,
            because=because,
            started=now,
            ended=now,
            waits_for=[],
        )
        self._operations[done["id"]] = done
        if len(self._operations) > _MOST_DONE:
            del self._operations[next(iter(self._operations))]
        return done

    async def canary(self, request: Request) -> answer_types.Canary:
        """Send a canary to a control daemon, after one that runs."""
        supervisor = self._node.control_daemons.supervisor(request.names["name"])
        reason = Suspicion(Cause.COMMAND, f"uid {request.uid} wants to know whether it serves")
        return rendering.canary(supervisor.name, await self._node.control_daemons.watches.examine(supervisor, reason))

    async def pardon_group(self, request: RequestOf[QuarantineQuery]) -> None:
        """Lift the quarantine of a control group; stored before the answer."""
        self._node.quarantine.pardon(request.content.cgroup, request.uid)

    async def pardon(self, request: Request) -> None:
        """Lift the quarantine of a uid; stored before the answer."""
        uid = _number(request, "uid", hint="those that are quarantined: mpsctl status")
        self._node.quarantine.pardon(uid, request.uid)

    async def end_client(self, request: Request) -> answer_types.Operation:
        """End a client, with a lease or without one; stored before the answer."""
        pid = _number(request, "pid", hint="for those that can be ended: mpsctl clients")
        return rendering.operation(await self._node.client_ends.begin(pid, request.uid))

    async def operation(self, request: Request) -> answer_types.Operation:
        operation = request.names["id"]
        if operation in self._operations:
            return self._operations[operation]
        found = self._node.control_daemons.operation(operation) or self._node.client_ends.operation(operation)
        if found is None:
            raise NotFoundError(
                f"there is no operation {operation!r}",
                hint="operations are kept until mpsd restarts; of drains and restarts, the last few of each"
                " control daemon are kept for good",
            )
        return rendering.operation(found)


def _number(request: Request, name: str, *, hint: str) -> int:
    """Return the number with this name in the path. Raises NotFoundError for any other text."""
    text = request.names[name]
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        raise NotFoundError(f"{text!r} is not a {name}", hint=hint)
    return int(text)


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
