"""The service beside mpsd and slurmd: the node's state, AdminComments, and leases that no Epilog has ended.

It looks at mpsd each second, and calls Slurm only where something has changed, and each minute. What Slurm or
mpsd does not answer is tried again at the next look.
"""

import select
import signal
import socket
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mpsd.client.client import Client
from mpsd.core.errors import MpsdError, UnreachableError
from mpsd.core.slurm.job import JOB
from mpsd.core.slurm.settings import Settings
from mpsd.slurm import hooks
from mpsd.slurm import node as judge
from mpsd.slurm.accounting import Accounting
from mpsd.slurm.node import Reason
from mpsd.slurm.records import Records
from mpsd.slurm.slurm_programs import SlurmPrograms
from mpsd.system import clock
from mpsd.system.files import atomic_file

if TYPE_CHECKING:
    from mpsd.client import answer_types

_LOOK: Final = 1.0
"""Seconds between two looks at mpsd."""

_SETTLES: Final = 15.0
"""Seconds after which a reason that is no operator's order drains the node: a control daemon restarts in less, and so
does mpsd."""

_SAID: Final = "node"
"""The file with the reason that the node was drained with."""

_ANSWER: Final = 10.0


def node_name(settings: Settings, environment: Mapping[str, str]) -> str:
    """Return the name of this node in Slurm."""
    return settings.node or environment.get("SLURMD_NODENAME", "") or socket.gethostname().partition(".")[0]


def programs(settings: Settings, environment: Mapping[str, str]) -> SlurmPrograms:
    variables = {name: environment[name] for name in ("SLURM_CONF",) if name in environment}
    return SlurmPrograms(node_name(settings, environment), variables)


def _log(text: str) -> None:
    """Write a line for systemd's journal, or the log of slurmd."""
    sys.stderr.write(f"mpsd-slurm: {text}\n")
    sys.stderr.flush()


# -- the node ----------------------------------------------------------------------------------------------------------


class Node:
    """The state of the node, which follows mpsd's."""

    def __init__(self, settings: Settings, slurm: SlurmPrograms) -> None:
        self._settings = settings
        self._slurm = slurm
        self._file = Path(settings.state_dir, _SAID)

    def wanted(self, api: Client) -> Reason | None:
        """Return why the node should get no jobs now; None where it should."""
        try:
            return judge.reason(api.status())
        except UnreachableError as error:
            return None if self._settings.without_mpsd == "run" else judge.because(error.detail)

    def follow(self, wanted: Reason | None) -> None:
        """Drain or resume the node, if it is to be changed. Raises UnreachableError and OSError."""
        said = (atomic_file.read(self._file) or b"").decode()
        step = judge.change(self._slurm.seen(), wanted, said)
        if step is None:
            self._slurm.resume()
            _log(f"node {self._slurm.node} is resumed: mpsd admits again")
        elif isinstance(step, Reason):
            self._slurm.drain(step.text)
            _log(f"node {self._slurm.node} is drained: {step.text}")
        self._file.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        atomic_file.write(self._file, ("" if wanted is None else wanted.text).encode())


def check_health(settings: Settings, environment: Mapping[str, str]) -> int:
    """Drain or resume the node once, for slurmd's HealthCheckProgram, and return 1 if it is to get no jobs.

    Slurm ignores that status. Raises UnreachableError and OSError.
    """
    node = Node(settings, programs(settings, environment))
    until = clock.monotonic() + _SETTLES
    with Client(settings.socket, deadline=_ANSWER) as api:
        while (wanted := node.wanted(api)) is not None and not wanted.lasts and clock.monotonic() < until:
            select.select([], [], [], 1.0)
    node.follow(wanted)
    return 0 if wanted is None else 1


# -- jobs --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Jobs:
    """The jobs with leases on this node."""

    slurm: SlurmPrograms
    _unknown: set[str] = field(default_factory=set)
    """The leases whose jobs Slurm did not know at the last look, and the jobs that Prolog left for an Epilog."""

    def end_unknown(self, leases: Collection["answer_types.Lease"], api: Client, records: Records) -> None:
        """End the leases of jobs that Slurm did not know twice in a row, and forget them. Raises MpsdError, OSError."""
        recorded = {f"job {each.job} {each.identity}": each for each in records.all()}
        states = self.slurm.states() if leases or recorded else {}
        ended = {*judge.gone(leases, states)}
        forgotten = {name for name, each in recorded.items() if judge.is_over(states.get(each.job, ""))}
        for each in sorted(ended & self._unknown):
            _log(f"the lease {each} is ended with its clients: Slurm does not know its job any more")
            api.end(each)
        for name in forgotten & self._unknown:
            records.remove(recorded[name].job, recorded[name].identity)
        self._unknown = {*ended, *forgotten} - self._unknown


# -- the service -------------------------------------------------------------------------------------------------------


class Service:
    """What it does at each look."""

    def __init__(self, settings: Settings, slurm: SlurmPrograms) -> None:
        self._settings = settings
        self._node = Node(settings, slurm)
        self._jobs = Jobs(slurm)
        self._accounting = Accounting(slurm, Path(settings.state_dir), _log)
        self._refused_since: float | None = None
        """Since when the node should get no jobs."""
        self._followed: str | None = None
        """The reason that the node follows; None before the first look at Slurm."""
        self._next_slow = 0.0
        self._troubles: Mapping[str, str] = {}

    def look(self, now: float) -> None:
        """Look at mpsd, and bring Slurm up to date; what fails is logged once, and tried again at the next look."""
        is_slow = now >= self._next_slow
        if is_slow:
            self._next_slow = now + self._settings.look
        troubles = {}
        with Client(self._settings.socket, deadline=_ANSWER) as api:
            for name, step in (
                ("node", self._follow), ("jobs", self._account), ("leases", self._tidy), ("accounts", self._settle),
            ):  # fmt: skip
                try:
                    step(api, now, is_slow=is_slow)
                except (MpsdError, OSError) as error:
                    troubles[name] = str(error)
                    if self._troubles.get(name) != str(error):
                        _log(f"{name}: {error}; tried again at each look")
                    if isinstance(error, UnreachableError):
                        break  # each further step would wait as long
        self._troubles = troubles

    def _follow(self, api: Client, now: float, *, is_slow: bool) -> None:
        wanted = self._node.wanted(api)
        if wanted is None:
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = now
        if wanted is not None and not wanted.lasts and now - (self._refused_since or now) < _SETTLES:
            return
        text = "" if wanted is None else wanted.text
        if is_slow or text != self._followed:
            self._node.follow(wanted)
            self._followed = text

    def _account(self, api: Client, now: float, *, is_slow: bool) -> None:  # noqa: ARG002 - one signature for all
        self._accounting.account(api, now)

    def _settle(self, api: Client, now: float, *, is_slow: bool) -> None:  # noqa: ARG002 - likewise
        self._accounting.settle(now)

    def _tidy(self, api: Client, now: float, *, is_slow: bool) -> None:  # noqa: ARG002 - likewise
        if is_slow:
            hooks.end_late(self._settings, api)
            self._jobs.end_unknown(self._leases(api), api, Records(self._settings.state_dir))

    def _leases(self, api: Client) -> list["answer_types.Lease"]:
        return [each for each in api.leases()["leases"] if JOB in each["labels"]]


def run(settings: Settings, environment: Mapping[str, str]) -> int:
    """Run until SIGTERM or SIGINT, and return the exit status."""
    slurm = programs(settings, environment)
    service = Service(settings, slurm)
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    _log(f"follows mpsd on {settings.socket}, for node {slurm.node}")
    while signal.sigtimedwait(signals, min(_LOOK, settings.look)) is None:
        service.look(clock.monotonic())
    return 0
