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
    Join,
    PreparedClaim,
    PreparedShare,
    Replace,
    ShareLease,
    Stage,
    Take,
)
from mpsd.core.errors import (
    AlreadyClaimedError,
    ConfigurationError,
    DaemonNotReadyError,
    InvalidRequestError,
    MpsdError,
    NotFoundError,
    UnreachableError,
)
from mpsd.core.kubernetes import devices
from mpsd.core.kubernetes.claims import Held, Release, Renew
from mpsd.core.kubernetes.devices import Part
from mpsd.core.kubernetes.settings import GpuDevices, When
from mpsd.core.units import briefly
from mpsd.kubernetes import kubelet
from mpsd.kubernetes.api_server import ApiServer
from mpsd.kubernetes.dra.claim_status import ClaimStatus
from mpsd.kubernetes.dra.prepared_claims import CdiDevices, PreparedStore
from mpsd.kubernetes.kubelet import User
from mpsd.kubernetes.log import EventName
from mpsd.kubernetes.mpsd_client import LeaseAnswer
from mpsd.kubernetes.parts import Program
from mpsd.kubernetes.pod_events import PodName, Reason
from mpsd.kubernetes.pod_leases import PodLeases
from mpsd.system import clock, retry

_UID: Final = re.compile(r"[0-9A-Za-z-]{1,64}")

_LEASE: Final = "MPSD_LEASE"
"""The variable that distinguishes the processes of a container from those of other containers of its pod."""

_PAUSE: Final = 0.1
_GONE: Final = 30.0
"""Seconds until the next query to the API server about a claim that it did not have."""

_LOOK_FOR_PODS: Final = 60.0
"""Seconds between two queries to the API server about the pods of a claim that several may use."""

_REPLACES: Final = 1.0
"""Maximum seconds for the capacity of a lost lease, which is tried again: all other claims wait meanwhile."""

_END_DEADLINE: Final = 25.0
"""Seconds for the clients of a lease to end; kubelet waits 45 s for an answer, and asks again."""


class Prepared(NamedTuple):
    """A share of a claim, in the form for kubelet."""

    share: PreparedShare
    cdi_devices: list[str]


class Driver(PodLeases):
    """The prepared claims of this node, and the leases of their shares; one thread at a time works on a claim.

    mpsd stores the leases, and no second record here can contradict it.
    """

    pause = 0.25  # a container may start long after its claim was prepared

    def __init__(self, program: Program, api_server: ApiServer) -> None:
        """Read the prepared claims. Raises ConfigurationError."""
        super().__init__(program, None if program.settings.pod_events is When.NEVER else api_server)
        settings = self._settings
        self._api_server = api_server
        self.status = ClaimStatus(program, api_server, self.told)
        self._free = threading.Condition()
        self._busy: set[str] = set()
        self._pending: dict[str, Take] = {}
        """Leases that no container has taken yet, by lease."""
        self._gone: dict[str, float] = {}
        """Claims that the API server no longer has, and when to query it again."""
        directory = settings.kubelet_dir / "plugins" / settings.domain / "claims"
        self._devices = CdiDevices(settings.cdi_dir, settings.domain)
        try:
            self._store = PreparedStore(directory, self._log)
        except OSError as error:
            raise ConfigurationError(
                f"{directory} cannot be used: {error.strerror or error}", hint="see kubelet_dir, and run it as root"
            ) from None

    def begin(self) -> None:
        """Remove CDI devices of no claim, or with another hook. Raises ConfigurationError.

        A hook out of an image has another path in each container of that image. A device that is gone is replaced.
        """
        super().begin()
        try:
            claims = {each.uid for each in self._store.all()}
            self._devices.remove_all_but(claims, self._hook.program, unreadable=self._store.unreadable())
        except OSError as error:
            raise ConfigurationError(
                f"{self._settings.cdi_dir} cannot be used: {error.strerror or error}", hint="see cdi_dir"
            ) from None

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
                self._finish(claim, _END_DEADLINE)
                claim = None
            if claim is None:
                claim = self._begin(namespace, name, uid)
            leases = self._ensure(claim, self._settings.wait)
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
            Prepared(share, [prepared.device_id(self._settings.domain, uid, number), *self._gpu_device(share)])
            for number, share in enumerate(claim.shares)
        ]

    def unprepare(self, namespace: str, name: str, uid: str) -> None:
        """End the leases of a claim, with their remaining clients, and forget it. Raises MpsdError.

        An unknown claim is no error: it was never prepared, or was unprepared already.
        """
        _check_uid(uid)
        with self._alone(uid):
            claim = self._store.get(uid)
            if claim is None and uid in self._store.unreadable():
                claim = PreparedClaim(uid, namespace, name, [], [])
            if claim is not None:
                over = claim.at(Stage.OVER)
                self._store.put(over)
                self._finish(over, _END_DEADLINE)

    def _begin(self, namespace: str, name: str, uid: str) -> PreparedClaim:
        """Query the API server for the allocation, and store it."""
        found = self._api_server.claim(namespace, name)
        allocated = allocation.shares(
            found, uid=uid, driver=self._settings.domain, pool=self._settings.node, gpus=self._board.gpus
        )
        if any(each.is_strict for each in allocated):
            allocation.check_strict(self._mpsd.attach())
        claim = PreparedClaim(
            uid,
            namespace,
            name,
            allocation.pods(found),
            [each.share for each in allocated],
            is_shared=allocation.is_shared(found),
        )
        self._store.put(claim)
        return claim

    def _gpu_device(self, share: PreparedShare) -> list[str]:
        if self._settings.gpu_devices in {GpuDevices.CDI_FIELD, GpuDevices.CDI_ANNOTATION}:
            return [self._settings.cdi_device.format(uuid=share.gpu)]
        return []

    # -- leases --------------------------------------------------------------------------------------------------------

    def _share_leases(self) -> list[ShareLease]:
        """Return the leases of shares that have not ended."""
        return [
            ShareLease(held, *share)
            for each, held in self._mpsd.leases()
            if held and (share := prepared.share_of(each["request_id"]))
        ]

    def _ensure(self, claim: PreparedClaim, wait: float) -> list[LeaseAnswer]:
        """Make sure that each share of a claim has a lease, write the CDI device, and return the leases.

        `wait` is for capacity, in seconds.
        """
        try:
            leases = self._ensured(claim, wait)
        except MpsdError as error:
            self.status.note(claim, error=error)
            raise
        self.status.note(claim, leases)
        return leases

    def _ensured(self, claim: PreparedClaim, wait: float) -> list[LeaseAnswer]:
        settings = self._settings
        living = {each.number: each.held.lease for each in self._share_leases() if each.claim == claim.uid}
        leases = [
            self._mpsd.lease(living[number]) if number in living else self._claim_share(claim, number, share, wait)
            for number, share in enumerate(claim.shares)
        ]
        gpus = [self._board.gpu(each.gpu) for each in claim.shares]
        by_environment = settings.gpu_devices is GpuDevices.ENVIRONMENT
        content = prepared.device_document(
            settings.domain,
            claim.uid,
            [each["env"] for each in leases],
            shared_memory=[devices.shares_memory(each, settings) for each in gpus],
            more=[{"NVIDIA_VISIBLE_DEVICES": each.uuid} if by_environment else {} for each in gpus],
            socket=str(settings.socket),
            hook=self._hook.program,
            root=settings.cgroup_root,
        )
        self._devices.put(claim.uid, content)
        self._take_known(claim, leases)
        return leases

    def _claim_share(self, claim: PreparedClaim, number: int, share: PreparedShare, wait: float) -> LeaseAnswer:
        """Claim a lease for a share; a repeated call returns the same lease."""
        optional = {"client_priority": share.client_priority, "stop": share.stop, "connections": share.connections}
        return self._claim(
            share.gpu,
            Part(share.tenths, share.mebibytes),
            self._user_of(share),
            self._settings.processes[0] if share.processes is None else share.processes,
            wait=wait,
            name=f"{claim.namespace}/{claim.name}"[:128],
            labels={"kubernetes/claim": claim.uid, "kubernetes/request": share.request[:128]},
            request_id=prepared.request_id(claim.uid, number),
            visible=share.visible or self._settings.visible,
            **{name: value for name, value in optional.items() if value is not None},
        )

    def _user_of(self, share: PreparedShare) -> int | None:
        """Return the uid of a share's containers; None where it is unknown before they run."""
        return self._settings.uid if share.user is None else share.user

    def _take_known(self, claim: PreparedClaim, leases: list[LeaseAnswer]) -> None:
        """Let a pod take its leases before a container starts, for the known or most likely user of its program.

        A hook, if configured, knows the user and takes the lease itself.
        """
        group = self._group_of(claim)
        for share, lease in zip(claim.shares, leases, strict=True):
            user = self._user_of(share)
            is_claim = any(each["kind"] == "claim" for each in lease["holders"])
            if not is_claim or group is None or (user is None and self._hook.program):
                continue
            taken_for = self._take_before_start(lease["id"], group, user)
            if taken_for is not None:
                self._holds(lease["id"], claim, taken_for)

    def _group_of(self, claim: PreparedClaim) -> str | None:
        """Return the control group of a pod of a claim; None where no pod has one."""
        paths = (kubelet.group_path(each.uid, self._settings) for each in claim.pods)
        return next((each for each in paths if each is not None), None)

    def _finish(self, claim: PreparedClaim, seconds: float) -> None:
        """End the leases of a claim that is over, and forget it. Raises DaemonNotReadyError where that takes longer."""
        ended = set[str]()
        deadline = clock.monotonic() + seconds
        while left := [each.held for each in self._share_leases() if each.claim == claim.uid]:
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
        self._devices.remove(claim.uid)
        self._store.remove(claim.uid)
        self._gone.pop(claim.uid, None)
        self.status.forget(claim.uid)
        self._log.info(EventName.CLAIM_UNPREPARED, claim=f"{claim.namespace}/{claim.name}", uid=claim.uid)

    @property
    def are_needed(self) -> bool:
        """Whether claims are prepared: kubelet keeps their pods' control groups until they are unprepared."""
        return bool(self._store.all())

    # -- tasks beside kubelet's calls ----------------------------------------------------------------------------------

    def reconcile(self) -> None:
        leases = self._share_leases()  # first: a claim is stored before it has any
        self._report_lost(each.held for each in leases)
        known = self._store.all()
        actions = prepared.next_actions(
            known,
            leases,
            unreadable=self._store.unreadable(),
            is_populated=kubelet.is_populated,
            has_device=self._devices.exist,
            deadline=self._settings.claim_deadline,
        )
        self._forget_all_but({uid for uid, _ in actions} | {each.held.lease for each in leases})
        self._pending = {each.lease.held.lease: each for _, each in actions if isinstance(each, Take)}
        for uid, each in actions:
            if not isinstance(each, Take):  # `complete` handles it
                self._try(uid, each)

    def complete(self) -> None:
        for each in list(self._pending.values()):
            self._try(each.claim.uid, each)

    def _try(self, claim: str, action: Action) -> None:
        """Do the next action for a claim, unless a call of kubelet is working on it; a failed action is tried again."""
        with self._alone(claim, waits=False) as is_alone:
            if not is_alone:
                return
            try:
                self._do(action)
            except UnreachableError:
                raise
            except MpsdError as error:
                self._failed(action, claim, error)
            else:
                self._said.pop(_subject(claim, action), None)

    def _do(self, action: Action) -> None:
        match action:
            case Release() | Renew():
                self._end_or_renew(action)
            case Take(lease, claim):
                if self._hook.program is None:  # otherwise the hook takes it
                    self._take_for_program(lease, claim)
            case Join(lease, claim):
                self._join(lease.held, claim)
            case Replace(claim) if self._is_still(claim):
                self._replace(claim)
            case Finish(claim) if self._is_still(claim):
                # It is tried again: no other claim waits for its clients.
                with contextlib.suppress(DaemonNotReadyError):
                    self._finish(claim, _PAUSE)
            case Forget(claim) if self._is_still(claim):
                self._store.remove(claim.uid)

    def _join(self, held: Held, claim: PreparedClaim) -> None:
        """Have each pod of a claim that has a control group hold a lease."""
        groups = (kubelet.group_path(each.uid, self._settings) for each in claim.pods)
        for group in groups:
            if group is not None and group not in {held.group, *held.others}:
                self._mpsd.add_holder(held.lease, group)

    def follow_pods(self) -> None:
        """Learn, until the program ends, which pods use shared claims: kubelet prepares a claim for the first alone.

        A hook knows without.
        """
        while not self._ended.wait(retry.jittered(_LOOK_FOR_PODS)):
            for claim in self._store.all() if self._hook.program is None else ():
                if claim.is_shared and claim.stage is Stage.PREPARED:
                    try:
                        self._note_pods(claim)
                    except MpsdError as error:
                        if self._log.is_new(f"pods of {claim.uid}", error.detail):
                            self._log.warning(EventName.LEASE_NOT_CHANGED, error, claim=claim.uid, action="Join")

    def _note_pods(self, claim: PreparedClaim) -> None:
        found = self._api_server.claim(claim.namespace, claim.name)
        with self._alone(claim.uid):
            now, reserved = self._store.get(claim.uid), allocation.pods(found)
            if now is not None and found.metadata.uid == claim.uid and reserved not in ([], now.pods):
                self._store.put(now.of_pods(reserved))

    def _is_still(self, claim: PreparedClaim) -> bool:
        """Tell whether a claim has the same stage as when the action was decided."""
        now = self._store.get(claim.uid)
        return now is not None and now.stage is claim.stage

    def _replace(self, claim: PreparedClaim) -> None:
        """Claim the leases again that a claim has lost, unless the cluster has forgotten the claim.

        In that case its pod was deleted by force. Its share may belong to another pod by now, and kubelet ends the
        claim soon.
        """
        if clock.monotonic() < self._gone.get(claim.uid, 0.0):
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
            claim = claim.of_pods(allocation.pods(found))
            self._store.put(claim)
        leases = self._ensure(claim, min(self._settings.wait, _REPLACES))
        self._log.warning(
            EventName.CLAIM_REPLACED,
            claim=f"{claim.namespace}/{claim.name}",
            uid=claim.uid,
            leases=[each["id"] for each in leases],
            because="a lease of it had ended, or its CDI device was gone, before the claim was over",
        )

    def _take_for_program(self, lease: ShareLease, claim: PreparedClaim) -> None:
        """Let the pod in which a program runs with a lease hold the lease, for the program's user."""
        held, known = lease.held, self._user_of(claim.shares[lease.number])
        taken_for = None if held.pod is None else held.uid
        if known is None:
            found = self._running([each.uid for each in claim.pods], _LEASE, held.lease, taken_for)
        else:
            group = self._group_of(claim)
            found = None if group is None else (group, User(known, known))
        if found is not None and found[1].uid != taken_for:
            self._take(held, *found)
            self._holds(held.lease, claim, found[1].uid)

    def _holds(self, lease: str, claim: PreparedClaim, uid: int) -> None:
        pending = self._pending.get(lease)
        if pending is not None:
            held = pending.lease.held._replace(uid=uid, pod=pending.lease.held.pod or claim.pods[0].uid)
            self._pending[lease] = Take(pending.lease._replace(held=held), claim)
        self.status.note(claim)
        self._log.info(EventName.CONTAINER_HOLDS, lease=lease, claim=f"{claim.namespace}/{claim.name}", uid=uid)

    def _failed(self, action: Action, uid: str, error: MpsdError) -> None:
        if self._is_new(_subject(uid, action), error):
            name = EventName.CONTAINER_NOT_HELD if isinstance(action, Take) else EventName.LEASE_NOT_CHANGED
            self._log.error(name, error, claim=uid, action=type(action).__name__)
            claim = self._store.get(uid)
            if claim is not None:
                self.status.note(claim, error=error)
            for pod in () if claim is None else claim.pods:
                self.events.warn(pod.uid, Reason.LEASE_NOT_HELD, self.told(error))

    def _pod_names(self, _: float) -> dict[str, PodName]:
        return {pod.uid: PodName(each.namespace, pod.name) for each in self._store.all() for pod in each.pods}

    def user_of(self, lease: LeaseAnswer, pod: str) -> str:
        share = prepared.share_of(lease["request_id"])
        claim = None if share is None else self._store.get(share[0])
        has_pod = claim is not None and any(each.uid == pod for each in claim.pods)
        return f"ResourceClaim {claim.name}" if claim is not None and has_pod else ""

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


def _subject(claim: str, action: Action) -> str:
    """Return what an action is about: a lease, or the whole claim."""
    return action.lease.held.lease if isinstance(action, Take) else claim


def _check_uid(uid: str) -> None:
    if not _UID.fullmatch(uid):
        raise InvalidRequestError(f"{briefly(uid)} is not the uid of a ResourceClaim", hint="report this")
