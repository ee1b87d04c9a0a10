"""The records of an observer outside mpsd, and their checks: leases, operations, events, and the ends of processes."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.chaos.actors import Member, Request
from tests.durability.load import check_room
from tests.node import Node, as_listed

LEFT = "the timeout has expired"
"""mpsd's reason for clients that it ends on an operator's command."""


def now() -> datetime:
    """Return the current time, in the form of mpsd's log."""
    return datetime.now(UTC)


@dataclass
class Operation:
    """A drain or a restart that mpsd has reported as begun."""

    id: str
    daemon: str
    verb: str
    timeouts: list[tuple[datetime, float | None]] = field(default_factory=list)
    """The times at which it was requested, with its timeout."""
    outcomes: list[tuple[datetime, str, str]] = field(default_factory=list)
    """Each logged end: time, outcome and reason."""
    told: str = ""
    """Its outcome by the API."""

    @property
    def is_over(self) -> bool:
        return bool(self.outcomes or self.told)

    def may_end_at(self, moment: datetime) -> bool:
        """Return whether an operator's command to end clients was in force at that time."""
        if any(ended < moment for ended, _, _ in self.outcomes):
            return False
        before = [timeout for asked, timeout in self.timeouts if asked <= moment]
        # A request that arrived while mpsd decided may have been too late.
        return any(timeout is not None for timeout in before[-2:])


@dataclass
class Records:
    """Everything that mpsd reported, and everything that was done to it and around it."""

    node: Node
    granted: dict[str, Any] = field(default_factory=dict)
    """By id, the leases that a caller knows, as they were granted."""
    given_up: dict[str, str] = field(default_factory=dict)
    """Leases that may end, and why."""
    released: set[str] = field(default_factory=set)
    """Leases that mpsd has reported as ended."""
    operations: dict[str, Operation] = field(default_factory=dict)
    unheard: list[Operation] = field(default_factory=list)
    """Operations that may have begun: mpsd was killed before its answer."""
    desired: dict[str, set[str]] = field(default_factory=dict)
    """By control daemon, the possible desired states: several where an answer was not received."""
    _ends: set[tuple[int, str]] = field(default_factory=set)
    """The ends of clients that began while an operator's command was in force: a pid, and the reason."""
    events: dict[int, str] = field(default_factory=dict)
    kills: list[tuple[datetime, str]] = field(default_factory=list)
    """The times at which chaos ended a control daemon, or may have."""
    faults: Counter[str] = field(default_factory=Counter)
    log: list[dict[str, Any]] = field(default_factory=list)
    _read: int = 0

    # -- taking notes --------------------------------------------------------------------------------------------------

    def note_grant(self, lease: dict[str, Any], why_it_may_end: str = "") -> None:
        """Record a new lease that a caller knows."""
        assert lease["id"] not in self.granted, f"{lease['id']} was granted twice"
        self.granted[lease["id"]] = lease
        if why_it_may_end:
            self.given_up[lease["id"]] = why_it_may_end

    def note_request(self, daemon: str, verb: str, request: Request, timeout: float | None, asked: datetime) -> None:
        """Record an operator's request, and mpsd's answer, if there was one."""
        answer, desired = request.answer, self.desired.setdefault(daemon, {"run"})
        wanted = {"resume": "run", "restart": ""}.get(verb, verb)
        if answer is None:
            desired |= {wanted} - {""}
            if verb in {"drain", "restart"}:
                self.unheard.append(Operation("", daemon, verb, [(asked, timeout)]))
            return
        assert answer.status == 202, f"{request.what}: {answer.body!r}"
        if wanted and verb != "reset":
            self.desired[daemon] = {wanted}
        if verb in {"drain", "restart"}:
            # A restart beyond recall continues, and a drain that is requested then is part of it.
            said = answer.json
            operation = self.operations.setdefault(said["id"], Operation(said["id"], daemon, said["verb"]))
            operation.timeouts.append((asked, timeout))

    def read_log(self) -> None:
        with self.node.stderr.open("rb") as stream:
            stream.seek(self._read)
            text = stream.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        for raw in whole.splitlines():
            if not raw.startswith(b"{"):
                raise AssertionError(f"mpsd said what is no event: {raw!r} and so on; the log is {self.node.stderr}")
            self._note_line(json.loads(raw))

    def _note_line(self, line: dict[str, Any]) -> None:
        self.log.append(line)
        at = datetime.fromisoformat(line["at"])
        match line["event"]:
            case "api_defect":
                raise AssertionError(f"a defect: {line}")
            case "operation_ended" if line["operation"] in self.operations:
                self.operations[line["operation"]].outcomes.append((at, line["state"], line["because"]))
            case "lease_ended" if LEFT in line["because"]:
                self.given_up.setdefault(line["lease"], "an operator's word")
            case "client_forced":
                # A client may be ended on several control daemons; the reason names the operator's one.
                daemon = line["because"].partition(":")[0]
                words = [each for each in (*self.operations.values(), *self.unheard) if each.daemon == daemon]
                assert LEFT in line["because"], line
                end = line["pid"], line["because"]
                # The operation is done when no client is left on its daemon; an end that has begun is finished.
                assert end in self._ends or any(each.may_end_at(at) for each in words), f"no operator's command: {line}"
                self._ends.add(end)

    def forced(self) -> set[int]:
        """Return the pids of processes that mpsd reports to have signalled."""
        return {line["pid"] for line in self.log if line["event"] == "client_forced"}

    # -- what always holds ---------------------------------------------------------------------------------------------

    def look(self, members: Iterable[Member]) -> dict[str, Any]:
        """Read mpsd's leases and events, check them, and return the leases."""
        after = max(self.events, default=0)
        answer = self.node.get(f"/v1/events?after={after}")
        assert answer.status == 200, answer.body
        for line in answer.body.decode().splitlines():
            seq = json.loads(line)["seq"]
            assert not self.events or seq == max(self.events) + 1, f"{seq} follows {max(self.events)}"
            self.events[seq] = line
        said = self.node.leases()
        self.read_log()
        # After that, since processes that ended before mpsd's answer have ended by now.
        self.check_members(members)
        self.check_leases(said)
        return {each["id"]: each for each in said}

    def check_leases(self, said: Iterable[dict[str, Any]]) -> None:
        """Check mpsd against every lease that it has granted."""
        said = list(said)
        check_room(said)
        counted = Counter(each["id"] for each in said)
        assert set(counted.values()) <= {1}, f"there twice: {counted}"
        back = self.released & counted.keys()
        assert not back, f"released, and there again: {back}"
        lost = self.granted.keys() - counted.keys() - self.given_up.keys()
        assert not lost, f"granted, not released, and lost: {lost}; the log is {self.node.stderr}"
        here = {each["id"]: each for each in said}
        for lease in self.granted.keys() & here.keys():
            same = ("shares", "env", "owner", "granted", "created")
            assert [here[lease][key] for key in same] == [as_listed(self.granted[lease])[key] for key in same]

    def check_members(self, members: Iterable[Member]) -> None:
        """Check that processes ended only by themselves, by chaos, or by mpsd on an operator's command."""
        for each in members:
            if each.ended and not each.may_end:
                if not (each.went and each.could_not_attach):
                    self.read_log()
                    assert each.pid in self.forced(), (
                        f"client {each.pid} of {each.daemon} ended with {each.process.returncode}, and nobody says why;"
                        f" the log is {self.node.stderr}"
                    )
                each.may_end = "it could not attach, or was forced"
            if each.ended:
                self.given_up.setdefault(each.lease, "its holder ended")

    def check_operations(self, running: Iterable[str]) -> None:
        """Check that each operation continues or ended once, and each completed restart replaced the daemon once."""
        running = set(running)
        for each in self.operations.values():
            assert len(each.outcomes) <= 1, each
            assert each.is_over != (each.id in running), f"{each} is over, or it goes on: which?"
            for ended, state, because in each.outcomes:
                assert state in {"done", "superseded", "failed"}, each
                if each.verb == "restart" and state == "done":
                    self._check_restart(each, ended, because)

    def _check_restart(self, operation: Operation, ended: datetime, because: str) -> None:
        words = because.split()
        if "which replaced" in because:
            assert words[words.index("pid") + 1].strip(",") != words[words.index("replaced") + 1].strip(","), because
        begun = operation.timeouts[0][0]
        # A start between the request and its acceptance is not one for it.
        accepted = [
            line["at"] for line in self.log if line["event"] == "operation_begun" and line["operation"] == operation.id
        ]
        since = datetime.fromisoformat(accepted[0]) if accepted else begun
        started = self._between(since, ended, operation.daemon, "daemon_state", "was started")
        deaths = self._between(begun, ended, operation.daemon, "daemon_death", "")
        killed = sum(begun <= at <= ended for at, daemon in self.kills if daemon == operation.daemon)
        assert started <= 1 + max(deaths, killed), (
            f"{started} were started for {operation}; the log is {self.node.stderr}"
        )

    def _between(self, begun: datetime, ended: datetime, daemon: str, event: str, because: str) -> int:
        lines = (line for line in self.log if line["event"] == event and line.get("daemon") == daemon)
        found = (line for line in lines if because in line.get("because", ""))
        return sum(begun <= datetime.fromisoformat(line["at"]) <= ended for line in found)
