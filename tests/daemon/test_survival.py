"""No client is harmed, and nothing is lost or doubled, whatever is killed, stopped or cut off; everything recovers.

The file tests the promises of docs/internals/reliability.md that no other file tests.
"""

import resource
import signal
import socket
from pathlib import Path
from typing import Any, Final

import pytest

from tests.daemon.caller import calling
from tests.daemon.conftest import Start
from tests.daemon.helpers import (
    BRISK,
    LIMITS,
    branches,
    by_hand,
    event,
    is_running,
    kill,
    next_ready,
    program,
    stopped,
)
from tests.harness import look_at, pids, wait_until
from tests.node import Node
from tests.real import RealDaemon
from tests.simulated_clients import leased

pytestmark = pytest.mark.thorough

SMALL: Final = {"threads": 10, "memory": "1GiB"}
SETS: Final = "set_default_active_thread_percentage 33"


def leases(node: Node) -> dict[str, Any]:
    return {each["id"]: each for each in node.get("/v1/leases").json["leases"]}


def descriptors(node: Node) -> int:
    """Count mpsd's open descriptors, without the one of the request."""
    return len([*Path(f"/proc/{node.pid}/fd").iterdir()])


@pytest.mark.parametrize("real", branches(470, 555))
def test_mpsd_is_stopped(make_node: Start, real: RealDaemon) -> None:
    """A stopped mpsd notices when it continues what happened meanwhile: a death, a holder's end, a foreign command."""
    config = "[limits]\nactive_thread_percentage = 50.0\n"
    node = make_node(simulate=2, control=real.control, config=config).start()
    before = node.daemons()
    with calling(node.socket) as stays, calling(node.socket) as goes:
        kept, lost = stays.admit(threads=10, memory="1GiB", gpu="1").json, goes.admit(threads=10, memory="1GiB").json
        with stopped(node.pid):
            goes.kill()
            kill(before["gpu0"]["pid"])
            assert node.ask("gpu1", f"{SETS}\nget_default_active_thread_percentage")[-1] == "33.0"
            assert is_running(before["gpu1"]["pid"])
        next_ready(node, "gpu0", before["gpu0"]["pid"])
        wait_until(lambda: leases(node).keys() == {kept["id"]}, what=f"{lost['id']} to end, and no other")
        wait_until(lambda: by_hand(node, "gpu1")[0] == ["50.0"], what="the stranger's limit to be put back")
        assert node.daemons()["gpu1"]["pid"] == before["gpu1"]["pid"]


_FRONT_END: Final = """
if [ "$1" != -f ] && [ -e {flag} ]; then
    {then}
fi
exec {control} "$@"
"""


@pytest.mark.real_daemon(535)
@pytest.mark.parametrize("then", ["kill -KILL $$", "kill -STOP $$", "head -c 100000 /dev/urandom; exit 0"])
def test_front_end(make_node: Start, short_tmp: Path, control: Path, then: str) -> None:
    """A front-end of mpsd's own that is killed, stopped, or answers nonsense proves nothing, and harms no client."""
    flag = short_tmp / "flag"
    broken = program(short_tmp / "nvidia-cuda-mps-control", _FRONT_END.format(flag=flag, then=then, control=control))
    node = make_node(simulate=1, control=broken, config=BRISK).start()
    pid = node.daemons()["gpu0"]["pid"]
    flag.touch()
    assert node.wait_for_state("gpu0", "unresponsive")["pid"] == pid
    assert node.request("POST", "/v1/leases", SMALL).json["code"] == "daemon_not_ready"
    flag.unlink()
    assert node.wait_for_state("gpu0", "ready")["pid"] == pid
    assert node.request("POST", "/v1/leases", SMALL).status == 201
    # The stopped front-end has been ended.
    wait_until(
        lambda: (
            [each for each in map(look_at, pids()) if each is not None and each.parent == node.pid and each.zombie]
            == []
        ),
        what="every front-end to be reaped",
    )


@pytest.mark.real_daemon(535)
@pytest.mark.parametrize("which", [("mpsd", "gpu0"), ("gpu0", "gpu1"), ("mpsd", "gpu0", "gpu1")], ids="+".join)
def test_several_at_once(make_node: Start, which: tuple[str, ...]) -> None:
    """After mpsd and control daemons are killed together, all run again, with each lease and each limit once."""
    node = make_node(simulate=2, config=LIMITS).start()
    before, limits = node.daemons(), by_hand(node, "gpu0")
    granted = {node.request("POST", "/v1/leases", {**SMALL, "gpu": gpu}).json["id"] for gpu in "01"}
    killed = {name: node.pid if name == "mpsd" else before[name]["pid"] for name in which}
    for pid in killed.values():
        kill(pid)
    if "mpsd" in which:
        assert node.ended() == -signal.SIGKILL
        node.start(ready=False)
    for name in before:
        after = node.wait_for_state(name, "ready")["pid"] if name not in which else None
        after = after or next_ready(node, name, before[name]["pid"])["pid"]
        assert (after == before[name]["pid"]) is (name not in which)
        assert by_hand(node, name) == limits
    assert leases(node).keys() == granted
    assert node.get("/v1/status").json["healthy"] is True


@pytest.mark.parametrize(
    ("number", "which"),
    [
        (signal.SIGKILL, ("server", "gpu0")),
        (signal.SIGKILL, ("server", "mpsd")),
        (signal.SIGKILL, ("gpu0", "mpsd")),
        (signal.SIGKILL, ("mpsd",)),
        (signal.SIGSTOP, ("server", "gpu0", "mpsd")),
    ],
)
def test_clients(make_node: Start, which: tuple[str, ...], number: signal.Signals) -> None:
    """A client keeps computing when mpsd is killed, or anything of another GPU, and when any is stopped and continued.

    Its server ends with its control daemon (measured on 580).
    """
    node = make_node(simulate=2, control=None, config=BRISK).start()
    arguments = ("--threads", "10", "--memory", "1GiB", "--gpu")
    with leased(node, *arguments, "0") as near, leased(node, *arguments, "1") as far:
        for client in (near, far):
            event(node, "client_attributed", client=client.hello["pid"])
        (kept,) = [key for key, each in leases(node).items() if each["owner"]["pid"] == far.pid]
        before = node.daemons()
        known = {"mpsd": node.pid, "gpu0": before["gpu0"]["pid"], "server": near.hello["server"]}
        for name in which:
            kill(known[name], number)
        assert far.compute(0.01)["ok"]
        lives = not {"server", "gpu0"} & {*which}
        if lives:
            assert near.compute(0.01)["ok"]
        if number is signal.SIGSTOP:
            for name in which:
                kill(known[name], signal.SIGCONT)
        elif "mpsd" in which:
            assert node.ended() == -signal.SIGKILL
            node.start(ready=False)
        wait_until(lambda: kept in leases(node), what="the other lease to be there")
        if number is signal.SIGSTOP or lives:
            assert near.compute(0.01)["ok"]
        assert far.compute(0.01)["ok"]
        node.wait_for_state("gpu1", "ready")
    wait_until(lambda: leases(node) == {}, what="all leases to be over with their holders")
    wait_until(lambda: node.daemons()["gpu0"]["state"] == "ready", what="gpu0 to be ready")


@pytest.mark.parametrize("real", branches(535, 555))
def test_impostor(make_node: Start, real: RealDaemon) -> None:
    """While another process listens in a control daemon's place, no lease is granted; the daemon is left alone."""
    node = make_node(simulate=1, control=real.control, config=BRISK).start()
    pid = node.daemons()["gpu0"]["pid"]
    its = node.pipe_directory("gpu0") / "control"
    away = its.with_name("away")
    its.rename(away)
    with socket.socket(socket.AF_UNIX) as impostor:
        impostor.bind(str(its))
        impostor.listen()
        daemon = node.wait_for_state("gpu0", "unresponsive")
        wait_until(
            lambda: "belongs to another process" in node.daemons()["gpu0"]["because"], what="the impostor to be named"
        )
        assert (daemon["pid"], is_running(pid)) == (pid, True)
        assert node.request("POST", "/v1/leases", SMALL).json["code"] == "daemon_not_ready"
    away.rename(its)
    assert node.wait_for_state("gpu0", "ready")["pid"] == pid
    # A new one makes its own socket.
    with socket.socket(socket.AF_UNIX) as impostor:
        its.unlink()
        impostor.bind(str(its))
        node.wait_for_state("gpu0", "unresponsive")
        kill(pid)
        next_ready(node, "gpu0", pid)


@pytest.mark.real_daemon(535)
def test_it_all_comes_back(make_node: Start) -> None:
    """After many deaths, disconnects and stops mpsd has as many descriptors and children as before."""
    node = make_node(simulate=2, config="[daemon]\ndeath_window = 0.001\n").start()

    def children() -> int:
        return sum(each.parent == node.pid for each in map(look_at, pids()) if each is not None)

    def size() -> int:
        return int(Path(f"/proc/{node.pid}/statm").read_text().split()[1]) * resource.getpagesize()

    def trouble(times: int) -> None:
        for _ in range(times):
            pid = node.daemons()["gpu0"]["pid"]
            with calling(node.socket) as holder:
                assert holder.admit(threads=10, memory="1GiB", gpu="1").status == 201
                kill(pid)
            next_ready(node, "gpu0", pid)
        wait_until(lambda: leases(node) == {}, what="the leases to be over")

    trouble(5)
    before, memory = (descriptors(node), children()), size()
    trouble(20)
    wait_until(lambda: descriptors(node) <= before[0] and children() == before[1], what=f"mpsd to have {before} again")
    assert size() - memory < 4 * 1024**2
