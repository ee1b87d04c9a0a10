"""Servers that refuse to end a client's contexts, or do not answer: what is remembered, and what is tried again."""

import json
import signal
from pathlib import Path
from typing import Any, Final

import pytest

from tests.daemon.conftest import Start
from tests.daemon.ends.clients import (
    BUSY,
    asked,
    ends,
    steps,
    take_command,
    target,
    unharmed,
)
from tests.daemon.ends.test_ends import by_release
from tests.daemon.helpers import BRISK, event, is_running, kill
from tests.harness import look_at, wait_until
from tests.node import Node

pytestmark = pytest.mark.thorough

CONFIG: Final = "[enforcement]\ngrace = 0.3\nterminate_deadline = 0.4\n" + BRISK
LONG_GRACE: Final = "[enforcement]\ngrace = 60.0\nterminate_deadline = 0.4\n" + BRISK


def suspicions(node: Node, because: str) -> list[dict[str, Any]]:
    """Return the suspicions against servers that did not end a client's contexts, for this reason."""
    found = node.events("server_suspect", cause="terminate_client")
    return [each for each in found if because in each["because"]]


def test_client_that_exits_without_mpsd(make_node: Start, short_tmp: Path) -> None:
    """A lone client that got a signal leaves a suspect server, also if it exits while there is no mpsd."""
    node = make_node(simulate=1, config=LONG_GRACE)
    take_command(node, short_tmp / "bin")
    node.start()
    with target(node) as client:
        client.do("ignore TERM")
        by_release(node, client)
        event(node, "client_forced", pid=client.pid, step="SIGTERM")
        node.end(signal.SIGKILL)
        client.kill()
        node.start(ready=False)
        event(node, "client_ended", pid=client.pid)
        wait_until(lambda: suspicions(node, "its only client"), what="its server to be suspect")
    assert ends(node) == []


def test_server_that_did_not_return(make_node: Start) -> None:
    """The next mpsd examines a server, too, that did not return from ending contexts."""
    node = make_node(simulate=1, control=None, config=CONFIG).start()
    with target(node) as other, target(node) as client:
        other.loop(BUSY / 10)
        client.launch(100.0)
        by_release(node, client)
        wait_until(lambda: [each for each in ends(node) if each["late"]], what="the answer to be late")
        node.end(signal.SIGKILL)
        node.start(ready=False)
        event(node, "server_suspect", cause="adopted")
        unharmed(other)
        other.end()
        assert client.process.wait(20) == -signal.SIGTERM


def test_mpsd_dies_when_the_answer_is_late(make_node: Start) -> None:
    """A front-end that mpsd killed at its deadline counts as a late answer, also if mpsd died before it stored that."""
    node = make_node(simulate=1, control=None, config="[enforcement]\ngrace = 0.3\nterminate_deadline = 1.0\n").start()
    with target(node) as other, target(node) as client:
        other.loop(BUSY / 10)
        client.launch(100.0)
        by_release(node, client)
        (end,) = wait_until(lambda: [each for each in ends(node) if each["pending"]], what="its server to be asked")
        node.end(signal.SIGKILL)
        kill(end["pending"]["front_end"]["pid"])
        wait_until(lambda: (now := look_at(end["pending"]["front_end"]["pid"])) is None or now.zombie, what="its end")
        file = _file(node, end)
        file.write_text(json.dumps({**end, "pending": {**end["pending"], "until": 0.0}}))
        node.start(ready=False)
        (first, *_) = wait_until(lambda: [each for each in ends(node) if each["late"]], what="the answer to be late")
        assert first["step"] == "terminate_client"
        assert suspicions(node, "did not return")
        other.end()
        assert client.process.wait(20) == -signal.SIGTERM


def _file(node: Node, end: dict[str, Any]) -> Path:
    process = end["process"]
    return node.root / "run" / "ends" / f"{process['pid']}-{process['start_ticks']}.json"


def test_asked_again_later(make_node: Start) -> None:
    """A client that stayed after three attempts is not left for ever: mpsd asks its server again after a rest."""
    node = make_node(simulate=1, control=None, config=CONFIG).start()
    with target(node) as other, target(node) as client:
        other.loop(BUSY / 10)
        client.launch(100.0)
        by_release(node, client)
        event(node, "client_not_ended", pid=client.pid)
        assert asked(node, client.pid) == 3
        node.end(signal.SIGKILL)
        (end,) = ends(node)
        (refusal,) = end["refused"]
        assert refusal["attempts"] == 3
        _file(node, end).write_text(json.dumps({**end, "refused": [{**refusal, "again": 0.0}]}))  # the rest is over
        node.start(ready=False)
        (again,) = wait_until(
            lambda: [each["refused"][0] for each in ends(node) if each["refused"][0]["attempts"] == 4],
            what="its server to be asked again",
        )
        assert again["again"] > refusal["again"]
        unharmed(other)
        other.end()
        assert client.process.wait(20) == -signal.SIGTERM


def test_contexts_that_a_fault_ended(make_node: Start, short_tmp: Path) -> None:
    """A client that stays, and then loses its contexts to a fault, gets its signal for that."""
    config = CONFIG + '[violations]\nlingers = "terminate"\n'
    node = make_node(simulate=1, config=config)
    take_command(node, short_tmp / "bin")
    node.start()
    with target(node) as other, target(node) as client:
        (short_tmp / "bin" / "hidden").write_text(str(other.pid))  # so that it is not ended as well
        by_release(node, client)
        event(node, "client_not_ended", pid=client.pid)
        assert set(steps(node, client.pid)) == {"terminate_client"}
        other.do("fault")
        event(node, "violation", kind="lingers", pid=client.pid)
        assert client.process.wait(20) == -signal.SIGTERM
        assert is_running(other.pid)
