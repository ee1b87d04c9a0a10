"""Reports violations of pods' leases to the users of the pods, by events.

mpsd's events tell of each violation at once, and of those that are over a moment later because mpsd has ended the
process. Those that last are reported again, as mpsd lists them: an event is forgotten by the API server after an hour.
"""

from collections.abc import Mapping
from typing import Final

from mpsd.core.errors import MpsdError, NotFoundError
from mpsd.core.kubernetes import claims, pod_violations, pods
from mpsd.core.kubernetes.claims import Held
from mpsd.core.kubernetes.pod_violations import PodViolation
from mpsd.core.model import ViolationKind
from mpsd.kubernetes.mpsd_client import LeaseAnswer
from mpsd.kubernetes.parts import Part, Program
from mpsd.kubernetes.pod_events import Reason
from mpsd.kubernetes.pod_leases import PodLeases
from mpsd.system import clock
from mpsd.system.processes import proc

_AGAIN: Final = 60
"""Seconds after which the violations that last are reported again; `PodEvents` writes few of these."""

_REASONS: Final[Mapping[str, Reason]] = {
    ViolationKind.PROCESSES: Reason.UNDECLARED_PROCESS,
    ViolationKind.MEMORY: Reason.MEMORY_OVER_SHARE,
}

_RETRY: Final = 1.0
"""Seconds until the next attempt to follow an mpsd that does not answer."""


class ViolationReport(Part):
    """The thread that follows mpsd's events for violations."""

    def __init__(self, program: Program, leases: PodLeases) -> None:
        super().__init__(program)
        self._leases = leases

    def run(self) -> None:
        """Report until the program ends."""
        while not self._ended.is_set():
            try:
                self._follow()
            except MpsdError:  # the thread that follows the GPUs logs it
                self._ended.wait(_RETRY)

    def _follow(self) -> None:
        at = self._report_lasting()
        for event in self._mpsd.events_to_come(_AGAIN):
            match event:
                case {
                    "event": "violation",
                    "lease": str(lease),
                    "kind": str(kind),
                    "pid": int(pid),
                    "because": str(because),
                    "policy": str(policy),
                }:
                    self._report_new(PodViolation(kind, pid, lease, because, policy))
            if clock.monotonic() >= at + _AGAIN:
                at = self._report_lasting()

    def _report_new(self, violation: PodViolation) -> None:
        try:
            lease = self._mpsd.lease(violation.lease)
        except NotFoundError:
            return
        self._report(violation, lease)

    def _report_lasting(self) -> float:
        """Report what mpsd lists, and return the time; of too much memory, each list has other words."""
        for lease, _ in self._mpsd.leases():
            for each in lease.get("violations", []):
                if each["kind"] != ViolationKind.MEMORY:
                    self._report(PodViolation(each["kind"], each["pid"], lease["id"], each["because"]), lease)
        return clock.monotonic()

    def _report(self, violation: PodViolation, lease: LeaseAnswer) -> None:
        held = claims.held(lease, clock.now(), self._settings)
        if held is None or held.pod is None:
            return
        pod = self._pod_of(violation.pid, held) or held.pod
        message = pod_violations.message(violation, self._leases.user_of(lease, pod), self._settings)
        self._leases.events.warn(pod, _REASONS.get(violation.kind, Reason.SHARE_VIOLATED), message)

    def _pod_of(self, pid: int, held: Held) -> str | None:
        """Return which of the pods that share a lease has a process; None where the process has ended."""
        own = [f"{path}/" for path in proc.control_groups(pid).values()]
        groups = [each for each in held.others if any(path.startswith(f"{each}/") for path in own)]
        return next((pods.pod_of(each, str(self._settings.cgroup_root)) for each in groups), None)
