"""Helpers for the tests of ends: clients that compute, and the outcome of an end."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from mpsd.simulator.control import program as simulator
from tests.daemon.helpers import event, program
from tests.driven_program import DrivenProgram
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, leased

SERVER_NOT_READY: Final = 807
"""CUDA's error for a client that comes while the server ends the work of another one (measured on 580)."""

BUSY: Final = 0.05
"""Seconds of the whole GPU's work in a kernel; a tenth of the GPU takes ten times as long."""


def target(node: Node, *options: str, within: Sequence[str] = ()) -> SimulatedClient:
    """Start a client with a lease that is attributed to it; `within` is a command that becomes the client."""

    def start() -> SimulatedClient | None:
        # It waits where mpsd was started just now, and grants nothing yet.
        client = leased(node, "--threads", "10", "--memory", "1GiB", "--wait", "20", *options, within=within)
        if client.hello.get("code") != SERVER_NOT_READY:
            return client
        with client:  # the server still ends another one
            return None

    client = wait_until(start, what="a client to be let in")
    event(node, "client_attributed", client=client.hello["pid"])
    return client


def lease_of(node: Node, client: DrivenProgram) -> str:
    (found,) = (each for each in node.get("/v1/leases").json["leases"] if each["owner"]["pid"] == client.pid)
    return str(found["id"])


_LACKS: Final = """
[ "$1" = -f ] && exec COMMAND "$@"
said=$(sed 's/^terminate_client/no_such_command/' | COMMAND)
status=$?
[ -z "$said" ] || echo "$said" | sed "s/^$(cat HIDDEN)\\$/0/"
exit $status
"""


def take_command(node: Node, directory: Path) -> None:
    """Give a node, before its start, a control daemon without a command to end contexts, like NVIDIA's of driver 470.

    It lists the client whose pid is in the file `hidden` of this directory like one that mpsd cannot see.
    """
    directory.mkdir()
    (directory / "hidden").write_text("none")
    command = " ".join(simulator(555, str(node.root / "run" / "simulated")))
    script = _LACKS.replace("COMMAND", command).replace("HIDDEN", str(directory / "hidden"))
    node.control = program(directory / "nvidia-cuda-mps-control", script)


@contextmanager
def neighbour(node: Node) -> Iterator[SimulatedClient]:
    """Yield a client that computes all the time, and check at the end that it was not harmed."""
    with target(node) as client:
        client.loop(BUSY / 10)
        yield client
        _is_well(client)
        client.end()  # by itself: killed in mid-kernel, it would harm others


def unharmed(client: SimulatedClient) -> None:
    """Check that a computing client has met no error, and let it continue."""
    _is_well(client)
    client.loop(BUSY / 10)


def _is_well(client: SimulatedClient) -> None:
    client.tell("sync")
    assert client.answer()["ok"]
    assert client.answer()["ok"]


def steps(node: Node, pid: int) -> list[str]:
    """Return the steps that were taken to end a client."""
    return [line["step"] for line in node.events("client_forced", pid=pid)]


def in_order(logged: Iterable[str]) -> list[str]:
    """Return the steps that were taken, by those that were logged.

    The next mpsd logs an answer again that it reads again, and sends SIGKILL again, but no other signal.
    """
    grouped = ((step, [*times]) for step, times in groupby(logged))
    return [step for step, times in grouped for step in (times if step == "SIGTERM" else times[:1])]


def await_steps(node: Node, pid: int, *expected: str) -> None:
    """Wait until these steps, and no others, were taken to end a client: it may be gone before the log has the last."""
    wait_until(lambda: steps(node, pid) == [*expected], what=f"the steps {', '.join(expected)}")


def asked(node: Node, pid: int) -> int:
    """Return how often the control daemon was commanded to end the contexts of a client."""
    lines = node.control_log("gpu0").read_text().splitlines()
    return sum("Cmd:terminate_client" in line and line.endswith(f" {pid}") for line in lines)


def ends(node: Node) -> list[dict[str, Any]]:
    """Return the ends that are stored on disk."""
    files = (node.root / "run" / "ends").glob("*.json")
    return [json.loads(text) for file in files if (text := _read(file))]


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError:
        return ""
