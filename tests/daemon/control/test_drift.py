"""Any local user can change a control daemon's limits: mpsd detects that, restores them, and reports the command."""

import json
import shlex
import signal
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from mpsd.core.events import EventName
from mpsd.core.settings import LogFormat
from mpsd.daemon.record.bounded import BoundedLog
from mpsd.daemon.record.log import configure
from mpsd.simulator.control import program as simulator
from tests.daemon.conftest import Start
from tests.daemon.control.operations import begin, ended, look, waiting
from tests.daemon.helpers import (
    BRISK,
    LIMITS,
    PERCENTAGE,
    SOON,
    branches,
    by_hand,
    event,
    holding,
    is_running,
    program,
    undone,
)
from tests.harness import wait_until
from tests.node import Node
from tests.real import RealDaemon, real_daemons
from tests.simulated_clients import SimulatedClient, variables

pytestmark = [pytest.mark.real_daemon(535), pytest.mark.thorough]

_FORGED = "[2026-11-21 02:59:14.618 Control 1]"
"""The beginning of a line of the log."""

_GPUS = 10


@pytest.fixture(scope="module")
def numbers() -> Iterator[int]:
    """Count the GPUs that the tests have used."""
    return count()


@pytest.fixture(scope="module")
def node(node_for_all: Start) -> Node:
    """Start the node that the tests of this module share; each test uses its own GPU on it."""
    return node_for_all(simulate=_GPUS, config=LIMITS).start()


@pytest.fixture
def name(numbers: Iterator[int]) -> str:
    """Return the name of a control daemon that no other test has used."""
    number = next(numbers)
    assert number < _GPUS, "a test more than there are GPUs"
    return f"gpu{number}"


def _is_let_in(node: Node, name: str, script: str) -> bool:
    """Return whether the daemon served a stranger's front-end: while mpsd talks, the daemon turns others away."""
    return "10.0" in str(node.front_end(name, script).stdout)


def test_memory_lower_higher_and_gone(node: Node, name: str) -> None:
    """A memory limit that is lower, higher or gone is restored each time, and reported with its own command."""
    for value, found in (("1G", 1 << 30), ("64G", 64 << 30), ("0", None)):
        command = f"set_default_device_pinned_mem_limit 0 {value}"
        node.ask(name, command)
        seen = undone(node, name, "pinned_device_mem_limit", found=found)
        assert (seen["wanted"], seen["command"]) == (8 << 30, command)
        assert by_hand(node, name) == (["50.0"], ["8G"])


def test_both(node: Node, name: str) -> None:
    """Two limits that one front-end changed are both restored, and each is reported with its own command."""
    commands = ["set_default_active_thread_percentage 20", "set_default_device_pinned_mem_limit 0 2G"]
    node.ask(name, "\n".join(commands))
    undone(node, name, "pinned_device_mem_limit")
    assert [each["command"] for each in node.daemons()[name]["undone"]] == commands
    assert by_hand(node, name) == (["50.0"], ["8G"])


@pytest.mark.parametrize("real", branches(535, 550, 555))
def test_client_priority(make_node: Start, real: RealDaemon) -> None:
    """A default priority that a stranger lowered is restored, and reported with its command."""
    node = make_node(simulate=1, control=real.control, config=LIMITS).start()
    command = "set_default_client_priority 1"
    node.ask("gpu0", command)
    seen = undone(node, "gpu0", "default_client_priority")
    assert (seen["wanted"], seen["found"], seen["command"]) == (0, 1, command)
    assert node.ask("gpu0", "get_default_client_priority") == ["0"]
    assert len(node.events("limit_drift", limit="default_client_priority")) == 1
    assert node.daemons()["gpu0"]["state"] == "ready"


def test_client_priority_while_away(make_node: Start) -> None:
    """The next mpsd restores a priority that was lowered while mpsd was down."""
    for control in (real_daemons()[535], None):
        node = make_node(simulate=1, control=control).start()
        node.end(signal.SIGKILL)
        node.ask("gpu0", "set_default_client_priority 1")
        node.start()
        undone(node, "gpu0", "default_client_priority")
        assert node.ask("gpu0", "get_default_client_priority") == ["0"]


@pytest.mark.parametrize("real", branches(470))
def test_no_client_priority(make_node: Start, real: RealDaemon) -> None:
    """A driver without priorities is queried once, and never again."""
    node = make_node(simulate=1, control=real.control, config=PERCENTAGE).start()
    node.ask("gpu0", "set_default_active_thread_percentage 10")
    undone(node, "gpu0", "active_thread_percentage")
    assert node.control_log("gpu0").read_text().count("client_priority") <= 2


@pytest.mark.parametrize("real", branches(470, 555))
def test_flapping(make_node: Start, real: RealDaemon) -> None:
    """A limit that is changed in a loop is restored each time without filling the log: further changes are counted."""
    node = make_node(simulate=1, control=real.control, config=PERCENTAGE).start()

    def left_out() -> bool:
        node.front_end("gpu0", "set_default_active_thread_percentage 10\n" * 20)
        return len(node.events("foreign_command")) >= 32

    wait_until(left_out, what="as much to be told as is in a minute", deadline=30)
    for number in range(3):
        node.ask("gpu0", f"set_default_active_thread_percentage 1{number}")
        wait_until(lambda: by_hand(node, "gpu0", real)[0] == ["50.0"], what="it to be put back")
    for kind in ("foreign_command", "limit_drift", "limit_drift_ended"):
        assert len(node.events(kind)) <= 32 + 12


def test_what_was_left_out_is_counted() -> None:
    """Of each kind, 32 are reported in a minute; after that an occasional line has the number that were left out."""
    with TemporaryFile("w+", encoding="utf-8") as stream:
        bounded = BoundedLog(configure(LogFormat.JSON, stream=stream))
        for number in range(40):
            bounded.warning(EventName.FOREIGN_COMMAND, command=f"{number}")
        bounded.warning(EventName.FOREIGN_COMMAND, command="many", left_out=100)
        bounded.info(EventName.LIMIT_DRIFT_ENDED)
        bounded.settle()
        for budget in bounded._budgets.values():
            budget.last_at -= 5
        bounded.settle()
        bounded.warning(EventName.FOREIGN_COMMAND, command="one more")
        for budget in bounded._budgets.values():
            budget.since -= 60
        bounded.warning(EventName.FOREIGN_COMMAND, command="next")
        stream.seek(0)
        told = [json.loads(line) for line in stream]
    assert [each["event"] for each in told].count("limit_drift_ended") == 1
    commands = [(each["command"], each.get("left_out")) for each in told if each["event"] == "foreign_command"]
    assert commands == [*((f"{number}", None) for number in range(32)), ("many", 108), ("next", 1)]


def test_limit_where_none_is_wanted(make_node: Start) -> None:
    """A memory limit that is not configured is removed."""
    node = make_node(simulate=1, config=PERCENTAGE).start()
    node.ask("gpu0", "set_default_device_pinned_mem_limit 0 1G")
    seen = undone(node, "gpu0", "pinned_device_mem_limit")
    assert (seen["wanted"], seen["found"]) == (None, 1 << 30)
    assert by_hand(node, "gpu0") == (["50.0"], [])


def test_command_of_one_who_stays(make_node: Start) -> None:
    """The command of a stranger that stays connected is remembered until mpsd can restore the limit."""
    node = make_node(simulate=1, config=LIMITS + BRISK).start()
    command = "set_default_active_thread_percentage 10"
    with holding(node, "gpu0", command):
        wait_until(lambda: node.events("foreign_command", command=command), what="the command to be seen")
        node.wait_for_state("gpu0", "unresponsive")
    assert undone(node, "gpu0", "active_thread_percentage")["command"] == command


_STUBBORN = """
[ "$1" = -f ] && exec {control} "$@"
[ -e {spell} ] && exec sed 's/^\\(set_default_active_thread_percentage\\) .*/\\1 10/' | {control}
exec {control}
"""


def test_what_cannot_be_put_back(make_node: Start, short_tmp: Path, control: Path) -> None:
    """While a limit does not take effect, no lease is granted there, and the status says what is wrong."""
    spell = short_tmp / "spell"
    stubborn = program(short_tmp / "nvidia-cuda-mps-control", _STUBBORN.format(control=control, spell=spell))
    node = make_node(simulate=1, control=stubborn, config=LIMITS + BRISK).start()
    asked = {"threads": 10, "memory": "1GiB"}
    spell.touch()
    command = "set_default_active_thread_percentage 10"
    node.ask("gpu0", command)
    daemon = node.wait_for_state("gpu0", "starting")
    (seen,) = daemon["drift"]
    assert (seen["wanted"], seen["found"], seen["command"], seen["undone"]) == (50.0, 10.0, command, None)
    status = node.get("/v1/status").json
    assert status["healthy"] is False
    assert [(each["kind"], each["subject"]) for each in status["reasons"] if each["kind"] == "drift"] == [
        ("drift", "gpu0")
    ]
    refused = node.request("POST", "/v1/leases", asked)
    assert (refused.status, refused.json["code"]) == (409, "daemon_not_ready")

    spell.unlink()
    undone(node, "gpu0", "active_thread_percentage", since=seen["since"])
    node.wait_for_state("gpu0", "ready")
    assert node.request("POST", "/v1/leases", asked).status == 201


class TestUnproven:
    """An operator's command on a control daemon with a limit that cannot be restored."""

    @pytest.fixture
    def spell(self, short_tmp: Path) -> Path:
        """Return the file that keeps the control program from setting a limit, for as long as it exists."""
        return short_tmp / "spell"

    @pytest.fixture
    def node(self, make_node: Start, spell: Path, control: Path) -> Node:
        """Return a node that is not started yet."""
        stubborn = program(spell.with_name("nvidia-cuda-mps-control"), _STUBBORN.format(control=control, spell=spell))
        return make_node(simulate=1, control=stubborn, config=LIMITS + BRISK)

    @staticmethod
    def cast(node: Node, spell: Path) -> int:
        """Change a limit for good, and return the pid of its control daemon."""
        spell.touch()
        node.ask("gpu0", "set_default_active_thread_percentage 10")
        wait_until(lambda: node.events("limits_not_held"), what="the limit not to be restored")
        pid = node.daemons()["gpu0"]["pid"]
        assert isinstance(pid, int)
        return pid

    @staticmethod
    def replaced(node: Node, before: int) -> int:
        """Wait until another control daemon than `before` has been asked several times; return its pid."""
        pid: int = wait_until(
            lambda: (found := node.daemons()["gpu0"]["pid"]) != before and found,
            what=f"another one than {before}; the log is {node.stderr}",
        )
        refused = len(node.events("limits_not_held"))
        wait_until(lambda: len(node.events("limits_not_held")) > refused + 2, what="it to be asked again")
        assert node.daemons()["gpu0"]["pid"] == pid
        return pid

    def test_restart(self, node: Node, spell: Path) -> None:
        """Each command to restart it replaces it once, and the operation is done when every limit reads back."""
        before = self.cast(node.start(), spell)
        node.wait_for_state("gpu0", "starting")
        operation = begin(node, "restart")
        first = self.replaced(node, before)
        assert look(node, operation)["state"] == "running"
        assert begin(node, "restart")["id"] == operation["id"]
        second = self.replaced(node, first)
        spell.unlink()
        ended(node, operation)
        assert node.wait_for_state("gpu0", "ready")["pid"] == second
        started = node.events("daemon_state", daemon="gpu0", before="down", state="starting")
        assert [each["pid"] for each in started] == [before, first, second]

    def test_held(self, node: Node, spell: Path) -> None:
        """One that an operator holds is drained, and restarted, as well."""
        begin(node.start(), "hold")
        before = self.cast(node, spell)
        assert node.daemons()["gpu0"]["state"] == "held"
        ended(node, begin(node, "drain"))
        operation = begin(node, "restart")
        after = self.replaced(node, before)
        spell.unlink()
        ended(node, operation)
        assert node.wait_for_state("gpu0", "draining")["pid"] == after

    def test_clients(self, make_node: Start, spell: Path) -> None:
        """Its clients are waited for, and ended after the timeout as those of any other one: nothing is forced."""
        node = make_node(simulate=1, config=f'[enforcement]\nunadmitted = "allow"\ngrace = 0.3\n{LIMITS}{BRISK}')
        command = shlex.join(simulator(gpus=str(node.root / "run" / "simulated")))
        node.control = program(spell.with_name("control"), _STUBBORN.format(control=command, spell=spell))
        node.start()
        with SimulatedClient(variables(node)) as client:
            assert client.hello["mps"]
            self.cast(node, spell)
            node.wait_for_state("gpu0", "starting")
            (blocker,) = waiting(node, begin(node, "restart"))
            assert (blocker["what"], blocker["pid"]) == ("client", client.pid)
            operation = begin(node, "restart", timeout=0)
            event(node, "client_forced", pid=client.pid, step="SIGTERM")
            spell.unlink()
            ended(node, operation)
        assert [each["step"] for each in node.events("client_forced")] == ["terminate_client", "SIGTERM"]
        assert node.events("daemon_forced") == []

    def test_stopped(self, node: Node, spell: Path) -> None:
        """`--stop-daemons-on-exit` stops it."""
        node.arguments = ("--stop-daemons-on-exit",)
        pid = self.cast(node.start(), spell)
        node.wait_for_state("gpu0", "starting")
        assert node.end() == 0
        assert not is_running(pid)


def test_what_changes_nothing(node: Node, name: str) -> None:
    """A stranger's queries, and commands that the daemon does not execute, are no drift."""
    node.ask(name, "get_server_list\nset_default_active_thread_percentage 150\nbogus 10")
    wait_until(lambda: node.events("foreign_command", daemon=name), what="the command to be seen", deadline=SOON)
    daemon = node.daemons()[name]
    assert (daemon["state"], daemon["drift"]) == ("ready", [])
    (told,) = node.events("foreign_command", daemon=name)
    assert told["command"] == "set_default_active_thread_percentage 150"


def test_strangers_in_disguise(node: Node, numbers: Iterator[int]) -> None:
    """A stranger that imitates mpsd's conversations or its log lines is detected as soon as others, and is named."""
    disguises = [
        "mpsd-",
        "mpsd-00000000-0",
        *(f"x{end}{_FORGED} NEW UI{end}{_FORGED} Cmd:mpsd-00000000-0" for end in "\r\x0b"),
    ]
    command, names = "set_default_active_thread_percentage 10", [f"gpu{next(numbers)}" for _ in disguises]
    for name, disguise in zip(names, disguises, strict=True):
        script = f"{disguise}\n{command}\n"
        wait_until(partial(_is_let_in, node, name, script), what="the stranger to be let in")
    for name in names:
        assert undone(node, name, "active_thread_percentage")["command"] == command
