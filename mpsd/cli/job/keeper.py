"""The keeper of a job on one node: the process in which its ranks meet, and with which its private mpsd ends.

`python -P -m mpsd.cli.job.keeper DIRECTORY` is started by the first rank, inherits the lock on the directory, and then
leaves for the background in a session of its own. Ranks connect to its socket in the directory. The kernel closes the
connection of a rank that ends, however that ends. The first request decides which mpsd serves the job (`service`). When
no rank is connected any more, the keeper ends a private mpsd, and removes the directory.

All conversations with mpsd are the keeper's: a rank starts with little more than a connection. The phases of a group,
which has as many ranks as their launcher says, are: all ranks have come; all have the environment of the lease on their
GPU, and mpsd has verified a probe of each, a client of MPS; all probes have ended; all programs run.
"""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from socket import AF_UNIX, SO_PEERCRED, SOCK_SEQPACKET, SOL_SOCKET, socket
from struct import Struct
from typing import Any, Final, NoReturn

from mpsd.cli.job import place
from mpsd.cli.job.channel import Channel, Message
from mpsd.cli.job.service import Service
from mpsd.core.errors import InternalError, JobFailedError, MpsdError
from mpsd.core.mps_facts import UNASKED
from mpsd.core.programs import job
from mpsd.core.programs.job import JobGpu
from mpsd.system.processes import foreground

_PEER: Final = Struct("iII")
"""struct ucred: pid, uid, gid. Source: unix(7)."""

_IDLE: Final = 30.0
"""Seconds without any rank after the start."""

_LATE: Final = 10.0
"""Seconds for which the keeper of a job that failed waits for further ranks, which the launcher is starting."""

_FIRST_LOOK: Final = 0.1
_RARELY: Final = 15.0
"""Seconds between two looks at the processes of the leases: soon after the start, and later."""

_KEPT: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
"""The variables that the keeper and its mpsd get: none by which a launcher or CUDA would take them for a rank."""


def start(path: Path, lock: int) -> None:
    """Start the keeper of a directory, with the lock on it. Raises OSError."""
    log = os.open(path / place.LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        variables = {name: os.environ[name] for name in _KEPT if name in os.environ}
        foreground.launch((sys.executable, "-P", "-m", __name__, f"{path}"), variables, kept=lock, output=log)
    finally:
        os.close(log)


class _Member:
    """A rank that is connected, or the command around the launcher."""

    def __init__(self, connection: socket) -> None:
        self.channel = Channel(connection)
        self.pid: int = _PEER.unpack(connection.getsockopt(SOL_SOCKET, SO_PEERCRED, _PEER.size))[0]
        self.request: Message | None = None
        self.probe: Message | None = None
        self.is_ready = False
        self.gpu: JobGpu | None = None

    @property
    def rank(self) -> int:
        assert self.request is not None  # noqa: S101 - it is in a group only with it
        rank: int = self.request["rank"]
        return rank

    def fail(self, error: MpsdError) -> None:
        self.channel.tell(fail=error.detail, hint=error.hint, code=error.code)


@dataclass
class _Group:
    """The ranks that start together."""

    size: int
    within: float
    outer: bool
    members: list[_Member] = field(default_factory=list)
    phase: str = "coming"
    """`coming`, `probing`, `leaving` (the probes end), `running`, or `failed`."""
    until: float = 0.0
    """The end of the start, by the monotonic clock."""
    next_look: float = 0.0
    pause: float = _FIRST_LOOK
    began: float = 0.0

    @property
    def name(self) -> str:
        return "the command of the job" if self.outer else f"{self.size} rank{'s' if self.size > 1 else ''}"


class Keeper:
    """The ranks on one node, and the mpsd that serves them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._listener = socket(AF_UNIX, SOCK_SEQPACKET)
        self._members: list[_Member] = []
        self._groups: list[_Group] = []
        self._options: dict[str, Any] | None = None
        """What the first request says about the whole job."""
        self._service = Service(directory)
        self._broken: MpsdError | None = None
        """Why no rank can start any more."""
        self._failed: MpsdError | None = None
        self._missing: set[int] = set()
        """The ranks that had not come when their group failed, and the failure: they get the same sentence."""
        self._idle_at = time.monotonic() + _IDLE
        """The time until which the keeper waits for ranks while there are none."""
        self._last: _Member | None = None
        """The member that waits for the end."""

    def listen(self) -> None:
        """Make the socket. Raises OSError."""
        self._path.unlink(missing_ok=True)
        self._listener.bind(os.fspath(self._path))
        self._listener.listen(1024)

    @property
    def _path(self) -> Path:
        return self._directory / place.SOCKET

    def run(self) -> None:
        """Serve the ranks until there are none."""
        place.sweep(self._directory)
        while self._members or time.monotonic() < self._idle_at:
            self._wait()
            for member in [*self._members]:
                self._hear(member)
            self._advance()
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def stumble(self, error: Exception) -> None:
        """Report a defect of the keeper to all ranks."""
        defect = InternalError(
            f"the keeper of the job met a defect: {error!r}", hint="report it, and start the job again"
        )
        for member in self._members:
            member.fail(defect)

    def close(self) -> None:
        """Release the leases, end the private mpsd with its control daemons, and remove the directory."""
        self._service.close()
        place.remove(self._directory)

    # -- hearing -------------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        for member in self._members:
            poll.register(member.channel, select.POLLIN)
        for each in self._service.descriptors:
            poll.register(each, select.POLLIN)
        times = [*self._times()]
        if not self._members:
            times.append(self._idle_at)
        left = None if not times else max(min(times) - time.monotonic(), 0.0) * 1000
        found = dict(poll.poll(left))
        if self._listener.fileno() in found:
            self._members.append(_Member(self._listener.accept()[0]))
            if not self._missing:
                self._idle_at = 0.0
        try:
            self._service.heed()
        except MpsdError as error:
            self._break(error)

    def _times(self) -> Iterator[float]:
        """Yield the times at which something is due."""
        yield from self._service.times
        first = self._first()
        if first is not None:
            yield first.until
        for group in self._groups:
            if group.phase == "running" or (group.phase == "probing" and _have_probed(group)):
                yield group.next_look

    def _hear(self, member: _Member) -> None:
        while (message := member.channel.hear()) is not None:
            if "ended" in message:
                self._dismiss(member, wait=True)
                return
            if "probe" in message:
                member.probe = message["probe"]
            elif "ready" in message:
                member.is_ready = True
            elif member.request is None:
                member.request = message
                self._admit(member)
            if member not in self._members:
                return  # it was refused
        if member.channel.is_over:
            self._lose(member)

    def _dismiss(self, member: _Member, *, wait: bool = False) -> None:
        """Forget a member that needs nothing more; the last one waits until nothing is left."""
        self._members.remove(member)
        for group in self._groups:
            if member in group.members:
                group.members.remove(member)
        if wait and not self._members and time.monotonic() >= self._idle_at:
            self._last = member
        else:
            member.channel.close()
        self._groups = [each for each in self._groups if each.members]

    def _lose(self, member: _Member) -> None:
        """Handle the end of a rank that did not announce it: before its group runs, none of it starts."""
        group = next((each for each in self._groups if member in each.members), None)
        self._dismiss(member)
        if group is not None and group.phase in {"coming", "probing", "leaving"}:
            self._fail(
                group,
                JobFailedError(
                    f"rank {member.rank} (pid {member.pid}) ended before all {group.size} ranks were ready",
                    hint="the launcher, or the output of that rank, says why it ended",
                ),
                come=member.rank,
            )

    # -- groups --------------------------------------------------------------------------------------------------------

    def _admit(self, member: _Member) -> None:
        """Take a rank into the group that is coming, or refuse it, and the group with it."""
        request = member.request
        assert request is not None  # noqa: S101 - it has just come
        try:
            group = self._group_of(request)
        except MpsdError as error:
            member.fail(error)
            self._dismiss(member)
            others = self._coming()
            if others is not None and request["rank"] not in _numbers(others):  # they lack this rank, and cannot start
                self._fail(others, error, come=request["rank"])
            return
        if request["rank"] is None:
            request["rank"] = next(number for number in range(group.size) if number not in _numbers(group))
        group.members.append(member)
        if self._options is None:
            self._options = request["options"]
            try:
                self._service.begin(self._options)
            except MpsdError as error:
                self._break(error)

    def _group_of(self, request: Message) -> _Group:
        if self._broken is not None:
            raise self._broken
        if self._failed is not None and request["rank"] in self._missing and time.monotonic() < self._idle_at:
            self._missing.discard(request["rank"])
            if not self._missing:
                self._idle_at = 0.0
            raise self._failed
        if self._options is not None and (odd := _differing(self._options, request["options"])):
            raise JobFailedError(
                f"the ranks of the job differ in {odd}",
                hint=_SAME_GPUS
                if odd == "CUDA_VISIBLE_DEVICES"
                else "start all ranks by the same command, with all options in the outermost mpsctl job",
            )
        group = self._coming()
        if request["outer"] or group is None:
            within = request["options"]["within"] or (self._options or {})["within"]
            group = _Group(request["ranks"], within, request["outer"])
            self._groups.append(group)
            self._time(group)
        elif group.size != request["ranks"]:
            raise JobFailedError(
                f"rank {request['rank']} says that {request['ranks']} ranks are here, and others say {group.size}",
                hint="start all ranks by one launcher, or give all the same --processes",
            )
        elif request["rank"] in _numbers(group):
            raise JobFailedError(f"rank {request['rank']} is here already", hint="start each rank once")
        return group

    def _coming(self) -> _Group | None:
        """Return the group of ranks that has not all its ranks yet."""
        return next((each for each in self._groups if each.phase == "coming" and not each.outer), None)

    def _time(self, group: _Group) -> None:
        """Begin the time of a group that is the first of those that start."""
        if self._first() is group:
            group.began = time.monotonic()
            group.until = group.began + group.within

    def _first(self) -> _Group | None:
        """Return the group whose turn it is: one after the other, and those of ranks beside the outer one."""
        running = any(each.phase == "running" and not each.outer for each in self._groups)
        waiting = [each for each in self._groups if each.phase in {"coming", "probing", "leaving"}]
        return waiting[0] if waiting and (waiting[0].outer or not running) else None

    def _fail(self, group: _Group, error: MpsdError, *, come: int | None = None) -> None:
        """End all ranks of a group with one sentence, those that come later too; `come` has heard it already."""
        if group.phase == "coming":
            self._failed, self._missing = error, {*range(group.size)} - _numbers(group) - {come}
            self._idle_at = time.monotonic() + _LATE if self._missing else 0.0
        group.phase = "failed"
        for member in group.members:
            member.fail(error)

    def _break(self, error: MpsdError) -> None:
        """End all ranks, and those that come later, with one sentence."""
        self._broken = error
        for group in self._groups:
            if group.phase != "failed":
                self._fail(group, error)

    def _advance(self) -> None:
        """Take each group to its next phase."""
        now = time.monotonic()
        group = self._first()
        if group is not None and not group.until:
            self._time(group)
        if group is not None:
            try:
                self._start(group, now)
            except MpsdError as error:
                self._fail(group, error)
            except KeyError as missing:
                self._fail(group, InternalError(f"mpsd's answer has no {missing}", hint="restart mpsd"))
        for each in self._groups:
            if each.phase == "running" and each.next_look <= now:
                self._watch(each, now)

    def _start(self, group: _Group, now: float) -> None:
        match group.phase:
            case "coming" if len(group.members) == group.size and self._service.is_ready:
                group.phase = "probing" if self._offer(group) else "leaving"
                group.next_look = now
            case "probing" if _have_probed(group):
                if group.next_look <= now and self._are_verified(group):
                    group.phase = "leaving"
                    for member in group.members:
                        member.channel.tell(verified=True)
                    return
            case "leaving" if all(each.is_ready for each in group.members):
                self._go(group, now)
                return
        if now >= group.until:
            raise self._late(group)

    def _late(self, group: _Group) -> JobFailedError:
        """Say who is missing at the end of the time that a start has."""
        within = f"within {group.within:g} s (--within)"
        missing = sorted({*range(group.size)} - _numbers(group))
        if not self._service.is_ready:
            return JobFailedError(f"the job's own mpsd was not ready {within}", hint="give it more time: --within 5m")
        if group.phase == "coming":
            named = ", ".join(map(str, missing[:8])) + (" and others" if len(missing) > 8 else "")  # noqa: PLR2004 - a sentence
            return JobFailedError(
                f"of {group.size} ranks {len(missing)} did not come {within}: {named}",
                hint="start every rank of this node by mpsctl job, or give them more time: --within 5m",
            )
        waiting = [each.rank for each in group.members if not (each.is_ready or each.probe)]
        named = ", ".join(map(str, waiting[:8]))
        about = f"ranks {named} had no answer from CUDA" if waiting else "mpsd could not verify all of them"
        return JobFailedError(
            f"the ranks were not all attached {within}: {about}", hint="see the GPUs: nvidia-smi; or give it more time"
        )

    def _go(self, group: _Group, now: float) -> None:
        group.phase, group.next_look, group.pause = "running", now + _FIRST_LOOK, _FIRST_LOOK
        first = min(group.members, key=lambda each: each.rank)
        if first.gpu is not None:
            on = job.placed({each.rank: each.gpu for each in group.members if each.gpu is not None})
            what = f"MPS serves the command on GPU {first.gpu.index}" if group.outer else on
            first.channel.tell(say=f"{what}; ready after {now - group.began:.1f} s")
        for member in group.members:
            member.channel.tell(go=True)

    def _offer(self, group: _Group) -> bool:
        """Give each rank of a group its GPU, the environment of the lease there, and the probe to run.

        The command around the launcher gets none where there are several GPUs. Returns whether there are probes.
        """
        service, requests = self._service, {each.rank: each.request or {} for each in group.members}
        if group.outer and len(service.gpus) > 1:
            if not requests[0]["inner"]:
                raise _several(len(service.gpus))
            group.members[0].channel.tell(environment=service.variables(None), unset=[], probe=None)
            return False
        nodes = _nodes()
        near = {rank: frozenset(nodes.get(cpu, -1) for cpu in each["cpus"]) for rank, each in requests.items()}
        chosen = job.spread(near, service.gpus)
        for gpu in service.gpus:
            there = [each.pid for each in group.members if chosen[each.rank] == gpu]
            service.lease(gpu, there, None if group.outer else len(there))
        probe = service.probe(group.within)
        for member in group.members:
            member.gpu = chosen[member.rank]
            number = {} if group.outer else {"MPSD_JOB_RANK": f"{member.rank}"}
            environment = {**service.variables(member.gpu), **number}
            member.channel.tell(environment=environment, unset=[*UNASKED], probe=probe)
        return probe is not None

    # -- verifying -----------------------------------------------------------------------------------------------------

    def _are_verified(self, group: _Group) -> bool:
        """Tell whether the probe of each rank is under MPS, by its own answer and by mpsd's. Raises JobFailedError."""
        for member in group.members:
            probe = member.probe
            assert probe is not None  # noqa: S101 - its caller looked
            if not probe["ok"]:
                raise JobFailedError(
                    f"rank {member.rank} cannot use its GPU: {probe['error']}"
                    + (f" from {probe['call']}" if probe.get("call") else ""),
                    hint=f"see the GPU: nvidia-smi; {_SAME_GPUS}",
                )
            if probe["mps"] is False:
                raise JobFailedError(
                    f"rank {member.rank} would run outside MPS, according to CUDA: it does not reach"
                    f" {self._service.variables(member.gpu)['CUDA_MPS_PIPE_DIRECTORY']}",
                    hint="in a container, mount that directory at the same path",
                )
        verified, doubts = self._verified(group)
        late = [each for each in group.members if each.probe is not None and each.probe["pid"] not in verified]
        if not late:
            return True
        group.pause = min(group.pause * 1.5, 1.0)
        group.next_look = time.monotonic() + group.pause
        if time.monotonic() >= group.until:
            raise JobFailedError(
                f"mpsd did not verify the probe of rank {late[0].rank} within {group.within:g} s"
                + (f": {doubts[0]}" if doubts else ""),
                hint="give it more time: --within 5m; or see why: mpsctl status",
            )
        return False

    def _verified(self, group: _Group) -> tuple[set[int], list[str]]:
        """Return the processes that mpsd has verified, and its doubts. Raises JobFailedError for one outside MPS."""
        verified, doubts = set[int](), list[str]()
        for gpu in {each.gpu for each in group.members if each.gpu is not None}:
            answer = self._service.verify(gpu)
            for process in answer["processes"]:
                if process["verdict"] == "ok":
                    verified.add(process["pid"])
                elif process["verdict"] == "violation" and process["mps"] is False:
                    who = "the program" if group.outer else f"rank {_rank_of(process['pid'], group)}"
                    raise JobFailedError(
                        f"{who} misses MPS: {process['because']}",
                        hint="start the program with the environment that mpsctl job gives it, and check that a wrapper"
                        " script or a container passes it on",
                    )
            doubts += answer["unknown"]
        return verified, doubts

    def _watch(self, group: _Group, now: float) -> None:
        """Look whether a program runs outside MPS, often while programs start, and rarely later."""
        often = max(min(group.within / 8, 2.0), _FIRST_LOOK)
        group.pause = min(group.pause * 1.5, often if now < group.until + group.within else _RARELY)
        group.next_look = now + group.pause
        try:
            self._verified(group)
        except JobFailedError as error:
            self._fail(group, error)
        except MpsdError:
            pass  # an mpsd of the node may be away for a while: its control daemons serve on


def _several(gpus: int) -> JobFailedError:
    return JobFailedError(
        f"the job may see {gpus} GPUs, and a program under MPS uses one of them",
        hint="have each rank choose its own: mpsctl job -- mpirun -n 8 mpsctl job -- PROGRAM, or srun mpsctl job --"
        " PROGRAM; or take one GPU: mpsctl job --gpus 1 -- COMMAND",
    )


_SAME_GPUS: Final = "all ranks of a node must see all its GPUs: srun --gpu-bind=none, without --gpus-per-task"


_OWN: Final = {"processes", "within"}
"""The options that the ranks below a launcher may have of their own: how many they are, and how long they wait."""


def _differing(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Return what differs between the options of two ranks, in words; empty where nothing does."""
    odd = next((name for name in one if name not in _OWN and other.get(name) not in (None, one[name])), "")
    return {"visible": "CUDA_VISIBLE_DEVICES", "by_bus": "CUDA_DEVICE_ORDER"}.get(odd, odd and f"--{odd}")


def _numbers(group: _Group) -> set[int]:
    return {each.rank for each in group.members}


def _have_probed(group: _Group) -> bool:
    return all(each.probe is not None for each in group.members)


def _rank_of(pid: int, group: _Group) -> int | str:
    """Return the number of the rank that a process descends from."""
    ranks = {each.pid: each.rank for each in group.members}
    while pid > 1 and pid not in ranks:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        except OSError:
            break
    return ranks.get(pid, "?")


def _nodes() -> dict[int, int]:
    """Return the NUMA node of each processor."""
    found = dict[int, int]()
    for each in Path("/sys/devices/system/node").glob("node[0-9]*"):
        with contextlib.suppress(OSError):
            for part in filter(None, (each / "cpulist").read_text(encoding="ascii").strip().split(",")):
                first, _, last = part.partition("-")
                found |= dict.fromkeys(range(int(first), int(last or first) + 1), int(each.name.removeprefix("node")))
    return found


def main() -> NoReturn:
    """Run the keeper of the directory that the argument names."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    keeper = Keeper(Path(sys.argv[1]))
    keeper.listen()
    if os.fork():
        os._exit(0)  # the first rank waits for this: it can connect now, and the keeper is no child of its own
    try:
        keeper.run()
    except Exception as error:
        keeper.stumble(error)
        raise
    finally:
        keeper.close()
    sys.exit(0)


if __name__ == "__main__":
    main()
