"""A real mpsd as a process, for tests: started, queried over its socket and through mpsctl, and ended."""

import contextlib
import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from mpsd.core.mps_facts import Binds
from mpsd.simulator.control import program
from mpsd.simulator.devices import Setting, set_setting
from tests.catalogued import check_events
from tests.fork_server import ForkServer
from tests.harness import below, kill, wait_until

_ROOT = Path(__file__).parent.parent

BINDS: Final = Binds(os.environ.get("MPSD_BINDS", Binds.CONNECT))
"""The moment at which the limits of simulated servers bind their clients: NVIDIA does not document it."""

TOKEN: Final = "MPSD_LEASE_TOKEN"  # noqa: S105 - the name of the variable


def as_listed(lease: Mapping[str, Any]) -> dict[str, Any]:
    """Return a lease as lists show it to its owner and to administrators: without its token."""

    def public(variables: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in variables.items() if name != TOKEN}

    shares = [{**each, "env": public(each["env"])} for each in lease["shares"]]
    return {**lease, "env": public(lease["env"]), "shares": shares}


def outlined(lease: Mapping[str, Any]) -> dict[str, Any]:
    """Return a lease as users other than its owner and administrators see it."""
    shares = [{**each, "env": {}} for each in lease["shares"]]
    nothing: dict[str, Any] = {"env": {}, "labels": {}, "holders": [], "bearers": [], "keepers": [], "request_id": None}
    return {**lease, **nothing, "shares": shares, "owner": {**lease["owner"], "pid": 0, "start_time": None}}


def unjudged(lease: Mapping[str, Any]) -> dict[str, Any]:
    """Return a lease without mpsd's findings about its processes; there are many if one acts as several users."""
    return {**lease, "violations": [], "unknown": []}


@dataclass(frozen=True)
class Answer:
    """An answer of the API."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("mpsd", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # If many callers wait to be accepted, a non-blocking socket is refused; a blocking one gets its turn.
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 30, 0))
        self.sock.connect(os.fspath(self._path))
        self.sock.settimeout(self.timeout)


@dataclass
class Node:
    """An mpsd in its own directory."""

    root: Path
    simulate: int | None = 2
    control: Path | None = None
    """The control program; the simulator's if it is None."""
    config: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    rooted: bool = True
    """Whether mpsd gets its directory by `--root`; otherwise the configuration has to name it."""
    own_session: bool = False
    """Whether it has a session of its own, so that a SIGINT of the terminal ends the program that started it alone."""
    fork_server: ForkServer | None = None
    """The process that forks mpsd, in a tenth of the time; without one it is started as a program."""
    durations: Mapping[str, float] = field(default_factory=dict)
    """Constants of mpsd that have other values in this one, by their full names; a fork server sets them."""
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self.root / "run" / "mpsd.sock"

    @property
    def stderr(self) -> Path:
        return self.root / "mpsd.stderr"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def command(self) -> list[str]:
        command = [sys.executable, "-m", "mpsd", "run"]
        if self.rooted:
            command += ["--root", str(self.root)]
        if self.simulate is not None:
            command += ["--simulate", str(self.simulate)]
        if self.control is not None:
            command += ["--control", str(self.control)]
        if self.config is not None:
            self.configuration.write_text(self.config)
            command += ["--config", str(self.configuration)]
        return [*command, *self.arguments]

    @property
    def is_forked(self) -> bool:
        """Whether mpsd is forked: the variables of the dynamic loader have to be the fork server's own."""
        loader = {name: value for name, value in self.env.items() if name.startswith("LD_")}
        return self.fork_server is not None and loader.items() <= self.fork_server.loader.items()

    @property
    def configuration(self) -> Path:
        """The file that `config` is written to."""
        return self.root / "mpsd.toml"

    def pipe_directory(self, name: str) -> Path:
        return self.root / "run" / "mps" / name

    def control_log(self, name: str) -> Path:
        """Return the path of a control daemon's own output."""
        return self.root / "log" / name / "control.log"

    def launch(self) -> None:
        variables = {**os.environ, **self.env}
        if self.fork_server is not None and self.is_forked:
            # The process has the interface of Popen.
            child = self.fork_server.start(self.command[3:], self.stderr, variables, durations=self.durations)
            self.process = child  # type: ignore[assignment]
            return
        assert not self.durations, "only a fork server sets them"
        with self.stderr.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=variables,
                cwd=_ROOT,
                start_new_session=self.own_session,
            )

    def start(self, *, ready: bool = True) -> "Node":
        """Start mpsd, and wait until it answers, or until every control daemon is ready."""
        self.launch()
        path = "/readyz" if ready else "/healthz"
        wait_until(
            lambda: self.exited() is None and self.get(path).status == 200,
            what=f"mpsd to answer 200 on {path}; its log is {self.stderr}",
            deadline=20,
            not_yet=(OSError, http.client.HTTPException),
        )
        if self.simulate is not None:
            set_setting(self.root / "run" / "simulated", Setting.BINDS, BINDS)
        return self

    def exited(self) -> int | None:
        """Return mpsd's exit status, and fail if it has one: it should be running."""
        assert self.process is not None
        status = self.process.poll()
        if status is not None:
            raise AssertionError(f"mpsd exited with {status}: {self.stderr.read_text()}")
        return None

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send mpsd a signal, and return its exit status. The control daemons stay."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        """Wait until mpsd ends by itself, and return its exit status."""
        assert self.process is not None
        status = self.process.wait(timeout=30)
        self.process = None
        return status

    def refuse(self) -> tuple[int, str]:
        """Start an mpsd that must end at once; return its exit status and its last output."""
        self.launch()
        return self.ended(), self.stderr.read_text()

    def reload(self, config: str) -> dict[str, Any]:
        """Change the configuration of mpsd, send SIGHUP, and return the log line about it."""
        self.config = config
        self.configuration.write_text(config)
        before = len(self.reloads())
        self.hang_up()
        return wait_until(lambda: self.reloads()[before:], what=f"SIGHUP to be answered; the log is {self.stderr}")[-1]

    def hang_up(self) -> None:
        os.kill(self.pid, signal.SIGHUP)

    def reloads(self) -> list[dict[str, Any]]:
        return [line for line in self.log() if line["event"] in {"settings_reloaded", "settings_refused"}]

    def end_servers(self) -> None:
        """End the servers of clients that have ended, whether mpsd has seen them or not."""
        for found in below(self.root):
            if found.command.endswith(" server"):
                kill(found)
        wait_until(
            lambda: not any(daemon["servers"] for daemon in self.daemons().values()),
            what="mpsd to see that no server is left",
        )

    def clean_up(self) -> None:
        """End mpsd and every process that was started under this root, by pid."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=30)
            self.process = None
        while there := below(self.root):
            for each in there:  # a process may have started another one meanwhile
                kill(each)
        check_events(self.log() if self.stderr.exists() else ())

    def request(
        self, method: str, path: str, body: object = None, *, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send one request over the socket, as this process."""
        connection = _UnixConnection(self.socket)
        try:
            raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            # mpsd refused the request before it was read: the answer says why.
            with contextlib.suppress(BrokenPipeError):
                connection.request(method, path, raw, dict(headers or {}))
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.getheaders()), answer.read())
        finally:
            connection.close()

    def get(self, path: str) -> Answer:
        return self.request("GET", path)

    def lease(self, **asked: object) -> Any:
        """Take out a lease for the process of the tests, and return it."""
        answer = self.request("POST", "/v1/leases", {"threads": 1, "memory": "1GiB", **asked})
        assert answer.status == 201, answer.json
        return answer.json

    def leases(self) -> list[Any]:
        """Return the leases that have not ended."""
        found: list[Any] = self.get("/v1/leases").json["leases"]
        return found

    def daemons(self) -> dict[str, Any]:
        return {each["name"]: each for each in self.get("/v1/daemons").json["daemons"]}

    def unharmed(self) -> dict[str, Any]:
        """Return the facts about the control daemons that callers cannot change: all but the limits."""
        changing = dict.fromkeys(("limits", "limits_wanted", "verified"))
        return {name: {**each, **changing} for name, each in self.daemons().items()}

    def wait_for_state(self, name: str, state: str, *, deadline: float = 15) -> Any:
        """Wait until a control daemon has this state, and return it."""
        return wait_until(
            lambda: (found := self.daemons()[name])["state"] == state and found,
            what=f"{name} to be {state}; the log is {self.stderr}",
            deadline=deadline,
        )

    def mpsctl_command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "mpsd.cli.main", "--socket", str(self.socket), *arguments]

    def mpsctl(self, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        if self.fork_server is not None and not self.fork_server.loader and options.keys() <= {"env"}:
            return self.fork_server.run_mpsctl(self.mpsctl_command(*arguments)[3:], options.get("env", os.environ))
        return subprocess.run(
            self.mpsctl_command(*arguments),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            **options,
        )

    @property
    def front_end_program(self) -> Sequence[str]:
        """The command of the bare front-end."""
        return program() if self.control is None else [str(self.control)]

    def front_end(self, name: str, script: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Run the bare front-end against one control daemon, like a stranger."""
        return subprocess.run(
            self.front_end_program,
            input=script,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            env=self.by_hand(name),
            **options,
        )

    def by_hand(self, name: str) -> dict[str, str]:
        """Return the environment of a user who runs the control program on this daemon's pipe directory."""
        return {"PATH": os.environ["PATH"], "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe_directory(name))}

    def ask(self, name: str, script: str) -> list[str]:
        """Query a control daemon by a front-end, again if mpsd's own was in the way, and return the lines."""
        # A front-end may be turned away silently; the echo of an unknown command proves that it was answered.
        proof = 'Unknown command "anybody-there"'

        def look() -> list[str] | None:
            lines = self.front_end(name, f"anybody-there\n{script}\n").stdout.splitlines()
            return lines if proof in lines else None

        return wait_until(look, what=f"{name} to answer a front-end")[1:]

    def log(self) -> list[dict[str, Any]]:
        text = self.stderr.read_text()
        whole = text[: text.rfind("\n") + 1]
        return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]

    def events(self, event: str, **facts: object) -> list[dict[str, Any]]:
        """Return the log lines about an event with these facts."""
        return [line for line in self.log() if line["event"] == event and facts.items() <= line.items()]


_Kind = TypeVar("_Kind", bound=Node)


@contextlib.contextmanager
def nodes(kind: type[_Kind], place: Path, **defaults: Any) -> Iterator[Callable[..., _Kind]]:
    """Yield a maker of nodes, each in its own directory; at the end they and all that they started are ended."""
    made: list[_Kind] = []

    def make(**options: Any) -> _Kind:
        root = place / f"n{len(made)}"
        root.mkdir()
        place.chmod(0o711)
        made.append(kind(**{"root": root, **defaults, **options}))
        return made[-1]

    yield make
    for node in made:
        node.clean_up()


def running(**options: Any) -> Iterator[Node]:
    """Start a node, yield it, and clean it up; for use in fixtures."""
    node = Node(**options)
    try:
        yield node.start()
    finally:
        node.clean_up()
