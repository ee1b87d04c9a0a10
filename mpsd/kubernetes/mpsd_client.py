"""mpsd as this program calls it: by mpsd's own client, with retries during a restart."""

import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from mpsd.client import Api
from mpsd.core import gpus
from mpsd.core.containers.cdi import TOKEN
from mpsd.core.errors import InvalidRequestError, NotFoundError, StoppingError, UnreachableError
from mpsd.core.kubernetes import claims
from mpsd.core.kubernetes.claims import Claimed, Held
from mpsd.core.kubernetes.devices import Gpu
from mpsd.core.kubernetes.settings import Settings
from mpsd.core.model import Health
from mpsd.core.units import MIB
from mpsd.system import clock

if TYPE_CHECKING:
    from mpsd.client import answer_types

T = TypeVar("T")

LeaseAnswer: TypeAlias = "answer_types.Lease"
"""A lease in the form of mpsd's answer."""

PATIENCE: Final = 10.0
"""Seconds for which calls to an mpsd that does not answer are retried: a new one may be starting."""

_PAUSE: Final = 0.2

_LOOK: Final = 10.0
"""Seconds without an event, and also among events, after which mpsd is asked again: it may have stopped, and a reason
may have other words."""

_TELLING: Final = frozenset({"gpu_admission", "gpu_found", "settings_reloaded"})
"""The events after which the GPUs to offer, or mpsd's verdict on one of them, may be others."""
_ANSWER: Final = 10.0
"""Seconds for an answer, in addition to the wait that the request contains."""


class Mpsd:
    """mpsd on this node. Any thread may call; each call has its own connection.

    Every method raises UnreachableError when mpsd does not answer, and the errors of mpsd's answers.
    """

    def __init__(self, settings: Settings, ended: threading.Event) -> None:
        """`ended` is set when this program ends: all waits then end."""
        self._settings, self._socket = settings, str(settings.socket)
        self._ended = ended

    def seen(self) -> list[Gpu]:
        """Return the GPUs that mpsd reports, with their control daemons; makes one attempt only."""
        with Api(self._socket, deadline=_ANSWER) as api:
            daemons = {each["gpu"]: each for each in api.daemons()["daemons"]}
            return [
                _gpu(each, daemons[uuid])
                for each in api.gpus()["gpus"]
                if (uuid := each["uuid"]) is not None and uuid in daemons
            ]

    def await_change(self, after: int) -> int:
        """Wait for an event that changes what can be granted, or for some seconds; return the last event's number.

        Afterwards the caller must query mpsd: a stopped mpsd keeps its connections open and sends nothing.
        """
        end = clock.monotonic() + _LOOK
        try:
            with Api(self._socket, deadline=_ANSWER) as api:
                for _, event in api.lines(f"/v1/events?after={after}&follow=true", silence=_LOOK):
                    name, number = _event(event)
                    after = max(after, number)
                    if name in _TELLING or clock.monotonic() >= end:
                        return after
        except UnreachableError:
            return after
        except InvalidRequestError:  # mpsd no longer has the event `after`
            return self.latest_event()
        return after

    def latest_event(self) -> int:
        with Api(self._socket, deadline=_ANSWER) as api:
            return max((_event(event)[1] for _, event in api.lines("/v1/events?after=0&follow=false")), default=0)

    def events_to_come(self, heartbeat: int) -> Iterator[object]:
        """Yield mpsd's further events, and after so many seconds without one, a heartbeat."""
        path = f"/v1/events?after=latest&follow=true&heartbeat={heartbeat}"
        with Api(self._socket, deadline=_ANSWER) as api:
            for _, event in api.lines(path, silence=heartbeat + _ANSWER):
                yield event

    def claimed(self) -> list[Claimed]:
        """Return the leases that are for containers of Kubernetes."""
        return [found for each, held in self.leases() if held and (found := _claimed(each, held)) is not None]

    def leases(self) -> list[tuple[LeaseAnswer, Held | None]]:
        """Return all leases that have not ended, without their tokens, and how those of pods are held."""
        now, leases = clock.now(), self._patiently(lambda api: api.leases()["leases"])
        return [(each, claims.held(each, now, self._settings)) for each in leases]

    def lease(self, lease: str) -> LeaseAnswer:
        """Return a lease with its environment and token. Raises NotFoundError."""
        return self._patiently(lambda api: api.lease(lease))

    def attach(self) -> str:
        """Return mpsd's strictness: `enforcement.attach`."""
        return str(self._patiently(lambda api: api.config()["config"]["enforcement"]["attach"]))

    def end(self, lease: str) -> None:
        """End the clients of a lease, and then the lease."""
        try:
            self._patiently(lambda api: api.end(lease))
        except NotFoundError:
            return  # the lease has ended already

    def admit(self, request: Mapping[str, object], wait: float) -> LeaseAnswer:
        """Request a lease; a repeated request with the same `request_id` returns the same lease."""
        return self._patiently(lambda api: api.admit(request, deadline=wait + _ANSWER))

    def take(self, lease: str, group: str, user: tuple[int, int]) -> None:
        """Let the control group of a pod take a claim for a user, for as long as the group exists.

        The request has the lease's token: the holder of a taken claim may then repeat it, as after a lost answer.
        """
        uid, gid = user
        holder = {"cgroup": group, "while": "exists", "owner": {"uid": uid, "gid": gid}}
        token = self._patiently(lambda api: api.lease(lease)["env"].get(TOKEN, ""))
        self._patiently(lambda api: api.hold(lease, {**holder, "token": token}, deadline=2 * _ANSWER))

    def renew(self, lease: str, deadline: float, uid: int | None = None) -> None:
        """Set the remaining time of a claim, or turn a lease into a claim for this uid."""
        claim = {"deadline": deadline} if uid is None else {"deadline": deadline, "uid": uid}
        self._patiently(lambda api: api.hold(lease, {"claim": claim, "replace": True}, deadline=_ANSWER))

    def release(self, lease: str, *, is_claim: bool) -> None:
        """End a lease; a claim only if no holder has taken it."""
        end: Callable[[Api], None] = lambda api: api.release_untaken(lease) if is_claim else api.release(lease)  # noqa: E731
        try:
            self._patiently(end)
        except NotFoundError:
            return  # the lease has ended already

    def _patiently(self, ask: Callable[[Api], T]) -> T:
        end = clock.monotonic() + PATIENCE
        while True:
            try:
                with Api(self._socket, deadline=_ANSWER) as api:
                    return ask(api)
            except (UnreachableError, StoppingError) as error:
                if not error.retryable or clock.monotonic() > end or self._ended.wait(_PAUSE):
                    raise


def _event(event: object) -> tuple[str, int]:
    """Return the name and the number of an event."""
    match event:
        case {"event": str(name), "seq": int(number)}:
            return name, number
        case _:
            return "", 0


def _gpu(gpu: "answer_types.Gpu", daemon: "answer_types.Daemon") -> Gpu:
    version = daemon["version"]
    return Gpu(
        uuid=daemon["gpu"],
        mebibytes=max((gpu["memory_total"] or 0) - gpu["memory_reserved"], 0) // MIB,
        pipe_directory=daemon["pipe_directory"],
        driver=None if version is None else gpus.driver_branch(version),
        because=gpu["refused"] or "",
        kind=gpu.get("refused_kind") or "refused",  # an mpsd of an earlier release does not have it, nor what follows
        impaired=gpu.get("impaired") or "",
        is_known=gpu["health"] != Health.UNKNOWN,
        position=gpu["index"],
        model=gpu["name"] or "",
        version=version or "",
        tenths=int(gpu["threads_total"] * 10),
        hardware=gpu.get("hardware"),
    )


def _claimed(lease: LeaseAnswer, held: Held) -> Claimed | None:
    granted, numbers = lease["granted"], claims.devices_of(lease["labels"])
    if granted is None or numbers is None:
        return None
    return Claimed(held, lease["gpus"][0], numbers, (clock.now() - datetime.fromisoformat(granted)).total_seconds())
