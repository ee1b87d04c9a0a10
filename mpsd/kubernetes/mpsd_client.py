"""mpsd as this program calls it: by mpsd's own client, with retries during a restart."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from mpsd.client import Client
from mpsd.core import gpus
from mpsd.core.containers.cdi import TOKEN
from mpsd.core.dra.prepared import share_of
from mpsd.core.errors import DoesNotFitError, NotFoundError, StoppingError, UnreachableError
from mpsd.core.kubernetes import claims
from mpsd.core.kubernetes.capacity import Use
from mpsd.core.kubernetes.claims import Claimed, Held
from mpsd.core.kubernetes.devices import Gpu, Kind, Numbers, Part
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

_ANSWER: Final = 10.0
"""Seconds for an answer, in addition to the wait that the request contains."""

_INSTANT: Final = 0.001
"""Seconds for an answer that would come too late."""


class Mpsd:
    """mpsd on this node. Any thread may call; each call has its own connection.

    Every method raises UnreachableError when mpsd does not answer, and the errors of mpsd's answers.
    """

    def __init__(self, settings: Settings, ended: threading.Event) -> None:
        """`ended` is set when this program ends: all waits then end."""
        self._settings, self._socket = settings, str(settings.socket)
        self._ended = ended
        self._hurry = threading.local()

    @contextlib.contextmanager
    def hurried(self, seconds: float) -> Iterator[None]:
        """Have the calls of this thread, within the block, end after these seconds in all."""
        self._hurry.end = clock.monotonic() + seconds
        try:
            yield
        finally:
            del self._hurry.end

    def seen(self) -> list[tuple[Gpu, Use | None]]:
        """Return the GPUs that mpsd reports, with their use; makes one attempt only.

        The use is None where it was another one by the second of mpsd's answers.
        """
        with Client(self._socket, deadline=_ANSWER) as api:
            daemons = {each["gpu"]: each for each in api.daemons()["daemons"]}
            gpus, leases = api.gpus(self._settings.uid)["gpus"], api.leases()["leases"]
        now = clock.now()
        held = [each for each in leases if claims.held(each, now, self._settings) is not None]
        return [
            (_gpu(each, daemons[uuid]), _use(each, held) if _is_granted(each, leases) else None)
            for each in gpus
            if (uuid := each["uuid"]) is not None and uuid in daemons
        ]

    def events_to_come(self, heartbeat: int) -> Iterator[object]:
        """Yield mpsd's further events, and after so many seconds without one, a heartbeat."""
        path = f"/v1/events?after=latest&follow=true&heartbeat={heartbeat}"
        with Client(self._socket, deadline=_ANSWER) as api:
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

    def free(self) -> dict[str, Part]:
        """Return the most of each GPU that mpsd can still grant, by UUID."""
        gpus = self._patiently(lambda api: api.gpus(self._settings.uid)["gpus"])
        return {uuid: _free(each) for each in gpus if (uuid := each["uuid"]) is not None}

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
        deadline = None if hasattr(self._hurry, "end") else wait + _ANSWER
        return self._patiently(lambda api: api.admit(request, deadline=deadline))

    def take(self, lease: str, group: str, user: tuple[int, int]) -> None:
        """Let the control group of a pod take a claim for a user, for as long as the group exists.

        The request has the lease's token: the holder of a taken claim may then repeat it, as after a lost answer.
        """
        uid, gid = user
        holder = {"cgroup": group, "while": "exists", "owner": {"uid": uid, "gid": gid}}
        token = self._patiently(lambda api: api.lease(lease)["env"].get(TOKEN, ""))
        self._patiently(lambda api: api.hold(lease, {**holder, "token": token}, deadline=2 * _ANSWER))

    def await_turn(self, lease: str) -> None:
        """Return when further processes can attach to a lease: at once, unless mpsd lets one lease attach at a time."""
        with contextlib.suppress(DoesNotFitError):  # it has all of its processes: the end of each opens it again
            self._patiently(lambda api: api.attach(lease, deadline=2 * _ANSWER))

    def add_holder(self, lease: str, group: str) -> None:
        """Let the control group of a further pod hold a lease, too, for as long as the group exists."""
        holder = {"cgroup": group, "while": "exists"}
        self._patiently(lambda api: api.hold(lease, holder, deadline=2 * _ANSWER))

    def renew(self, lease: str, deadline: float, uid: int | None = None) -> None:
        """Set the remaining time of a claim, or turn a lease into a claim for this uid."""
        claim = {"deadline": deadline} if uid is None else {"deadline": deadline, "uid": uid}
        self._patiently(lambda api: api.hold(lease, {"claim": claim, "replace": True}, deadline=_ANSWER))

    def release(self, lease: str, *, is_claim: bool) -> None:
        """End a lease; a claim only if no holder has taken it."""
        end: Callable[[Client], None] = lambda api: api.release_untaken(lease) if is_claim else api.release(lease)  # noqa: E731
        try:
            self._patiently(end)
        except NotFoundError:
            return  # the lease has ended already

    def _patiently(self, ask: Callable[[Client], T]) -> T:
        hurry: float | None = getattr(self._hurry, "end", None)
        end = clock.monotonic() + PATIENCE if hurry is None else hurry
        while True:
            deadline = _ANSWER if hurry is None else max(hurry - clock.monotonic(), _INSTANT)
            try:
                with Client(self._socket, deadline=deadline) as api:
                    return ask(api)
            except (UnreachableError, StoppingError) as error:
                if not error.retryable or clock.monotonic() > end or self._ended.wait(_PAUSE):
                    raise


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


def _is_granted(gpu: "answer_types.Gpu", leases: Iterable[LeaseAnswer]) -> bool:
    """Tell whether a GPU's sums are those of these leases; an mpsd of an earlier release does not tell what is free."""
    shares = [share for each in leases for share in each["shares"] if share["gpu"] == gpu["uuid"]]
    threads = sum(round(each["active_thread_percentage"] * 10) for each in shares)
    memory = sum(each["pinned_device_mem_limit"] for each in shares)
    is_told = gpu.get("threads_free", -1.0) >= 0
    return is_told and (threads, memory) == (round(gpu["threads_granted"] * 10), gpu["memory_granted"])


def _free(gpu: "answer_types.Gpu") -> Part:
    return Part(round(gpu["threads_free"] * 10), gpu["memory_free"] // MIB)


def _use(gpu: "answer_types.Gpu", leases: Iterable[LeaseAnswer]) -> Use:
    """Return what pods have of a GPU by these leases, and what is free."""
    tenths = mebibytes = 0
    numbers = dict[Kind, Numbers]()
    for lease in (each for each in leases if each["gpus"] == [gpu["uuid"]]):
        if share_of(lease["request_id"]) is not None:
            (share,) = lease["shares"]
            tenths += round(share["active_thread_percentage"] * 10)
            mebibytes += share["pinned_device_mem_limit"] // MIB
        for kind, each in (claims.devices_of(lease["labels"]) or {}).items():
            numbers[kind] = numbers.get(kind, frozenset()) | each
    return Use(_free(gpu), gpu["clients_free"], Part(tenths, mebibytes), numbers)


def _claimed(lease: LeaseAnswer, held: Held) -> Claimed | None:
    granted, numbers = lease["granted"], claims.devices_of(lease["labels"])
    if granted is None or numbers is None:
        return None
    return Claimed(held, lease["gpus"][0], numbers, (clock.now() - datetime.fromisoformat(granted)).total_seconds())
