"""A store that cannot be used or written: mpsd reports that, starts, and keeps running."""

import itertools
import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.core.units import MIB
from mpsd.system.files.database import checksum
from tests.disks import as_root, fill, mounted
from tests.durability.conftest import Start
from tests.durability.streams import connection, events, following, gapless, in_line, submit, wait_for_line
from tests.harness import wait_until
from tests.node import Answer, Node
from tests.simulated_clients import SimulatedClient, leased

pytestmark = pytest.mark.thorough


def admit(node: Node, **asked: object) -> Answer:
    """Request a lease as the process of the tests."""
    return node.request("POST", "/v1/leases", {"threads": 1, "memory": "1MiB", **asked})


def noise(path: Path) -> None:
    """Overwrite a store with noise."""
    path.write_bytes(b"\xa5" * 10_000)


def newer(path: Path) -> None:
    """Turn a store into one of a later mpsd."""
    with closing(sqlite3.connect(path)) as store:
        store.execute("PRAGMA user_version = 99")


def unreadable(path: Path) -> None:
    """Damage every stored lease in a way that only a defect, or damage with a correct checksum, could."""
    with closing(sqlite3.connect(path)) as store:
        store.create_function("checksum", -1, checksum)
        store.execute(
            "UPDATE leases SET news = '[]', data = json_set(data, '$.granted', 'never'), sum = checksum("
            "number, boot, told, json_set(data, '$.granted', 'never'), '[]') WHERE data != ''"
        )
        store.commit()


def limits(node: Node, name: str) -> tuple[float, int]:
    """Return the limits of a control daemon, as they were read back last."""
    found = node.daemons()[name]["limits"]
    return (found["active_thread_percentage"], found["pinned_device_mem_limit"]) if found else (0.0, 0)


def foreign(path: Path) -> None:
    """Replace a store by another program's database."""
    path.unlink()
    with closing(sqlite3.connect(path)) as store:
        store.executescript("CREATE TABLE theirs (x); INSERT INTO theirs VALUES (1)")


def truncated(path: Path) -> None:
    """Cut a store in half."""
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [noise, newer, foreign, truncated])
@pytest.mark.parametrize("store", ["run/leases.db", "state/history.db"])
def test_set_aside(make_node: Start, store: str, damage: Callable[[Path], None]) -> None:
    """An unusable store is set aside whole, with its path and the reason in the log; and mpsd works."""
    node = make_node().start()
    assert admit(node).status == 201
    node.end(signal.SIGTERM)
    path = node.root / store
    damage(path)
    before = path.read_bytes()
    node.start()
    (said,) = node.events("store_set_aside")
    assert Path(said["file"]).read_bytes() == before
    assert Path(said["file"]).parent == path.parent
    assert said["because"]
    assert admit(node).status == 201
    assert len(node.leases()) == (1 if "leases" in store else 2)


def test_row_that_makes_no_sense(make_node: Start) -> None:
    """A well-formed but invalid lease, which only a defect could write, has the store set aside as well."""
    node = make_node().start()
    assert admit(node).status == 201
    node.end(signal.SIGKILL)
    with closing(sqlite3.connect(node.root / "run" / "leases.db")) as store:
        store.create_function("checksum", -1, lambda *_: 0)
        store.execute("PRAGMA ignore_check_constraints = ON")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        store.execute("INSERT INTO leases VALUES (1000, ?, 0, '{}', '[]', 0)", (boot,))
        store.commit()
    node.start()
    assert node.events("store_set_aside")
    assert admit(node).status == 201


# -- full disks --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(make_node: Start) -> Iterator[Callable[..., Node]]:
    """Return a maker of nodes with one directory on its own file system of 2 MiB."""
    with ExitStack() as mounts:

        def make(directory: str, **options: Any) -> Node:
            node = make_node(**options)
            path = node.root / directory
            path.mkdir(mode=0o755)
            mounts.enter_context(mounted(path, "2m", "755"))
            return node

        yield make


@as_root
def test_full_runtime_directory(small: Callable[..., Node]) -> None:
    """Requests are refused with `storage`, releases work and last, waiting ones keep waiting, and all recovers."""
    node = small("run", simulate=2).start()
    held = [admit(node, threads=9, name="n" * 100, gpu="0").json["id"] for _ in range(10)]
    assert admit(node, threads=90, gpu="1").status == 201
    with connection(node) as line:
        submit(line, threads=30, memory="1GiB", gpu="1", wait=None, name="waiter", request_id="waiter")
        wait_for_line(node, "waiter")
        full = fill(node.root / "run")
        refused: list[Any] = []
        while not refused:
            # There may be space left within the file itself; the loop uses it up.
            answer = admit(node, threads=0.1, name="n" * 128, labels={f"l{n}": "x" * 128 for n in range(30)}, gpu="0")
            assert answer.status in {201, 409, 507}, answer.json
            if answer.status == 507:
                refused.append(answer.json)
            elif answer.status == 409:
                pytest.fail(f"the GPU was full before the disk: {answer.json}")
        assert refused[0]["code"] == "storage"
        assert "free space" in refused[0]["hint"]
        assert node.get("/v1/status").json["healthy"] is False
        for lease in held[:8]:
            assert node.request("DELETE", f"/v1/leases/{lease}").status == 204
        node.end(signal.SIGKILL)
        node.start(ready=False)
        wait_until(lambda: node.daemons()["gpu0"]["state"] == "ready", what="the control daemon to be adopted")
        here = {lease["id"] for lease in node.leases() if lease["state"] == "granted"}
        assert here.isdisjoint(held[:8]), "it was released, and came back"
        assert here >= set(held[8:])
        assert in_line(node) == ["waiter"]
        full.unlink()
        wait_until(lambda: admit(node).status == 201, what="mpsd to admit again")
        wait_until(lambda: node.get("/v1/status").json["healthy"], what="the node to be healthy again")


@as_root
def test_full_state_directory(small: Callable[..., Node]) -> None:
    """No request is refused, and events are published when they are stored: late, in order, and without a gap."""
    node = small("state").start()
    with following(node) as follower:
        before = follower.until(event="daemon_state", state="ready")
        full = fill(node.root / "state")
        wait_until(lambda: admit(node, threads=0.1).status == 201 and node.events("store_full"), what="it to be full")
        granted = admit(node, threads=10)
        assert granted.status == 201
        assert node.request("DELETE", f"/v1/leases/{granted.json['id']}").status == 204
        assert not any(event.get("lease") == granted.json["id"] for event in events(node))
        full.unlink()
        late = follower.until(event="lease_ended", lease=granted.json["id"])
        assert gapless(before + late, 0)
        assert ("lease_granted", granted.json["id"]) in {(event["event"], event.get("lease")) for event in late}


@as_root
def test_full_state_directory_and_death(small: Callable[..., Node]) -> None:
    """Events that could not be published are published by the next mpsd, if they could be stored with their leases."""
    node = small("state").start()
    full = fill(node.root / "state")
    wait_until(lambda: admit(node, threads=0.1).status == 201 and node.events("store_full"), what="it to be full")
    lease = admit(node, threads=10).json["id"]
    assert node.request("DELETE", f"/v1/leases/{lease}").status == 204
    node.end(signal.SIGKILL)
    full.unlink()
    node.start()
    said = [event["event"] for event in events(node) if event.get("lease") == lease]
    assert said == ["lease_granted", "lease_ended"]
    assert gapless(events(node), 0)


# -- what was lost with a store ----------------------------------------------------------------------------------------


class TestLostLeases:
    """A store that was lost while a control daemon kept running: its clients hold memory that no lease has."""

    @pytest.fixture
    def node(self, make_node: Start) -> Node:
        """Start a node with two simulated GPUs, on which clients can hold memory."""
        return make_node(simulate=2, control=None).start()

    @pytest.fixture
    def client(self, node: Node) -> Iterator[SimulatedClient]:
        """Yield a client on the first GPU, whose lease is lost with the store while mpsd is down."""
        with leased(node, "--threads", "60", "--memory", "4GiB", "--gpu", "0") as started:
            assert started.hello["ok"], started.hello
            wait_until(lambda: node.get("/v1/clients").json["clients"], what="the client to be seen")
            yield started

    def lose(self, node: Node, damage: Callable[[Path], None]) -> None:
        """Have mpsd find at its start that its leases are lost."""
        node.end(signal.SIGKILL)
        damage(node.root / "run" / "leases.db")
        self.begin(node)

    def begin(self, node: Node) -> None:
        """Start mpsd, and wait until it has adopted its control daemons."""
        node.start(ready=False)
        for name in ("gpu0", "gpu1"):
            node.wait_for_state(name, "ready")

    def held(self, node: Node, client: SimulatedClient) -> None:
        """Check that nothing is granted on the first GPU, with reason and remedy; the other GPU is unaffected."""
        answer = admit(node, gpu="0")
        assert (answer.status, answer.json["code"], answer.json["limit"]) == (409, "daemon_not_ready", "hold")
        assert f"it waits for the end of pid {client.pid}" in answer.json["detail"]
        assert "mpsctl resume gpu0" in answer.json["hint"]
        status = node.get("/v1/status").json
        (reason,) = [each for each in status["reasons"] if each["kind"] == "leases_incomplete"]
        assert (reason["subject"], status["healthy"]) == ("gpu0", False)
        assert node.get("/readyz").status == 503
        assert admit(node, gpu="1").status == 201

    @pytest.mark.parametrize("damage", [noise, Path.unlink])
    def test_held_until_its_clients_are_gone(
        self, node: Node, client: SimulatedClient, damage: Callable[[Path], None]
    ) -> None:
        """Nothing is granted there, even after further restarts, until the client whose lease was lost has ended."""
        self.lose(node, damage)
        self.held(node, client)
        node.end(signal.SIGKILL)
        self.begin(node)
        self.held(node, client)
        assert {tuple(each["pids"]) for each in node.events("leases_incomplete", daemon="gpu0")} == {(client.pid,)}
        assert node.events("leases_incomplete", daemon="gpu1") == []
        client.kill()
        wait_until(lambda: admit(node, gpu="0").status == 201, what="the GPU to be granted again")
        assert node.events("leases_complete")
        assert node.get("/v1/status").json["healthy"]

    def test_resumed(self, node: Node, client: SimulatedClient) -> None:
        """After one operator's command, leases are granted at once, and also after a restart."""
        self.lose(node, Path.unlink)
        self.held(node, client)
        assert node.mpsctl("resume", "gpu0").returncode == 0
        assert admit(node, gpu="0").status == 201
        node.end(signal.SIGKILL)
        node.start()
        assert admit(node, gpu="0").status == 201

    @pytest.mark.parametrize("lost", ["store", "lease"])
    def test_ceiling_stays(self, make_node: Start, lost: str) -> None:
        """A client whose lease was lost gets its share with its next context; the ceiling closes once it is gone."""
        node = make_node(simulate=2, control=None).start()
        with leased(node, "--threads", "60", "--memory", "1536MiB", "--gpu", "0") as client:
            assert client.hello["ok"], client.hello
            wait_until(lambda: node.get("/v1/clients").json["clients"], what="the client to be seen")
            self.lose(node, Path.unlink if lost == "store" else unreadable)
            wait_until(lambda: limits(node, "gpu1") == (0.1, MIB), what="the ceiling of the other GPU to close")
            if lost == "store":
                self.held(node, client)
            context = client.context()
            found = (context["active_thread_percentage"], context["pinned_device_mem_limit"])
            assert found == (60.0, 1536 * MIB)
            assert limits(node, "gpu0") == (60.0, 1024 * MIB)  # MPS reports whole GiB
            assert admit(node, gpu="0").status == 409
        wait_until(lambda: limits(node, "gpu0") == (0.1, MIB), what="the ceiling to close")
        assert node.events("limit_drift") == []
        assert admit(node, gpu="0").status == 201


# -- a store that others change while mpsd runs ------------------------------------------------------------------------


def put_back(path: Path, old: bytes) -> None:
    """Write the former content of a file into it again."""
    path.write_bytes(old)


def replace(path: Path, old: bytes) -> None:
    """Replace a file by another with its former content."""
    path.with_suffix(".new").write_bytes(old)
    path.with_suffix(".new").rename(path)


def into_directory(path: Path, _: bytes) -> None:
    """Replace a file by a directory."""
    path.unlink()
    path.mkdir()


DAMAGES: Final[dict[str, Callable[[Path, bytes], object]]] = {
    "removed": lambda path, _: path.unlink(),
    "replaced": replace,
    "put back": put_back,
    "noise": lambda path, _: noise(path),
    "one byte": lambda path, _: path.write_bytes(path.read_bytes()[:-1] + b"!"),
    "emptied": lambda path, _: path.write_bytes(b""),
    "a directory": into_directory,
    "journal removed": lambda path, _: next(path.parent.glob(f"{path.name}-*")).unlink(),
}


class TestWhileItRuns:
    """mpsd notices the damage and writes its state again: the next mpsd finds all of it, and grants nothing twice."""

    def rewritten(self, node: Node, path: Path, number: int = 1) -> None:
        """Wait until mpsd reports that it has written this store again."""

        def look() -> bool:
            told = [each for each in node.events("store_rewritten") if f"{path}" in each["because"]]
            return len(told) >= number

        wait_until(look, what=f"{path} to be written anew; the log is {node.stderr}")

    @pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
    @pytest.mark.parametrize("damage", DAMAGES)
    def test_leases(self, make_node: Start, damage: str, *, busy: bool) -> None:
        """No lease is lost, whatever is done to the file.

        A busy mpsd may overwrite the damage before it notices, which is as good.
        """
        node = make_node(simulate=1).start()
        path = node.root / "run" / "leases.db"
        first = admit(node, threads=40).json["id"]
        old = path.read_bytes()
        second = admit(node, threads=40).json["id"]
        DAMAGES[damage](path, old)

        turns = itertools.count()

        def noticed() -> bool:
            if busy:
                lease = admit(node, threads=1)
                assert lease.status in {201, 507}, lease.json
                if lease.status == 201:
                    assert node.request("DELETE", f"/v1/leases/{lease.json['id']}").status == 204
            return bool(node.events("store_rewritten")) or (busy and next(turns) > 30)

        wait_until(noticed, what=f"it to be noticed; the log is {node.stderr}")
        third = admit(node, threads=10).json["id"]
        assert node.get("/v1/status").json["healthy"]
        node.end(signal.SIGKILL)
        node.start()
        assert {each["id"] for each in node.leases()} == {first, second, third}
        assert admit(node, threads=20).status == 409
        assert node.events("leases_incomplete") == []
        assert len(node.events("store_rewritten")) == 1 or busy

    def test_older_one_while_away(self, make_node: Start) -> None:
        """An older store that replaced the real one while mpsd was down is rejected: leases are missing in it."""
        node = make_node(simulate=1).start()
        path = node.root / "run" / "leases.db"
        assert admit(node, threads=40).status == 201
        old = path.read_bytes()
        second = admit(node, threads=40).json["id"]
        wait_until(lambda: any(each.get("lease") == second for each in events(node)), what="the grant to be told")
        node.end(signal.SIGKILL)
        path.write_bytes(old)
        node.start()
        assert "the history knows of turn" in node.events("store_set_aside")[0]["because"]
        assert node.leases() == []

    @pytest.mark.parametrize("damage", ["removed", "replaced", "emptied", "journal removed"])
    def test_events(self, make_node: Start, damage: str) -> None:
        """No published event is lost, and the numbers continue without a gap."""
        node = make_node(simulate=1).start()
        lease = admit(node, threads=40).json["id"]
        before = events(node)
        path = node.root / "state" / "history.db"
        DAMAGES[damage](path, path.read_bytes())
        self.rewritten(node, path)
        assert node.request("DELETE", f"/v1/leases/{lease}").status == 204
        wait_until(lambda: node.events("lease_ended", lease=lease), what="the end to be told")
        wait_until(lambda: any(each["event"] == "lease_ended" for each in events(node)), what="the event")
        node.end(signal.SIGKILL)
        node.start()
        after = events(node)
        assert after[: len(before)] == before
        assert {"store_rewritten", "lease_ended"} <= {each["event"] for each in after}
        assert gapless(after, 0)
