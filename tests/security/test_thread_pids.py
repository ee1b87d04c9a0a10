"""The number of a thread in place of a pid, in a request and in the store.

The process counts as gone, and mpsd starts.
"""

import concurrent.futures
import contextlib
import json
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Final

import pytest

from mpsd.core.model import ProcessIdentity
from mpsd.system.files.database import checksum
from mpsd.system.processes import proc, process
from tests.daemon.conftest import Start
from tests.daemon.helpers import BRISK, event, is_running
from tests.harness import wait_until
from tests.node import Node

pytestmark = pytest.mark.thorough

SMALL: Final[dict[str, Any]] = {"threads": 1, "memory": "1GiB"}

_THREADED: Final = """
import sys, threading
release = threading.Event()
thread = threading.Thread(target=release.wait)
thread.start()
print(thread.native_id, flush=True)
sys.stdin.read()
release.set()
"""


@contextlib.contextmanager
def thread_of_another() -> Iterator[tuple[int, int]]:
    """Run a process with a second thread; yield the thread's number, and the process's pid."""
    with subprocess.Popen(
        [sys.executable, "-I", "-c", _THREADED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as threaded:
        assert threaded.stdout is not None
        yield int(threaded.stdout.readline()), threaded.pid
        threaded.communicate()


def change(node: Node, how: Callable[[str], str]) -> None:
    """Change the stored leases in a way that only a defect, or damage with a correct checksum, could."""
    with closing(sqlite3.connect(node.root / "run" / "leases.db")) as store:
        store.create_function("checksum", -1, checksum)
        rows = store.execute("SELECT number, boot, told, data, news FROM leases WHERE data != ''").fetchall()
        for number, boot, told, data, news in rows:
            changed = (number, boot, told, how(data), news)
            store.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?, ?)", (*changed, checksum(*changed)))
        store.commit()


def fields(text: str, **otherwise: object) -> str:
    return json.dumps({**json.loads(text), **otherwise})


@contextlib.contextmanager
def holder() -> Iterator["subprocess.Popen[bytes]"]:
    held = subprocess.Popen(["sleep", "600"])
    try:
        yield held
    finally:
        held.kill()
        held.wait()


def test_is_no_process() -> None:
    """No process is found by it, whatever the kernel reports, nor by a number that no process can have."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        thread = pool.submit(threading.get_native_id).result()
        ticks = proc.start_ticks(thread)
        assert ticks is not None
        for pid in (thread, 0, -1, 2**22 + 1, 2**31 - 1, 2**31, 2**70):
            assert process.adopt(ProcessIdentity(pid, ticks)) is None
            assert process.find(pid) is None


@pytest.mark.real_daemon(535)
def test_is_refused(make_node: Start) -> None:
    """The refusal says that there is no such process, and the log has no defect."""
    node = make_node(simulate=1).start()
    with thread_of_another() as (thread, pid):
        answer = node.request("POST", "/v1/leases", {**SMALL, "pid": thread})
        assert (answer.status, answer.json["limit"]) == (422, "pid")
        assert answer.json["detail"] == f"{thread} is the number of a thread of process {pid}"
        assert f"{pid}" in answer.json["hint"]
        assert node.request("POST", "/v1/leases", {**SMALL, "pid": pid}).status == 201
    assert node.events("api_defect") == []


@pytest.mark.real_daemon(535)
class TestStored:
    """The contents of the store when mpsd starts."""

    def test_holder_s_number_is_a_thread_s(self, make_node: Start) -> None:
        """A lease whose holder died while mpsd was down has ended, even if a thread has the holder's number by now."""
        node = make_node(simulate=1).start()
        with holder() as held:
            lease = node.request("POST", "/v1/leases", {**SMALL, "pid": held.pid}).json
            node.end(signal.SIGKILL)
        with thread_of_another() as (thread, _):
            identity = {"pid": thread, "start_ticks": proc.start_ticks(thread)}
            change(node, lambda text: fields(text, holders=[{"kind": "process", "identity": identity}]))
            node.start()
            assert "died while mpsd was not running" in event(node, "lease_ended", lease=lease["id"])["because"]
            assert node.get("/v1/leases").json["leases"] == []
            assert node.get("/v1/status").json["healthy"] is True

    @pytest.mark.parametrize(
        "how",
        [
            lambda text: fields(text, granted="never"),
            lambda text: fields(text, request=None),
            lambda text: fields(text, owner={"uid": "\udcff"}),
        ],
        ids=["time", "request", "surrogate"],
    )
    def test_one_that_makes_no_sense(self, make_node: Start, how: Callable[[str], str]) -> None:
        """An invalid lease is set aside and reported, and its GPU is held while its processes live."""
        node = make_node(simulate=2, config=BRISK).start()
        kept = node.request("POST", "/v1/leases", {**SMALL, "gpu": "1"}).json
        with holder() as held:
            lease = node.request("POST", "/v1/leases", {**SMALL, "gpu": "0", "pid": held.pid}).json
            for _ in range(2):  # the mpsd after the next one knows it as well
                node.end(signal.SIGKILL)
                change(node, lambda text: how(text) if lease["id"] in text else text)
                node.start(ready=False)
                node.wait_for_state("gpu0", "ready")
                node.wait_for_state("gpu1", "ready")
                assert event(node, "lease_not_restored", lease=lease["id"])["gpus"] == [lease["shares"][0]["gpu"]]
                here = {each["id"] for each in node.get("/v1/leases").json["leases"]}
                assert kept["id"] in here
                assert lease["id"] not in here
                refused = node.request("POST", "/v1/leases", {**SMALL, "gpu": "0"})
                assert refused.status == 409, refused.json
                assert f"lease {lease['id']} of an earlier mpsd could not be restored" in refused.json["detail"]
                assert f"until pid {held.pid}" in refused.json["detail"]
                assert "mpsctl resume gpu0" in refused.json["hint"]
                assert node.request("POST", "/v1/leases", {**SMALL, "gpu": "1"}).status == 201
                assert node.get("/v1/status").json["healthy"] is False
        event(node, "lease_not_restored_ended", lease=lease["id"])
        assert node.request("POST", "/v1/leases", {**SMALL, "gpu": "0"}).status == 201
        node.end()
        seen = len(node.log())
        node.start()
        assert not [each for each in node.log()[seen:] if each["event"].startswith("lease_not_restored")]

    def test_operator_s_word(self, make_node: Start) -> None:
        """An operator can end the hold; the lease's process is not touched."""
        node = make_node(simulate=1).start()
        with holder() as held:
            lease = node.request("POST", "/v1/leases", {**SMALL, "pid": held.pid}).json
            node.end(signal.SIGKILL)
            change(node, lambda text: fields(text, granted="never"))
            node.start(ready=False)
            node.wait_for_state("gpu0", "ready")
            assert node.request("POST", "/v1/leases", SMALL).status == 409
            assert node.mpsctl("resume", "gpu0").returncode == 0
            assert "operator" in event(node, "lease_not_restored_ended", lease=lease["id"])["because"]
            assert node.request("POST", "/v1/leases", SMALL).status == 201
            assert is_running(held.pid)

    @pytest.mark.parametrize("text", ["{", "[]", "\x00", '{"id":1}'])
    def test_one_of_which_nothing_is_known(self, make_node: Start, text: str) -> None:
        """For a lease without readable facts all GPUs are held, until they are seen to have no unleased processes."""
        node = make_node(simulate=2).start()
        assert node.request("POST", "/v1/leases", SMALL).status == 201
        node.end(signal.SIGKILL)
        change(node, lambda _: text)
        node.start(ready=False)
        assert event(node, "lease_not_restored")["gpus"] == "all"
        event(node, "lease_not_restored_ended")
        wait_until(lambda: node.request("POST", "/v1/leases", SMALL).status == 201, what="somebody to be admitted")


class TestFiles:
    """The files of one control daemon."""

    DAMAGE: Final = [b"", b"\xff\xfe\x00", b"{", b"[" * 200_000, b"null", b'{"boot_id": "\\ud800"}', b"1" * 5000]

    @pytest.mark.real_daemon(535)
    @pytest.mark.parametrize("damage", DAMAGE, ids=range(len(DAMAGE)))
    def test_damaged(self, make_node: Start, damage: bytes) -> None:
        """A damaged file never prevents mpsd's start; a desired state that is lost counts as a hold."""
        node = make_node(simulate=1).start()
        pid = node.daemons()["gpu0"]["pid"]
        node.end()
        for name in ("process", "reading", "tally"):
            (node.root / "run" / f"gpu0.{name}.json").write_bytes(damage)
        (node.root / "state" / "gpu0.intention.json").write_bytes(damage)
        node.start(ready=False)
        assert node.wait_for_state("gpu0", "held")["pid"] == pid
        assert node.mpsctl("resume", "gpu0").returncode == 0
        node.wait_for_state("gpu0", "ready")
