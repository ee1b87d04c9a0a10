"""SIGHUP applies new settings to the running control daemons without a restart, or keeps the old ones and says why."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.daemon.conftest import Start
from tests.daemon.helpers import BRISK, GIB, LIMITS, MIB, branches, by_hand
from tests.harness import wait_until
from tests.node import Node
from tests.real import RealDaemon

pytestmark = pytest.mark.thorough

_OTHER = '[limits]\nactive_thread_percentage = 12.5\npinned_device_mem_limit = "2GiB"\n'


def wait_for_limits(node: Node, name: str, percentage: float, memory: int | None) -> None:
    """Wait until a control daemon reports these limits, and mpsd holds them."""
    wanted = {"active_thread_percentage": percentage, "pinned_device_mem_limit": memory}
    wait_until(
        lambda: (
            (found := node.daemons()[name])["limits"] == wanted and found["state"] == "ready" and not found["drift"]
        ),
        what=f"{name} to hold {wanted}; the log is {node.stderr}",
    )


@pytest.mark.parametrize("real", branches(470, 535))
def test_limits_are_applied(make_node: Start, real: RealDaemon) -> None:
    """Changed limits are set on every running daemon and read back: the same processes, which stay ready."""
    node = make_node(control=real.control, config="").start()
    before = node.daemons()
    has_memory = real.branch >= 535
    other = _OTHER if has_memory else _OTHER.split("pinned", maxsplit=1)[0]
    answer = node.reload(other)
    assert answer["event"] == "settings_reloaded"
    assert answer["applied"] == [
        "limits.active_thread_percentage",
        *(["limits.pinned_device_mem_limit"] if has_memory else []),
    ]
    assert answer["needs_restart"] == []
    for name in before:
        wait_for_limits(node, name, 12.5, 2 * GIB if has_memory else None)
        assert by_hand(node, name, real) == (["12.5"], ["2G"] if has_memory else [])
        assert (node.daemons()[name]["pid"], node.daemons()[name]["since"]) == (
            before[name]["pid"],
            before[name]["since"],
        )
    # mpsd's own commands are not reported as foreign, and its own changes are no drift.
    assert node.events("foreign_command") == []
    node.reload("")
    for name in before:
        wait_for_limits(node, name, 0.1, MIB if has_memory else None)
    assert node.get("/v1/config").json["config"]["limits"] == {
        "active_thread_percentage": 100.0,
        "pinned_device_mem_limit": None,
    }


@pytest.fixture(scope="module")
def shared(node_for_all: Start) -> Node:
    """Start the node that tests of this module share."""
    return node_for_all(simulate=1, config=LIMITS).start()


@pytest.fixture
def node(shared: Node) -> Node:
    shared.reload(LIMITS)
    wait_for_limits(shared, "gpu0", 50.0, 8 * GIB)
    return shared


@pytest.mark.real_daemon(535)
class TestReload:
    """Effects of a reload other than limits."""

    def test_what_cannot_be_reloaded(self, node: Node) -> None:
        """A setting that needs a restart is named and keeps its value until then; the others are applied."""
        answer = node.reload(f'{_OTHER}[api]\nmode = "0600"\n[daemon]\ndeaths = 2\n')
        assert answer["needs_restart"] == ["api.mode"]
        assert sorted(answer["applied"]) == [
            "daemon.deaths",
            "limits.active_thread_percentage",
            "limits.pinned_device_mem_limit",
        ]
        config = node.get("/v1/config").json["config"]
        assert (config["api"]["mode"], config["daemon"]["deaths"]) == ("0666", 2)
        assert node.socket.stat().st_mode & 0o777 == 0o666
        wait_for_limits(node, "gpu0", 12.5, 2 * GIB)

    @pytest.mark.parametrize("broken", ["[limits", "[limits]\nactive_thread_percentage = 0\n", "[limit]\n", "\x00"])
    def test_broken_file(self, node: Node, broken: str) -> None:
        """An invalid file changes nothing; the report states the error and valid values."""
        before, config = node.unharmed(), node.get("/v1/config").json
        answer = node.reload(broken)
        assert answer["event"] == "settings_refused"
        assert answer["because"]
        assert answer["hint"]
        assert node.get("/v1/config").json == config
        assert node.unharmed() == before
        # The next valid file is applied.
        node.reload(_OTHER)
        wait_for_limits(node, "gpu0", 12.5, 2 * GIB)

    def test_file_that_is_gone(self, node: Node) -> None:
        """A missing file changes nothing either, and is reported."""
        config = node.get("/v1/config").json
        node.configuration.unlink()
        before = len(node.reloads())
        node.hang_up()
        wait_until(lambda: len(node.reloads()) > before, what="SIGHUP to be answered")
        assert str(node.configuration) in node.reloads()[-1]["because"]
        assert node.get("/v1/config").json == config

    def test_same_file(self, node: Node) -> None:
        """A reload without changes does nothing, and does not even query the control daemons."""
        asked = node.control_log("gpu0").stat().st_size
        answer = node.reload(LIMITS)
        assert (answer["applied"], answer["needs_restart"]) == ([], [])
        assert node.control_log("gpu0").stat().st_size == asked

    def test_limits_of_a_daemon_that_does_not_answer(self, make_node: Start) -> None:
        """Limits that changed while a daemon did not answer are set once it does."""
        node = make_node(simulate=1, config=LIMITS + BRISK).start()
        socket = node.pipe_directory("gpu0") / "control"
        away = socket.with_name("away")
        socket.rename(away)
        node.wait_for_state("gpu0", "unresponsive")
        node.reload(_OTHER + BRISK)
        away.rename(socket)
        wait_for_limits(node, "gpu0", 12.5, 2 * GIB)


@pytest.mark.parametrize("real", branches(470))
@pytest.mark.thorough
def test_limit_that_the_driver_does_not_know(make_node: Start, real: RealDaemon) -> None:
    """A driver without memory limits is not healthy while such a limit is configured, and grants nothing."""
    memory = '[limits]\npinned_device_mem_limit = "2GiB"\n'
    node = make_node(simulate=1, control=real.control, config=memory).start(ready=False)
    asked = {"threads": 10, "memory": "1GiB"}

    def refused() -> bool:
        status = node.get("/v1/status").json
        answer = node.request("POST", "/v1/leases", asked)
        return not status["healthy"] and "default_device_pinned_mem_limit" in status["because"] and answer.status == 409

    wait_until(refused, what="the node to say that the limit does not hold")
    node.reload("")
    wait_until(lambda: node.get("/readyz").status == 200, what="the node to be ready without that limit")
    node.reload(memory)
    wait_until(refused, what="the node to say again that the limit does not hold")
    node.reload("")
    wait_until(lambda: node.get("/readyz").status == 200, what="the node to be ready again")
    assert node.request("POST", "/v1/leases", asked).status == 201


# -- before mpsd is ready for it ---------------------------------------------------------------------------------------

SLOW: Final = """
import sys

class Slow:
    def find_spec(name, path=None, target=None):
        if name == "click":
            sys.meta_path.remove(Slow)
            print("begun", flush=True)
            sys.stdin.readline()

sys.meta_path.insert(0, Slow)
"""
"""Makes the first library that mpsd imports wait for a signal to continue; Python imports this module by itself."""

SCRIPT: Final = "from mpsd.__main__ import main\nmain()\n"
"""The script that an installer makes of mpsd's entry point."""


@pytest.mark.real_daemon(535)
@pytest.mark.parametrize("how", ["module", "script"])
def test_while_it_is_imported(make_node: Start, short_tmp: Path, how: str) -> None:
    """A SIGHUP that arrives while mpsd is still importing does not end it: the reload follows when mpsd runs."""
    node = make_node(config="")
    (short_tmp / "lib").mkdir()
    (short_tmp / "lib" / "sitecustomize.py").write_text(SLOW)
    (short_tmp / "mpsd").write_text(SCRIPT)
    begin = ["-m", "mpsd"] if how == "module" else [f"{short_tmp}/mpsd"]
    root = Path(__file__).resolve().parents[2]
    with node.stderr.open("ab") as log:
        node.process = subprocess.Popen(
            [sys.executable, *begin, *node.command[3:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "PYTHONPATH": f"{short_tmp}/lib:{root}"},
            cwd=root,
        )
    assert node.process.stdin is not None
    assert node.process.stdout is not None
    with node.process.stdin as stdin, node.process.stdout as stdout:
        assert stdout.readline() == b"begun\n"
        node.hang_up()
        stdin.write(b"\n")
    wait_until(
        lambda: node.exited() is None and node.reloads(),
        what=f"the reload; the log is {node.stderr}",
        deadline=20,
    )
    assert node.end() == 0


@pytest.mark.real_daemon(535)
def test_by_mpsctl(make_node: Start) -> None:
    """`mpsctl reload` has the same effect as SIGHUP, and prints the result; an invalid file changes nothing."""
    node = make_node(config="").start()
    done = node.mpsctl("reload")
    assert (done.returncode, done.stdout) == (0, "the configuration is read, and nothing changed\n")
    node.configuration.write_text(
        _OTHER + '[admission]\nmemory_reserve = "1GiB"\n[api]\nmode = "0600"\n[roles]\nusers = ["nobody-at-all"]\n'
    )
    done = node.mpsctl("reload")
    applied, waiting, unknown = done.stdout.splitlines()
    assert applied.startswith("applied: limits.active_thread_percentage, limits.pinned_device_mem_limit, ")
    assert waiting == "applied at the next start of mpsd: api.mode"
    assert "the user database has no nobody-at-all" in unknown
    assert node.get("/v1/config").json["config"]["limits"]["active_thread_percentage"] == 12.5
    node.configuration.write_text("[limits]\nactive_thread_percentage = 150\n")
    done = node.mpsctl("reload")
    assert (done.returncode, done.stdout) == (78, "")
    assert "limits.active_thread_percentage = 150" in done.stderr
    assert node.get("/v1/config").json["config"]["limits"]["active_thread_percentage"] == 12.5


def test_an_unknown_group(make_node: Start) -> None:
    """An unknown group in api.group is reported at the start, does not prevent it, and gives no user access."""
    node = make_node(config='[api]\nmode = "0660"\ngroup = "nogroup-by-this-name"\n').start()
    (warning,) = node.events("names_unknown")
    assert "%nogroup-by-this-name" in warning["because"]
    found = node.socket.stat()
    assert (found.st_gid, found.st_mode & 0o777) == (os.getegid(), 0o660)
