"""The leases of pods, as device plugin and driver have them alike: claimed, taken by a pod, renewed and released.

A lease begins as a claim of mpsd's. The pod's control group takes it, for the user of the container's program: before
the container starts for the user that is known or most likely, and again once the program shows another one.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sized
from typing import Final

from mpsd.core.errors import DoesNotFitError, MpsdError, NotPermittedError, UnreachableError
from mpsd.core.kubernetes import claims, refusals
from mpsd.core.kubernetes.claims import ROOT, Held, Release, Renew
from mpsd.core.kubernetes.devices import Part as Share
from mpsd.core.kubernetes.refusals import Taken
from mpsd.core.units import MIB
from mpsd.kubernetes import kubelet
from mpsd.kubernetes.api_server import ApiServer
from mpsd.kubernetes.hook import Hook
from mpsd.kubernetes.kubelet import User
from mpsd.kubernetes.log import EventName
from mpsd.kubernetes.mpsd_client import LeaseAnswer
from mpsd.kubernetes.parts import Part, Program
from mpsd.kubernetes.pod_events import PodEvents, PodName, Reason
from mpsd.system import clock

MOMENT: Final = 0.25
"""Seconds for each answer while kubelet waits: it admits no pod meanwhile, not even one without a GPU."""

_NAMES: Final = 1.0
"""Seconds for the names of pods elsewhere."""


class PodLeases(Part, ABC):
    """The leases of this node's pods. Any thread may call."""

    pause: float
    """Seconds between two searches for the programs of containers, where none is about to start."""

    def __init__(self, program: Program, api_server: ApiServer | None) -> None:
        """`api_server` is for events about pods; None where none are written."""
        super().__init__(program)
        self._hook = Hook(program)
        self.events = PodEvents(program, api_server, self._pod_name)
        self._pending: Sized = ()
        self._said: dict[str, str] = {}
        """The last logged failure by lease or claim, so that it is not logged again each second."""
        self.woken = threading.Event()
        """Set when a container is about to start, so that its lease is handled at once."""

    @property
    def has_pending(self) -> bool:
        """Whether a container has not been seen with its lease yet."""
        return bool(self._pending)

    @property
    @abstractmethod
    def are_needed(self) -> bool:
        """Whether pods have leases, or what only a call of kubelet ends."""

    def begin(self) -> None:
        """Begin to work, before kubelet can call."""
        self._hook.find()

    @abstractmethod
    def reconcile(self) -> None:
        """Do the next action for each lease, by the facts of kubelet and the kernel. Raises UnreachableError."""

    @abstractmethod
    def complete(self) -> None:
        """Let pods take the leases of those containers whose program runs by now."""

    @abstractmethod
    def _pod_names(self, seconds: float) -> Mapping[str, PodName]:
        """Return the names of pods by their uids, as far as they are known within this time."""

    @abstractmethod
    def user_of(self, lease: LeaseAnswer, pod: str) -> str:
        """Say which container or claim of a pod a lease is for; empty where that is unknown."""

    def _pod_name(self, pod: str) -> PodName | None:
        return self._pod_names(_NAMES).get(pod)

    def told(self, error: MpsdError) -> str:
        """Return a refusal in words for the author of a pod."""
        try:
            with self._mpsd.hurried(MOMENT):
                leases = self._mpsd.leases()
        except MpsdError:
            return refusals.told(error, {})
        names = {pod: "/".join(name) for pod, name in self._pod_names(MOMENT).items()}
        by_lease = {
            each["id"]: "that is starting" if held.pod is None else names.get(held.pod, held.pod)
            for each, held in leases
            if held is not None
        }
        taken = [
            Taken(
                by_lease.get(each["id"], ""),
                Share(round(share["active_thread_percentage"] * 10), share["pinned_device_mem_limit"] // MIB),
            )
            for each, _ in leases
            for share in each["shares"]
            if isinstance(error, DoesNotFitError) and share["gpu"] == error.gpu
        ]
        return refusals.told(error, by_lease, taken)

    def _claim(
        self, gpu: str, share: Share, uid: int | None, processes: int | str, *, wait: float, **more: object
    ) -> LeaseAnswer:
        """Claim a lease for a user, if it is known. Raises mpsd's refusal."""
        settings = self._settings
        request = {
            "threads": share.percent,
            "memory": f"{share.mebibytes}MiB",
            "gpu": gpu,
            "processes": processes,
            "wait": wait,
            "holder": {"claim": {"deadline": settings.claim_deadline, **({} if uid is None else {"uid": uid})}},
            **more,
        }
        try:
            return self._mpsd.admit(request, wait)
        except DoesNotFitError as error:
            error.gpu = gpu
            raise

    def _take_before_start(self, lease: str, group: str, uid: int | None) -> int | None:
        """Let a pod take a claim before its container starts, so that the limits are open when its program starts.

        Return the user; None where mpsd refuses a likely one. Raises mpsd's refusal where the user is certain.
        """
        likely = ROOT if uid is None else uid
        try:
            self._mpsd.take(lease, group, User(likely, likely))
        except MpsdError as error:
            if uid is not None or isinstance(error, UnreachableError):
                raise
            return None  # another user may be accepted, once the container's program shows it
        return likely

    def _running(self, pods: Iterable[str], variable: str, value: str, held_by: int | None) -> tuple[str, User] | None:
        """Return the control group of the pod in which a program runs with a variable, and the program's user.

        Raises NotPermittedError where the user cannot be known.
        """
        unknown: NotPermittedError | None = None
        for pod in pods:
            group = kubelet.group_path(pod, self._settings)
            try:
                user = kubelet.user_of_program(
                    pod, variable, value, settings=self._settings, held_by=held_by, reader=self._reader
                )
            except NotPermittedError as error:
                unknown = error
            else:
                if group is not None and user is not None:
                    return group, user
        if unknown is not None:
            raise unknown
        return None

    def _take(self, held: Held, group: str, user: User) -> bool:
        """Let a pod take a lease for the user of its program, from another user where the pod has it already.

        The hook may have done so since the lease was read: to hand it over again would close it for a moment. Return
        whether it had not.
        """
        now = claims.held(self._mpsd.lease(held.lease), clock.now(), self._settings)
        if now is not None and now.pod is not None and now.uid == user.uid:
            return False
        if held.pod is not None:
            self._mpsd.renew(held.lease, self._settings.claim_deadline, user.uid)
        self._mpsd.take(held.lease, group, user)
        return True

    def _end_or_renew(self, action: Release | Renew) -> None:
        held = action.held
        match action:
            case Release(because=because):
                self._mpsd.release(held.lease, is_claim=held.pod is None)
                self._log.info(EventName.LEASE_RELEASED, lease=held.lease, because=because)
            case Renew():
                self._mpsd.renew(held.lease, self._settings.claim_deadline)
                self._log.info(EventName.CLAIM_RENEWED, lease=held.lease, seconds=self._settings.claim_deadline)

    def _report_lost(self, leases: Iterable[Held]) -> None:
        """Report to pods that clients of theirs lost their server."""
        for each in leases:
            if each.lost and each.pod is not None:
                processes = "a process" if each.lost == 1 else f"{each.lost} processes"
                message = (
                    f"the MPS server of {processes} of this pod has ended, and their work on the GPU with it: all their"
                    " calls of CUDA fail; restart the container, or delete the pod, if they do not end by themselves"
                )
                self.events.warn(each.pod, Reason.SERVER_LOST, message)

    def _is_new(self, about: str, error: MpsdError) -> bool:
        """Tell whether a failure is another one than the last of this lease or claim."""
        before, self._said[about] = self._said.get(about), error.detail
        return error.detail != before

    def _forget_all_but(self, known: Collection[str]) -> None:
        self._said = {about: because for about, because in self._said.items() if about in known}
