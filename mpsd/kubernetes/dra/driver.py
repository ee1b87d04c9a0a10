"""The conversion of kubelet's calls into leases of mpsd: a Kubernetes claim gets a claim of mpsd's for each share.

Prepare stores the claim before it claims anything. It answers when the lease exists, its CDI device is written, and, if
the user is known, the lease is open to that user. The pod's control group takes the lease for as long as the group
exists: a restarted container keeps it. Unprepare ends the remaining leases.
"""

import contextlib
import re
import threading
from collections.abc import Iterator
from typing import Final, NamedTuple

from mpsd.core.dra import allocation, prepared
from mpsd.core.dra.prepared import (
    Action,
    Finish,
    Forget,
    PreparedClaim,
    PreparedPod,
    PreparedShare,
    Release,
    Renew,
    Replace,
    ShareLease,
    Stage,
    Take,
)
from mpsd.core.errors import (
    AlreadyClaimedError,
    DaemonNotReadyError,
    InvalidRequestError,
    MpsdError,
    NotFoundError,
    NotPermittedError,
    UnreachableError,
)
from mpsd.core.kubernetes.claims import ROOT, user_of
from mpsd.core.kubernetes.settings import GpuDevices, Settings
from mpsd.core.units import briefly
from mpsd.kubernetes import kubelet
from mpsd.kubernetes.api_server import ApiServer
from mpsd.kubernetes.board import Board
from mpsd.kubernetes.dra.prepared_claims import PreparedStore, ShareLeases
from mpsd.kubernetes.dra.publisher import PodEvents
from mpsd.kubernetes.log import EventName, Log
from mpsd.kubernetes.mpsd_client import LeaseAnswer, Mpsd
from mpsd.system import clock

_UID: Final = re.compile(r"[0-9A-Za-z-]{1,64}")

_LEASE: Final = "MPSD_LEASE"
"""The variable that distinguishes the processes of a container from those of other containers of its pod."""

_PAUSE: Final = 0.1
_GONE: Final = 30.0
"""Seconds until the next query to the API server about a claim that it did not have."""

_END_DEADLINE: Final = 25.0
"""Seconds for the clients of a lease to end; kubelet waits 45 s for an answer, and asks again."""


class Prepared(NamedTuple):
    """A share of a claim, in the form for kubelet."""

    share: PreparedShare
    cdi_devices: list[str]


class Driver:
    """The prepared claims of this node, and their leases.

    Any thread may call; one thread at a time works on a claim.
    """

    pause: float = 0.25
    """Seconds between two searches for the programs of containers: one may start long after its claim was prepared."""

    def __init__(
        self,
        settings: Settings,
        *,
        mpsd: Mpsd,
        api_server: ApiServer,
        board: Board,
        store: PreparedStore,
        events: PodEvents,
        log: Log,
        ended: threading.Event,
    ) -> None:
        """`ended` is set when this program ends."""
        self._settings = settings
        self._mpsd = mpsd
        self._api_server = api_server
        self._board = board
        self._store = store
        self._events = events
        self._log = log
        self._ended = ended
        self._leases = ShareLeases(settings, mpsd, board)
        self._free = threading.Condition()
        self._busy: set[str] = set()
        self._pending: dict[str, Take] = {}
        """Leases that no container has taken yet, by lease."""
        self._gone: dict[str, float] = {}
        """Claims that the API server no longer has, and when to query it again."""
        self._said: dict[str, str] = {}
        """The last logged failure by its subject, so that it is not logged again each second."""
        self.woken: Final = threading.Event()
        """Set when a claim was prepared, so that its lease is handled at once."""

    @property
    def has_pending(self) -> bool:
        """Whether a container is about to start that must take its lease."""
        return bool(self._pending)

    # -- kubelet's calls -----------------------------------------------------------------------------------------------

    def prepare(self, namespace: str, name: str, uid: str) -> list[Prepared]:
        """Make sure that each share of a claim has a lease, and return the devices. Raises MpsdError.

        A repeated call returns the same.
        """
        _check_uid(uid)
        self._board.await_gpus(self._settings.wait)
        with self._alone(uid):
            claim = self._store.get(uid)
            if claim is not None and claim.stage is Stage.OVER:
                self._finish(claim)
                claim = None
            if claim is None:
                claim = self._begin(namespace, name, uid)
            leases = self._leases.ensure(claim)
            self._take_known(claim, leases)
            if claim.stage is Stage.BEGUN:
                self._store.put(claim.at(Stage.PREPARED))
                self._log.info(
                    EventName.CLAIM_PREPARED,
                    claim=f"{namespace}/{name}",
                    uid=uid,
                    pods=[each.name for each in claim.pods],
                    leases=[each["id"] for each in leases],
                    shares=[
                        {"gpu": each.gpu, "threads": each.tenths / 10, "mebibytes": each.mebibytes}
                        for each in claim.shares
                    ],
                )
        self.woken.set()
        return [
            Prepared(share, [prepared.device_id(uid, number), *self._gpu_device(share)])
            for number, share in enumerate(claim.shares)
        ]

    def unprepare(self, uid: str) -> None:
        """End the leases of a claim, with their remaining clients, and forget it. Raises MpsdError.

        An unknown claim is no error: it was never prepared, or was unprepared already.
        """
        _check_uid(uid)
        with self._alone(uid):
            claim = self._store.get(uid)
            if claim is not None:
                over = claim.at(Stage.OVER)
                self._store.put(over)
                self._finish(over)

    def _begin(self, namespace: str, name: str, uid: str) -> PreparedClaim:
        """Query the API server for the allocation, and store it."""
        found = self._api_server.claim(namespace, name)
        allocated = allocation.shares(
            found, uid=uid, driver=self._settings.driver, pool=self._settings.node, gpus=self._board.gpus
        )
        if wanted := [each.strictness for each in allocated if each.strictness is not None]:
            attach = self._mpsd.attach()
            for each in wanted:
                allocation.check_strictness(each, attach)
        pods = [PreparedPod(pod, pod_name) for pod, pod_name in allocation.pods(found)]
        claim = PreparedClaim(uid, namespace, name, pods, [each.share for each in allocated])
        self._store.put(claim)
        return claim

    def _gpu_device(self, share: PreparedShare) -> list[str]:
        if self._settings.gpu_devices in {GpuDevices.CDI_FIELD, GpuDevices.CDI_ANNOTATION}:
            return [self._settings.cdi_device.format(uuid=share.gpu)]
        return []

    # -- leases --------------------------------------------------------------------------------------------------------

    def _take_known(self, claim: PreparedClaim, leases: list[LeaseAnswer]) -> None:
        """Let a pod take its leases before a container starts, for the known or most likely user of its program.

        Raises mpsd's refusal where the user is certain. A hook, if configured, knows the user and takes the lease
        itself.
        """
        group = self._group_of(claim)
        for share, lease in zip(claim.shares, leases, strict=True):
            user = self._settings.uid if share.user is None else share.user
            is_claim = any(each["kind"] == "claim" for each in lease["holders"])
            if not is_claim or group is None or (user is None and self._settings.hook):
                continue
            likely = ROOT if user is None else user
            try:
                self._mpsd.take(lease["id"], group, likely, likely)
            except MpsdError as error:
                if user is not None or isinstance(error, UnreachableError):
                    raise
                continue  # another user may be accepted, once the container's program shows it
            self._holds(lease["id"], claim, likely)

    def _group_of(self, claim: PreparedClaim) -> str | None:
        """Return the control group of a pod of a claim; None where no pod has one."""
        paths = (kubelet.group_path(each.uid, self._settings) for each in claim.pods)
        return next((each for each in paths if each is not None), None)

    def _finish(self, claim: PreparedClaim) -> None:
        """End the leases of a claim that is over, and forget it."""
        ended = set[str]()
        deadline = clock.monotonic() + _END_DEADLINE
        while left := [each for each in self._leases.all() if each.claim == claim.uid]:
            for each in left:
                if each.pod is not None and each.lease not in ended:
                    self._mpsd.end(each.lease)
                    ended.add(each.lease)
                elif each.pod is None:
                    with contextlib.suppress(AlreadyClaimedError):  # a container took it just now: it is ended next
                        self._mpsd.release(each.lease, is_claim=True)
            if clock.monotonic() > deadline:
                raise DaemonNotReadyError(
                    f"lease {left[0].lease} of ResourceClaim {claim.name} has clients that do not end",
                    hint=f"see mpsctl show {left[0].lease} on the node; kubelet tries again",
                )
            if self._ended.wait(_PAUSE):
                raise UnreachableError("mpsd-kubernetes is being stopped", hint="kubelet tries again")
        self._leases.remove_device(claim.uid)
        self._store.remove(claim.uid)
        self._gone.pop(claim.uid, None)
        self._log.info(EventName.CLAIM_UNPREPARED, claim=f"{claim.namespace}/{claim.name}", uid=claim.uid)

    # -- tasks beside kubelet's calls ----------------------------------------------------------------------------------

    def clean(self) -> None:
        """Remove leftovers of an earlier process that have no record. Raises OSError."""
        self._leases.remove_unknown_devices({each.uid for each in self._store.all()})

    def reconcile(self) -> None:
        """Do the next action for each claim and each lease. Raises UnreachableError."""
        leases = self._leases.all()  # first: a claim is stored before it has any
        claims = {each.uid: each for each in self._store.all()}
        actions = prepared.next_actions(claims.values(), leases, kubelet.is_populated, self._settings.claim_deadline)
        for uid, claim in claims.items():
            has_device = self._leases.has_device(uid)  # not after a restart of the machine
            if claim.stage is Stage.PREPARED and not has_device and Replace(claim) not in actions:
                actions.append(Replace(claim))
        self._pending = {each.lease.lease: each for each in actions if isinstance(each, Take)}
        for each in actions:
            if not isinstance(each, Take):  # `complete` handles it
                self._tried(each)

    def complete(self) -> None:
        """Let pods take the leases of those containers whose program runs by now."""
        for each in list(self._pending.values()):
            self._tried(each)

    def _tried(self, action: Action) -> None:
        """Do the next action for a claim, unless a call of kubelet is working on it; a failed action is tried again."""
        about = action.lease.claim if isinstance(action, Release | Renew | Take) else action.claim.uid
        with self._alone(about, waits=False) as is_alone:
            if not is_alone:
                return
            try:
                self._do(action)
            except UnreachableError:
                raise
            except MpsdError as error:
                self._failed(action, about, error)
            else:
                self._said.pop(about, None)

    def _do(self, action: Action) -> None:
        match action:
            case Release(lease, because):
                self._mpsd.release(lease.lease, is_claim=lease.pod is None)
                self._log.info(EventName.LEASE_RELEASED, lease=lease.lease, claim=lease.claim, because=because)
            case Renew(lease):
                self._mpsd.renew(lease.lease, self._settings.claim_deadline)
                self._log.info(EventName.CLAIM_RENEWED, lease=lease.lease, seconds=self._settings.claim_deadline)
            case Take(lease, claim):
                if not self._settings.hook:  # the hook takes it itself
                    self._take(lease, claim)
            case Replace(claim):
                self._replace(claim)
            case Finish(claim):
                if self._is_still(claim):
                    self._finish(claim)
            case Forget(claim):
                if self._is_still(claim):
                    self._store.remove(claim.uid)

    def _is_still(self, claim: PreparedClaim) -> bool:
        """Tell whether a claim has the same stage as when the action was decided."""
        now = self._store.get(claim.uid)
        return now is not None and now.stage is claim.stage

    def _replace(self, claim: PreparedClaim) -> None:
        """Claim the leases again that a claim has lost, unless the cluster has forgotten the claim.

        In that case its pod was deleted by force. Its share may belong to another pod by now, and kubelet ends the
        claim soon.
        """
        if not self._is_still(claim) or clock.monotonic() < self._gone.get(claim.uid, 0.0):
            return
        try:
            found = self._api_server.claim(claim.namespace, claim.name)
        except NotFoundError:
            self._gone[claim.uid] = clock.monotonic() + _GONE
            return
        except MpsdError:
            pass  # where the server is unavailable, the pods stay as recorded
        else:
            if found.metadata.uid != claim.uid:
                self._gone[claim.uid] = clock.monotonic() + _GONE
                return
            claim = claim.of_pods([PreparedPod(uid, name) for uid, name in allocation.pods(found)])
            self._store.put(claim)
        leases = self._leases.ensure(claim)
        self._take_known(claim, leases)
        self._log.warning(
            EventName.CLAIM_REPLACED,
            claim=f"{claim.namespace}/{claim.name}",
            uid=claim.uid,
            leases=[each["id"] for each in leases],
            because="a lease of it had ended, or its CDI device was gone, before the claim was over",
        )

    def _take(self, lease: ShareLease, claim: PreparedClaim) -> None:
        """Let the pod in which a program runs with a lease hold the lease, for the program's user."""
        share = claim.shares[lease.number]
        user = self._settings.uid if share.user is None else share.user
        unknown: NotPermittedError | None = None
        for pod in claim.pods:
            group = kubelet.group_path(pod.uid, self._settings)
            if group is None:
                continue
            uid = gid = user
            if uid is None or gid is None:
                held_by = None if lease.pod is None else lease.uid
                try:
                    found = kubelet.programs_with(pod.uid, _LEASE, lease.lease, self._settings, held_by)
                except NotPermittedError as error:
                    unknown = error
                    continue
                if not found:
                    continue
                uid = user_of({each.uid for each in found})
                gid = next((each.gid for each in found if each.uid == uid), uid)
            if lease.pod is not None:
                if uid == lease.uid:
                    return
                self._mpsd.renew(lease.lease, self._settings.claim_deadline, uid)
            self._mpsd.take(lease.lease, group, uid, gid)
            self._holds(lease.lease, claim, uid)
            return
        if unknown is not None:
            raise unknown

    def _holds(self, lease: str, claim: PreparedClaim, uid: int) -> None:
        pending = self._pending.get(lease)
        if pending is not None:
            taken = pending.lease._replace(uid=uid, pod=pending.lease.pod or claim.pods[0].uid)
            self._pending[lease] = pending._replace(lease=taken)
        self._log.info(EventName.CONTAINER_HOLDS, lease=lease, claim=f"{claim.namespace}/{claim.name}", uid=uid)

    def _failed(self, action: Action, about: str, error: MpsdError) -> None:
        if self._said.get(about) == error.detail:
            return
        self._said[about] = error.detail
        name = EventName.CONTAINER_NOT_HELD if isinstance(action, Take) else EventName.LEASE_NOT_CHANGED
        self._log.error(
            name, claim=about, action=type(action).__name__, code=error.code, because=error.detail, hint=error.hint
        )
        claim = self._store.get(about)
        if claim is not None:
            self._events.warn(claim, f"{error.detail} [{error.code}]; {error.hint}")

    @contextlib.contextmanager
    def _alone(self, uid: str, *, waits: bool = True) -> Iterator[bool]:
        """Work on a claim exclusively; yields whether that succeeded."""
        with self._free:
            is_alone = self._free.wait_for(lambda: uid not in self._busy, None if waits else 0)
            if is_alone:
                self._busy.add(uid)
        try:
            yield is_alone
        finally:
            if is_alone:
                with self._free:
                    self._busy.discard(uid)
                    self._free.notify_all()


def _check_uid(uid: str) -> None:
    if not _UID.fullmatch(uid):
        raise InvalidRequestError(f"{briefly(uid)} is not the uid of a ResourceClaim", hint="report this")
