"""A node under chaos: the random steps, and the conditions that must hold when it is left in peace."""

import http.client
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from tests.chaos.actors import Member, Request, front_ends, signalled
from tests.chaos.records import Records, now
from tests.chaos.settled import Settled
from tests.daemon.helpers import GIB, stopped
from tests.harness import remove_tree, wait_until
from tests.node import Node

CONFIG: Final = """
[daemon]
answer_deadline = 1.0
probe_interval = 0.5
death_window = 0.1
[enforcement]
grace = 0.3
"""
"""No death counts for long, so that the next start is not delayed.

mpsd waits for a daemon without a pipe for ten times `answer_deadline`, and then ends it with its clients.
"""

REFUSALS: Final = frozenset({"does_not_fit", "daemon_not_ready", "invalid_request", "stopping"})
"""Valid refusals of a request for a lease: the GPU is full or held, or its control daemon or the holder was killed."""

MOST: Final = 6
"""The most leases at a time on one GPU; so many always fit."""

LONG: Final = 3.0
"""Seconds from which on a single step is reported."""

PEACE: Final = 60.0
"""Seconds within which everything settles on a busy machine; some tenths are usual."""


@dataclass
class Chaos:
    """A node, all processes on it, and the source of random numbers."""

    node: Node
    dice: random.Random
    clients: bool
    """Whether servers start, and clients attach to them."""
    memory: bool = True
    """Whether the driver limits memory."""
    daemons: tuple[str, ...] = ("gpu0", "gpu1")
    members: list[Member] = field(default_factory=list)
    waiting: list[tuple[Request, Member]] = field(default_factory=list)
    """Requests in the queue, each with its intended holder."""
    frozen: list[int] = field(default_factory=list)
    kills: int = 0
    """How often mpsd was killed."""
    starts: list[float] = field(default_factory=list)
    """Seconds until mpsd answered after each."""
    ends: tuple[str, ...] = ("admission", "drain", "restart", "nothing", "ask it to end")
    """The actions during which mpsd may be killed."""
    between: int = 8
    """The most steps before the node is left in peace."""
    outlaws: frozenset[int] = frozenset()
    """Uids whose leases mpsd may end, and which do not report their grants."""

    def __post_init__(self) -> None:
        self.records = Records(self.node)
        self.steps: dict[str, int] = {"grant": 12, "release": 2, "wait": 3, "hang_up": 1, "operate": 6, "reload": 1}
        self.steps |= {"foreign_command": 2, "kill_daemon": 2, "freeze_daemon": 1, "kill_front_end": 1, "die": 2}
        self.steps |= {"kill_mpsd": 2, "freeze_mpsd": 1, "remove_pipe": 1, "two_at_once": 2}
        if self.clients:
            self.steps |= {"attach": 10, "leave": 2, "stray": 1, "work": 4}
            self.steps |= {"fault": 1, "kill_server": 2, "freeze_server": 1}

    # -- the dice ------------------------------------------------------------------------------------------------------

    def happens(self) -> None:
        (step,) = self.dice.choices([*self.steps], [*self.steps.values()])
        self._do(step)

    def _do(self, step: str) -> None:
        sys.stdout.write(f"{step} ")
        self.records.faults[step] += 1
        begun = time.monotonic()
        getattr(self, step)()
        if (took := time.monotonic() - begun) > LONG:
            sys.stdout.write(f"({took:.0f} s) ")

    def _daemon(self) -> str:
        return self.dice.choice(self.daemons)

    def _pid(self, daemon: str) -> int | None:
        pid: int | None = self.node.daemons()[daemon]["pid"]
        return pid

    def _servers(self) -> list[int]:
        return [each["pid"] for daemon in self.node.daemons().values() for each in daemon["servers"]]

    def linger(self) -> None:
        """Let some time pass, enough for a few checks of the node."""
        for _ in range(self.dice.randrange(12)):
            self.look()

    # -- the users of the node -----------------------------------------------------------------------------------------

    def _member(self, daemon: str, *, goes: bool = False) -> Member:
        self.members.append(Member(self.node, daemon, goes=goes))
        return self.members[-1]

    def _asked(self, member: Member, **more: object) -> dict[str, Any]:
        threads, memory = self.dice.randint(1, 9), self.dice.randint(1, 3)
        own = {"threads": threads, "memory": memory * GIB, "gpu": member.daemon.removeprefix("gpu"), "pid": member.pid}
        return {**own, **more}

    def _holding(self) -> list[Member]:
        return [each for each in self.members if each.lease and not each.may_end]

    def grant(self) -> None:
        """Request a lease, possibly one that expires soon."""
        daemon = self._daemon()
        if sum(each.daemon == daemon for each in self._holding()) >= MOST:
            return
        member, ttl = self._member(daemon), self.dice.choice([None, None, None, 0.5, 3.0])
        request = self._ask_for(self._asked(member, ttl=ttl))
        request.look(20)
        self._note_lease(request, member, "it expires" if ttl is not None else "")

    def _ask_for(self, body: dict[str, Any]) -> Request:
        return Request(self.node, "POST", "/v1/leases", body)

    def _note_lease(self, request: Request, member: Member, why_it_may_end: str) -> None:
        """Process the answer to a request for a lease; without an answer the outcome is unknown."""
        answer = request.answer
        if answer is None:
            assert request.over, f"{request.what} was not answered"
            member.cut_down()
            return
        if answer.status == 201:
            member.lease = answer.json["id"]
            if member.may_end:
                why_it_may_end = member.may_end
            self.records.note_grant(answer.json, why_it_may_end)
            return
        assert answer.json["code"] in REFUSALS, answer.body
        member.cut_down()

    def wait(self) -> None:
        """Request more than may be free, and wait for it."""
        member = self._member(self._daemon())
        body = self._asked(member, threads=self.dice.choice([5, 70]), wait=self.dice.choice([None, 0.2, 5.0]))
        self.waiting.append((self._ask_for(body), member))

    def hang_up(self) -> None:
        """Have a waiting caller disconnect; a lease that was granted at that very moment is known to no caller."""
        if self.waiting:
            request, member = self.waiting.pop(self.dice.randrange(len(self.waiting)))
            request.hang_up()
            member.cut_down()

    def _receive(self) -> None:
        for each in tuple(self.waiting):
            request, member = each
            request.look()
            if request.over:
                self.waiting.remove(each)
                self._note_lease(request, member, "")

    def release(self) -> None:
        """End a lease; its holder keeps running."""
        if holding := self._holding():
            lease = self.dice.choice(holding).lease
            self.records.given_up.setdefault(lease, "it was released")
            if self.node.request("DELETE", f"/v1/leases/{lease}").status == 204:
                self.records.released.add(lease)

    def attach(self) -> None:
        """Have a holder become a client."""
        if here := [each for each in self._holding() if not each.went]:
            self.dice.choice(here).go()

    def stray(self) -> None:
        self._member(self._daemon(), goes=True)

    def work(self) -> None:
        for each in self._at_work():
            each.say(self.dice.choice(["alloc 1MiB", "free", "compute 0.01", "sync"]))

    def _at_work(self, daemon: str | None = None) -> list[Member]:
        here = [each for each in self.members if each.went and not each.may_end and not each.ended]
        return [each for each in here if each.has_answered and daemon in {None, each.daemon}]

    def leave(self) -> None:
        self._gone(Member.leave)

    def die(self) -> None:
        self._gone(Member.cut_down)

    def _gone(self, way: Callable[[Member], None]) -> None:
        if here := [each for each in self.members if not each.may_end]:
            self._let_go(self.dice.choice(here), way)

    def _let_go(self, member: Member, way: Callable[[Member], None]) -> None:
        self.records.given_up[member.lease] = "its holder ended"  # also one that would have expired later
        way(member)

    def fault(self) -> None:
        """Cause a fatal fault in a client, after which all clients of its GPU end, as real programs do."""
        if here := self._at_work():
            first = self.dice.choice(here)
            first.say("fault")
            for each in self._at_work(first.daemon):
                self._let_go(each, Member.leave)

    # -- the operators of the node -------------------------------------------------------------------------------------

    def operate(self) -> None:
        """Hold, drain, restart, resume or reset a control daemon."""
        verb = self.dice.choice(["hold", "drain", "drain", *["resume"] * 5, *["restart"] * 4, "reset"])
        self._operate(self._daemon(), verb, self.dice.choice([None, None, 0, 0.5]))

    def _operate(self, daemon: str, verb: str, timeout: float | None = None, *, kill: bool = False) -> None:
        takes = verb in {"drain", "restart"}
        asked, body = now(), {"timeout": timeout} if takes else None
        request = Request(self.node, "POST", f"/v1/daemons/{daemon}/{verb}", body)
        if kill:
            self._kill_while(request)
        request.look(20)
        self.records.note_request(daemon, verb, request, timeout if takes else None, asked)

    def reload(self) -> None:
        self.node.hang_up()

    # -- faults --------------------------------------------------------------------------------------------------------

    def foreign_command(self) -> None:
        """Change a limit with a front-end, which waits while the control daemon is stopped."""
        self._thaw()
        self.node.front_end(self._daemon(), f"set_default_active_thread_percentage {self.dice.randint(1, 100)}\n")

    def kill_daemon(self) -> None:
        daemon = self._daemon()
        self.records.kills.append((now(), daemon))
        signalled(self._pid(daemon), signal.SIGKILL)

    def freeze_daemon(self) -> None:
        self._freeze(self._pid(self._daemon()))

    def kill_server(self) -> None:
        if servers := self._servers():
            signalled(self.dice.choice(servers), signal.SIGKILL)

    def freeze_server(self) -> None:
        if servers := self._servers():
            self._freeze(self.dice.choice(servers))

    def kill_front_end(self) -> None:
        """Kill a front-end of mpsd during a conversation, or stop it, if there is one."""
        for each in front_ends(self.node):
            number = self.dice.choice([signal.SIGKILL, signal.SIGSTOP])
            if signalled(each, number) and number == signal.SIGSTOP:
                self.frozen.append(each)  # an mpsd that is killed cannot end it, and nothing else would

    def _freeze(self, pid: int | None) -> None:
        if signalled(pid, signal.SIGSTOP) and pid is not None:
            self.frozen.append(pid)
            self.linger()
        if self.dice.random() < 0.7:
            self._thaw()

    def _thaw(self) -> None:
        while self.frozen:
            signalled(self.frozen.pop(), signal.SIGCONT)

    def remove_pipe(self) -> None:
        """Remove the pipe directory of a running control daemon; an operator replaces the daemon, even with clients."""
        daemon = self._daemon()
        remove_tree(self.node.pipe_directory(daemon))
        self.linger()
        self._replace(daemon)

    def _replace(self, daemon: str) -> None:
        self.records.kills.append((now(), daemon))
        self._operate(daemon, "restart", 0)

    def _attend(self) -> None:
        """Restart a daemon that mpsd leaves alone for its clients.

        Either a resume came between removal and restart; or a restart without a timeout superseded one that had already
        ended the daemon, and waits for the clients of its server, which mpsd says with this remedy.
        """
        for name, daemon in self.node.daemons().items():
            is_cut_off = daemon["state"] == "unresponsive" and not (self.node.pipe_directory(name) / "control").exists()
            waits = daemon["state"] == "down" and any(server["orphan"] for server in daemon["servers"])
            if is_cut_off or (waits and "remaining clients at" not in daemon["because"]):
                self._replace(name)

    def freeze_mpsd(self) -> None:
        """Stop mpsd for a while, during which other processes come and go."""
        with stopped(self.node.pid):
            for _ in range(self.dice.randrange(3)):
                self._gone(self.dice.choice([Member.leave, Member.cut_down]))
                if self.clients:
                    self.attach()

    def kill_mpsd(self) -> None:
        """Kill mpsd, most often during a request, and start it again; a process may end in between."""
        match self.dice.choice(self.ends):
            case "admission":
                member = self._member(self._daemon())
                request = self._ask_for(self._asked(member))
                self._kill_while(request)
                request.look(20)
                self._note_lease(request, member, "")
            case "drain" | "restart" as verb:
                self._operate(self._daemon(), verb, self.dice.choice([None, 0, 0.2]), kill=True)
            case "nothing":
                self.node.end(signal.SIGKILL)
            case _:
                self.node.end(signal.SIGTERM)
        self.kills += 1
        self._thaw()
        if self.dice.random() < 0.3:
            self._gone(self.dice.choice([Member.leave, Member.cut_down]))
        begun = time.monotonic()
        self.node.start(ready=False)
        self.starts.append(time.monotonic() - begun)

    def _kill_while(self, request: Request) -> None:
        """Kill mpsd during a request, or just after its answer."""
        end = time.monotonic() + self.dice.choice([0.0005, 0.005, 0.05, 0.3]) * self.dice.random()
        while (left := end - time.monotonic()) > 0 and not request.over:
            request.look(left)
        while time.monotonic() < end:
            pass
        self.node.end(signal.SIGKILL)

    def two_at_once(self) -> None:
        """Cause two faults at once, while mpsd is stopped."""
        pids = [self._pid(each) for each in self.daemons], self._servers()
        with stopped(self.node.pid):
            for each in self.dice.sample(["daemon", "server", "member"], 2):
                match each:
                    case "daemon":
                        number = self.dice.randrange(len(self.daemons))
                        self.records.kills.append((now(), self.daemons[number]))
                        signalled(pids[0][number], signal.SIGKILL)
                    case "server" if pids[1]:
                        signalled(self.dice.choice(pids[1]), signal.SIGKILL)
                    case _:
                        self._gone(Member.cut_down)

    # -- what is so ----------------------------------------------------------------------------------------------------

    def look(self) -> dict[str, Any]:
        """Observe the node from outside, and check mpsd's statements; return the leases."""
        self._receive()
        return self.records.look(self.members)

    def settles(self) -> None:
        """Leave the node in peace until nothing is pending, and compare the limits in force with the leases."""
        self._thaw()
        begun = time.monotonic()
        last: list[str] = []

        def settled() -> bool:
            self._attend()
            last[:] = [Settled(self).pending()]
            return not last[0]

        try:
            wait_until(settled, what="it to settle", deadline=PEACE, not_yet=(OSError, http.client.HTTPException))
        except AssertionError as error:
            raise AssertionError(f"{error}: {last}; the log is {self.node.stderr}") from error
        for each in [each for each in self.members if each.ended]:
            each.close()
            self.members.remove(each)
        sys.stdout.write(f"-> settled in {time.monotonic() - begun:.1f} s\n")

    def clear(self) -> None:
        """Have all processes leave, and every control daemon run; wait for that, and check that nothing is pending."""
        self._thaw()
        for request, member in self.waiting:
            request.hang_up()
            member.cut_down()
        self.waiting.clear()
        for daemon in self.node.daemons().values():
            for server in daemon["servers"]:
                if server["orphan"]:  # whether an orphan ends by itself is unknown
                    signalled(server["pid"], signal.SIGKILL)
        for each in self.members:
            if not each.may_end:
                self._let_go(each, Member.leave)
        self.settles()
        for name in self.daemons:
            self._operate(name, "resume")
        self.settles()
        assert all(each.is_over for each in self.records.operations.values()), self.records.operations
        assert not self.look(), self.node.stderr

    def close(self) -> None:
        self._thaw()
        for request, _ in self.waiting:
            request.hang_up()
        for each in self.members:
            each.close()
