"""A node under chaos with hostile users, beside honest ones that use it all the time.

Strangers never have a lease; holders sometimes have one, and misuse the access that it gives. Each is a process of a
uid without rights. Their actions are random, while the usual chaos continues: mpsd, control daemons and honest users'
processes die, hang and are reloaded. No action costs an honest user a lease or a process, no GPU is given up, every
start of mpsd succeeds, and answers come in time.
"""

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mpsd.simulator.devices import VARIABLE
from tests.chaos.actors import Member, signalled
from tests.chaos.chaos import MOST, PEACE, REFUSALS, Chaos
from tests.chaos.honest_user import Plan
from tests.chaos.hostile_records import HONEST, HostileRecords
from tests.chaos.latency import Latency
from tests.chaos.records import now
from tests.chaos.users import HonestUser, HostileUser, one_core, stop
from tests.daemon.caller import Caller
from tests.hanging import hang, hanging
from tests.harness import wait_until
from tests.security.test_strangers import ANN, CONTAINER, OWN_PIDS, ROOT_OF
from tests.simulated_clients import variables

STRANGERS: Final = (61301, 61302)
"""Uids that never have a lease."""

HOLDERS: Final = (61311, 61312)
"""Uids that sometimes have a lease."""

CONFIG: Final = """
[daemon]
probe_interval = 0.5
answer_deadline = 1.0
[enforcement]
grace = 0.3
on_violation = "terminate"
[violations]
outside = "report"
[admission]
patience = 2.0
hang_up_grace = 3.0
[metrics]
listen = "127.0.0.1:{port}"
"""
"""Policy ends every kind of violation, except for clients that found no control daemon, since MPS itself lets those
pass.
"""

MANY: Final = CONFIG.replace("[daemon]", '[daemon]\nusers = "many"')
"""The same where users share a control daemon."""

ONE: Final = CONFIG.replace("[daemon]", '[daemon]\nusers = "one"') + "[quota.'*']\ngpu_count = 1\n"
"""The same where a user has a control daemon alone, and so may keep one GPU."""

ROOT_KILLS: Final = 2
"""How often chaos kills one control daemon within `SHORT`; at `daemon.deaths` the GPU would be given up."""

SHORT: Final = 65.0

ROOTS: Final = (0, ANN)
"""The uids of those that are root in a container."""

MOST_ROOTS, MOST_HANGING = 3, 3

SMALL: Final = 5
"""Percent of the threads of a hostile user's lease, small enough to leave room for others."""


@dataclass
class Hostile(Chaos):
    """A node under chaos, its honest users, and its hostile users."""

    port: int = 0
    """The port of the metrics."""
    many: bool = False
    """Whether users share a control daemon, so that hostile ones have access beside honest ones."""
    users: list[HonestUser] = field(default_factory=list)
    hostile: dict[int, HostileUser] = field(default_factory=dict)
    roots: list[Caller] = field(default_factory=list)
    """Callers that are root in containers."""
    planted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Start the records, and set the frequency of each step."""
        super().__post_init__()
        self.daemons, self.outlaws = tuple(HONEST), frozenset((*STRANGERS, *HOLDERS, *ROOTS))
        self.between = 40
        self.ends = ("admission", "nothing", "ask it to end")
        self.latency = Latency()
        self.records: HostileRecords = HostileRecords(self.node, self.users, self.latency)
        # No operator ends clients here, so every ended process is an error.
        self.steps = {"grant": 6, "release": 2, "wait": 2, "hang_up": 1, "die": 2, "reload": 2, "kill_mpsd": 2}
        self.steps |= {"kill_daemon": 2, "freeze_daemon": 1, "kill_front_end": 1, "freeze_mpsd": 1, "two_at_once": 1}
        self.steps |= {"reach": 3, "look_alike": 4, "garbage": 3, "flood": 3, "hung_up": 2, "foreign_pids": 2}
        self.steps |= {"plant": 1, "end_hostile": 2, "hold": 10, "give_back": 4, "write_log": 5, "take_lock": 2}
        self.steps |= {"send_bytes": 5, "command": 5, "crash": 4, "own_waits": 3, "pardon": 2}
        if self.clients:
            self.steps |= {"attach": 8, "leave": 2, "work": 4, "hostile_clients": 4}
        self.steps |= {"mounts": 3, "reports": 3, "pose_as_pod": 2, "tiny": 2, "idle": 2, "stop_own": 4, "contain": 3}
        if Path("/dev/fuse").exists():
            self.steps["hang"] = 3
        self._at_end = ExitStack()
        self._confine = self._at_end.enter_context(one_core())
        self._hanging: list[ExitStack] = []
        self._scrapes: list[float] = []
        self._folder = self.node.root.parent / "hostile"
        self._folder.mkdir()
        self._folder.chmod(0o755)
        self._programs = list(self._lookalikes())

    # -- the node and its users ----------------------------------------------------------------------------------------

    def happens(self) -> None:
        """Carry out one random step while all users are present."""
        if not self.users:
            for daemon, uid in HONEST.items():
                plan = Plan(f"{self.node.socket}", uid, self.dice.getrandbits(32), daemon.removeprefix("gpu"))
                self.users.append(HonestUser(plan))
                self.records.honest.add(self.users[-1].pid)
        for uid in (*STRANGERS, *HOLDERS):
            if uid not in self.hostile:
                self.hostile[uid] = HostileUser(uid, self.node.socket)
                self._confine(self.hostile[uid].pid)
        for user in self.users:
            user.go_on()
        super().happens()

    def _do(self, step: str) -> None:
        """Carry out a step; one that needs root disturbs honest users, and has ended when this returns."""
        if step in {"kill_daemon", "two_at_once"} and not self._may_kill():
            return
        after = {"kill_front_end": 2.5, "freeze_daemon": 1.0, "kill_mpsd": 1.0, "freeze_mpsd": 1.0}
        after |= {"kill_daemon": 1.0, "two_at_once": 1.0, "die": 0.0}
        if step in after:
            with self.latency.disturbance(after[step]):
                super()._do(step)
                self._thaw()
        else:
            super()._do(step)

    def _may_kill(self) -> bool:
        """Return whether root's own kills are still too few for a GPU to be given up."""
        recent = [daemon for at, daemon in self.records.kills if (now() - at).total_seconds() < SHORT]
        return all(recent.count(each) < ROOT_KILLS for each in self.daemons)

    def _member(self, daemon: str, *, goes: bool = False) -> Member:
        member = Member(self.node, daemon, goes=goes, uid=HONEST[daemon])
        self.members.append(member)
        self.records.honest.add(member.pid)
        return member

    def _asked(self, member: Member, **more: object) -> dict[str, Any]:
        # No request waits, and no lease expires, for as long as another step could last.
        bounded = {"wait": self.dice.choice([0.2, 3.0])} if "wait" in more else {}
        return {**super()._asked(member, **more), "ttl": None, **bounded}

    def _let_go(self, member: Member, way: Callable[[Member], None]) -> None:
        super()._let_go(member, way)
        self.records.died.setdefault(member.lease, now())

    def release(self) -> None:
        """End a lease whose holder is no client, and will not become one: policy ends clients without a lease."""
        if here := [each for each in self._holding() if not each.went]:
            member = self.dice.choice(here)
            lease, member.lease = member.lease, ""
            self.records.given_up.setdefault(lease, "it was released")
            if self.node.request("DELETE", f"/v1/leases/{lease}").status == 204:
                self.records.released.add(lease)

    # -- those without a lease -----------------------------------------------------------------------------------------

    def _stranger(self) -> HostileUser:
        return self.hostile[self.dice.choice(STRANGERS)]

    def _anybody(self) -> HostileUser:
        return self.hostile[self.dice.choice([*STRANGERS, *HOLDERS])]

    def _seed(self) -> int:
        return self.dice.getrandbits(32)

    def reach(self) -> None:
        """Try all accesses to a closed pipe directory."""
        stranger, directory = self._stranger(), self._directory(self._daemon())
        opened = {
            "fifo": stranger.act("fifo", directory=directory, how="byte", seed=0),
            "lock": stranger.act("lock", directory=directory),
            "sockets": stranger.act("seat", directory=directory, size=9, seed=self._seed(), keep=False),
        }
        assert not any(opened.values()), f"a stranger got in: {opened}"

    def _lookalikes(self) -> Iterator[bytes]:
        """Make programs that take `-f` and wait: at a usual path, at a path of any bytes, and setuid."""
        tail = shutil.which("tail") or "/usr/bin/tail"
        for number, name in enumerate((b"nvidia-cuda-mps-control", b"\xff\xed\xb0\x80\n", b"nvidia-cuda-mps-server")):
            path = os.fsencode(self._folder) + b"/" + name
            shutil.copyfile(tail, path)
            os.chmod(path, stat.S_ISUID | 0o755 if number == 2 else 0o755)  # noqa: PTH101 - for anybody to run
            yield path

    def look_alike(self) -> None:
        """Run look-alikes with the names, arguments and variables of NVIDIA's programs."""
        name = self.dice.choice([b"nvidia-cuda-mps-control", b"nvidia-cuda-mps-server", self.dice.randbytes(40)])
        directory = os.fsencode(self.node.pipe_directory(self._daemon()))
        words = [name.replace(b"\0", b""), b"-f"]
        variables = {b"CUDA_MPS_PIPE_DIRECTORY": directory, b"CUDA_VISIBLE_DEVICES": b"\xff\n"}
        self._anybody().act(
            "look_alike",
            program=self.dice.choice(self._programs).hex(),
            arguments=[each.hex() for each in words],
            variables={key.hex(): value.hex() for key, value in variables.items()},
        )
        self._anybody().act("rename", name=self.dice.choice([b"nvidia-cuda-mps-", self.dice.randbytes(15)]).hex())

    def garbage(self) -> None:
        keep = self.dice.random() < 0.5
        self._anybody().act("garbage", count=self.dice.randint(1, 60), seed=self._seed(), keep=keep)

    def flood(self) -> None:
        """Open so many connections and requests at once that some are refused."""
        self._anybody().act("flood", count=self.dice.randint(50, 1000), seed=self._seed())

    def hung_up(self) -> None:
        """Send requests that cannot be granted, and disconnect, until the queue is full."""
        body = {"threads": 100, "memory": "79GiB", "wait": None}
        self._anybody().act("wait", body=body, count=self.dice.randint(1, 300), hang_up=True)

    def foreign_pids(self) -> None:
        """Request leases for other users' processes, for threads, for ended processes and for invalid pids."""
        threads = [int(each.name) for each in Path(f"/proc/{self.node.pid}/task").iterdir()]
        others = [self.node.pid, os.getpid(), *(each.pid for each in self.users), 1]
        with subprocess.Popen(["true"]) as dead:
            pass
        none = [dead.pid, 0, -1, 1 << 22, (1 << 31) - 1, 1 << 31, 1 << 63, 1 << 70]
        answers = self._anybody().act("pids", pids=[*threads, *others, *none])
        wrong = [each for each in answers if each[1] in {200, 201, 500}]
        assert not wrong, f"(pid, status): {wrong}; the log is {self.node.stderr}"

    def plant(self) -> None:
        """Leave files in directories that all users may write to, and where NVIDIA's programs have theirs."""
        stranger = self._stranger()
        places = ("/dev/shm/cuda.shm.{:x}.{:x}.{}", "/tmp/cuda-{:x}-{:x}-{}")
        names = [self.dice.choice(places).format(HONEST["gpu0"], self._seed(), number) for number in range(6)]
        self.planted += stranger.act("plant", paths=names)

    # -- those with a lease --------------------------------------------------------------------------------------------

    def _holder(self) -> HostileUser:
        return self.hostile[self.dice.choice(HOLDERS)]

    def _held(self, uids: Collection[int] = HOLDERS) -> list[dict[str, Any]]:
        said = self.node.leases()
        return [each for each in said if each["owner"]["uid"] in uids and each["state"] in {"granted", "active"}]

    def _target(self) -> tuple[HostileUser, str]:
        """Return a hostile user, and a control daemon to which it has access if there is one."""
        held = self._held()
        if held and self.dice.random() < 0.9:
            lease = self.dice.choice(held)
            return self.hostile[lease["owner"]["uid"]], lease["daemon"]
        return self._holder(), self._daemon()

    def _directory(self, daemon: str) -> str:
        return f"{self.node.pipe_directory(daemon)}"

    def hold(self) -> None:
        """Request a small lease, most often on the GPU where other users are rarest."""
        holder = self._holder()
        if sum(each["owner"]["uid"] == holder.uid for each in self._held()) < 3:
            gpu = self.dice.choice("22201")
            body = {"threads": self.dice.randint(1, SMALL), "memory": "1GiB", "gpu": gpu}
            status, answer = holder.act("ask", method="POST", path="/v1/leases", body=body)
            assert status != 500, answer

    def give_back(self) -> None:
        if held := self._held():
            self._gives_back(self.dice.choice(held))

    def _gives_back(self, lease: dict[str, Any]) -> None:
        if user := self.hostile.get(lease["owner"]["uid"]):
            user.act("ask", method="DELETE", path=f"/v1/leases/{lease['id']}")

    def end_hostile(self) -> None:
        self._leaves(self.hostile[self.dice.choice([*self.hostile])])

    def _leaves(self, user: HostileUser) -> None:
        """End a user with all of its processes, and note which leases are to end."""
        held = [each["id"] for each in self._held() if each["owner"]["pid"] == user.pid]
        self.records.died |= dict.fromkeys(held, now())
        self.hostile.pop(user.uid).close()

    def write_log(self) -> None:
        """Write into the FIFO of a log, or fill it."""
        user, daemon = self._target()
        how = self.dice.choice(["byte", "fill", "some"])
        opened = user.act("fifo", directory=self._directory(daemon), how=how, seed=self._seed())
        assert opened <= (not self.many), f"uid {user.uid} opened the FIFO of {daemon} {opened} times"

    def take_lock(self) -> None:
        """Wait for the lock of a control daemon."""
        user, daemon = self._target()
        opened = user.act("lock", directory=self._directory(daemon))
        assert not opened, f"uid {user.uid} opened {opened} locks of {daemon}"

    def send_bytes(self) -> None:
        """Send random bytes to a control daemon, and occupy its only connection."""
        user, daemon = self._target()
        size, keep = self.dice.choice([0, 1, 8, 100, 5000]), self.dice.random() < 0.5
        user.act("seat", directory=self._directory(daemon), size=size, seed=self._seed(), keep=keep)

    def command(self) -> None:
        user, daemon = self._target()
        words = [
            f"set_default_active_thread_percentage {self.dice.randint(1, 100)}",
            f"set_default_device_pinned_mem_limit 0 {self.dice.randint(1, 79)}G",
            "set_default_client_priority 1",
            "quit",
            "\x1b[2J\xff\xfe",
            "x" * self.dice.choice([100, 4095, 4096, 9000]),
            f"mpsd-{self._seed():032x}-0",
            "get_server_list\rset_default_active_thread_percentage 77",
            "[2026-11-22 01:02:03.004 Control     1] Cmd:quit",
        ]
        if self.clients:
            # Without a GPU none of NVIDIA's servers starts, and six failures in a row close the GPU to all users for a
            # minute.
            words.append(f"start_server -uid {user.uid}")
        lines = [self.dice.choice(words) for _ in range(self.dice.randint(1, 20))]
        program = "" if self.node.control is None else f"{self._front_end}"
        count, keep = self.dice.choice([1, 1, 1, 20]), self.dice.random() < 0.3
        script = "\n".join([*lines, ""])
        user.act("front_ends", directory=self._directory(daemon), program=program, script=script, count=count,
                 keep=keep)  # fmt: skip

    @property
    def _front_end(self) -> Path:
        """The path of NVIDIA's control program where all users can execute it."""
        assert self.node.control is not None
        program = self._folder / "front-end"
        if not program.exists():
            shutil.copyfile(self.node.control, program)
            program.chmod(0o755)
        return program

    def crash(self) -> None:
        """Crash a control daemon in the way that a holder with access could, by bytes that it cannot parse."""
        if held := self._held(self.outlaws):
            number = self.dice.choice([signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL])
            signalled(self._pid(self.dice.choice(held)["daemon"]), number)

    def pardon(self) -> None:
        for named in (*(f"/{uid}" for uid in (*HOLDERS, ANN)), "?cgroup=/"):
            self.node.request("DELETE", f"/v1/quarantines{named}")

    def own_waits(self) -> None:
        """Wait for a lease that the user's own leases obstruct."""
        body = {"threads": self.dice.choice([96, 100]), "memory": "1GiB", "wait": self.dice.choice([1, 5])}
        gpu: dict[str, Any] = self.dice.choice([{}, {"gpu": "2"}, {"gpus": 3}])
        self._holder().act("wait", body={**body, **gpu}, count=self.dice.randint(1, 20), hang_up=False)

    def hostile_clients(self) -> None:
        """Start more clients than a lease has room for."""
        user, daemon = self._target()
        variables = {VARIABLE: f"{self.node.root}/run/simulated", "CUDA_MPS_PIPE_DIRECTORY": self._directory(daemon)}
        user.act("clients", variables=variables, count=self.dice.randint(1, 3))

    def hang(self) -> None:
        """Run a process that never finishes reading: a holder, a client, and a carrier of another lease's token."""
        if len(self._hanging) >= MOST_HANGING:
            self._hanging.pop(0).close()
        uid, daemon = self.dice.choice(HOLDERS), f"gpu{self.dice.choice('22201')}"
        carried = [each for each in self._held() if each["owner"]["uid"] == uid]
        where = {**variables(self.node, daemon)}
        if carried:
            where |= self.node.get(f"/v1/leases/{self.dice.choice(carried)['id']}").json.get("env", {})
        with ExitStack() as opened:
            directory = self.node.root.parent / f"silent-{self._seed():08x}"
            client = opened.enter_context(hanging(directory, uid, where))
            self._confine(client.pid)
            body = {"threads": 1, "memory": "1MiB", "gpu": daemon.removeprefix("gpu"), "pid": client.pid}
            self.node.request("POST", "/v1/leases", body)
            if self.clients:
                client.do("init")
            hang(client)
            self._hanging.append(opened.pop_all())

    def mounts(self) -> None:
        self._holder().act("mounts", count=self.dice.choice([300, 5000]), requests=self.dice.choice([10, 300]))

    def reports(self) -> None:
        """Request the largest reports that mpsd answers, and larger ones, as many at a time as a user may."""
        paths = [
            "/v1/history?by=lease&step=1",
            "/v1/history?by=lease&since=600&step=10",
            "/v1/history?by=lease&totals=true",
            "/v1/history?by=user&since=3600&step=1",
            "/v1/leases",
            "/metrics",
        ]
        self._anybody().act("reports", paths=self.dice.choices(paths, k=12))

    def pose_as_pod(self) -> None:
        granted = self._holder().act("pose_as_pod", seed=self._seed())
        assert not {201, 500} & set(granted), granted

    def tiny(self) -> None:
        self._holder().act("tiny")

    def idle(self) -> None:
        """Occupy the metrics port, at which a scrape is answered nevertheless."""
        self._anybody().act("idle", port=self.port, count=48)
        begun = time.monotonic()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            assert answer.status == 200
        self._scrapes.append(time.monotonic() - begun)

    def stop_own(self) -> None:
        """Stop one's own servers, clients and front-ends, and a holder, and perhaps leave."""
        user, _ = self._target()
        user.act("stop", pids=self._servers())
        if self.dice.random() < 0.3:
            self._leaves(user)

    def contain(self) -> None:
        """Have root in a container request leases for itself, and for control groups that are not its own."""
        if len(self.roots) >= MOST_ROOTS:
            self.roots.pop(0).kill()
        before = self.dice.choice([CONTAINER, ROOT_OF.format(flags=OWN_PIDS, uid=0)])
        caller = Caller(self.node.socket, before=before)
        self.roots.append(caller)
        self._confine(caller.pid)
        small = {"threads": 1, "memory": "1MiB", "gpu": "2"}
        assert caller.admit(**small).status != 500
        group = self.dice.choice(["/", "/system.slice", "/kubepods.slice", f"/proc/{self.node.pid}/cgroup"])
        answer = caller.admit(**small, holder={"cgroup": group})
        assert answer.status not in {201, 500}, answer.body

    # -- what is so ----------------------------------------------------------------------------------------------------

    def settles(self) -> None:
        """Have all users pause, wait until the node has settled, and check that each GPU still serves its users."""
        self._thaw()
        begun = time.monotonic()
        for each in self.hostile.values():
            each.act("pause")
        stop(self.users, "pause", self.records.take_in)
        sys.stdout.write(f"-> all pause after {time.monotonic() - begun:.1f} s ")
        super().settles()
        begun = time.monotonic()
        for daemon in self.daemons:
            self._serves(daemon)
        sys.stdout.write(f"-> each GPU serves after {time.monotonic() - begun:.1f} s\n")
        self.latency.sort()

    def _attend(self) -> None:
        """Have large leases released: a request for a whole GPU may have been granted after all other users left."""
        for lease in self._held():
            if lease["active_thread_percentage"] > SMALL:
                self._gives_back(lease)

    def _serves(self, daemon: str) -> None:
        """Check that an honest user gets a lease there, unless hostile ones legitimately have the GPU."""
        full = sum(each.daemon == daemon for each in self._holding()) >= MOST
        if not self.users or full:
            return
        user = next(each for each in self.users if each.plan.uid == HONEST[daemon])
        body = {"threads": 1, "memory": "1GiB", "gpu": daemon.removeprefix("gpu"), "pid": user.pid}

        def served() -> bool:
            self._attend()
            if not self.many and any(each["daemon"] == daemon for each in self._held(self.outlaws)):
                return True
            answer = self.node.request("POST", "/v1/leases", body)
            if answer.status != 201:
                assert answer.json["code"] in REFUSALS, answer.body
                return False
            return self.node.request("DELETE", f"/v1/leases/{answer.json['id']}").status == 204

        wait_until(served, what=f"{daemon} to serve uid {user.plan.uid}; the log is {self.node.stderr}", deadline=PEACE)

    def clear(self) -> None:
        """Have all users leave, hostile ones first."""
        self._thaw()
        self._end_hostile_users()
        stop(self.users, "leave", self.records.take_in)

        def gone() -> bool:
            leases = self.look().values()
            return not any(each["owner"]["uid"] in self.outlaws for each in leases)

        wait_until(gone, what="hostile users' leases to end", deadline=PEACE, not_yet=(OSError,))
        super().clear()

    def _end_hostile_users(self) -> None:
        for each in self.hostile.values():
            each.close()
        self.hostile.clear()
        while self.roots:
            self.roots.pop().kill()
        while self._hanging:
            self._hanging.pop().close()

    def close(self) -> None:
        self._end_hostile_users()
        for each in self.users:
            each.close()
        for path in self.planted:
            Path(path).unlink(missing_ok=True)
        super().close()
        self._at_end.close()

    def summary(self) -> Iterator[str]:
        yield from self.latency.lines()
        for what, seconds in {
            "starts of mpsd": self.starts,
            "scrapes beside idle connections": self._scrapes,
        }.items():
            yield f"{what}: {len(seconds)}, at most {max(seconds, default=0):.2f} s"
        ends = self.records.outlived.values()
        took, because = max(ends, default=(0.0, ""))
        yield f"ends of leases after those of their holders: {len(ends)}, at most {took:.2f} s ({because})"
        served = dict.fromkeys(HONEST, 0)
        for lease in self.records.granted.values():
            served[lease["daemon"]] += 1
        yield f"leases that honest users were granted: {served}"
        most = max(self.records.bytes.values(), default=0)
        yield f"bytes of mpsd's log in a minute, without honest users' leases: {most} at most"
