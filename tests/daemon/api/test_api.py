"""The API as its callers see it: its answers and their form, and its socket."""

import grp
import os
import re
import socket
import stat
import threading
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from mpsd.core.health import WELL
from mpsd.daemon.api.routes import ROUTES
from tests.daemon.caller import NOBODY, calling, needs_root
from tests.daemon.conftest import Start
from tests.harness import wait_until
from tests.node import Node

pytestmark = pytest.mark.real_daemon(535)

GROUP: Final = next(group for group in grp.getgrall() if group.gr_gid not in {0, os.getegid(), NOBODY})
"""A group of this machine without members in these tests, except for those that join it on purpose."""


@pytest.fixture(scope="module")
def node(node_for_all: Start) -> Node:
    """Start the node that the tests share."""
    return node_for_all(config=f'[roles]\nusers = ["%{GROUP.gr_name}"]\n').start()


class TestAnswers:
    """The contents and the form of answers."""

    @pytest.mark.parametrize(
        ("asked", "status", "code"),
        [
            (("GET", "/nowhere", None), 404, "not_found"),
            (("GET", "/v1/leases/", None), 404, "not_found"),
            (("GET", "/v1/leases/%2e%2e", None), 404, "not_found"),
            (("GET", "/v1/leases/lease-nope", None), 404, "not_found"),
            (("DELETE", "/v1/leases/lease-nope", None), 404, "not_found"),
            (("GET", "/v1/operations/op-nope", None), 404, "not_found"),
            (("POST", "/v1/daemons/gpu9/reset", None), 404, "not_found"),
            (("PUT", "/v1/leases", None), 405, "method_not_allowed"),
            (("POST", "/v1/status", None), 405, "method_not_allowed"),
            (("POST", "/v1/leases", b" " * 65537), 413, "body_too_large"),
            (("POST", "/v1/leases", b"nonsense"), 422, "invalid_request"),
        ],
    )
    def test_refusals(self, node: Node, asked: tuple[str, str, bytes | None], status: int, code: str) -> None:
        """Every refusal is a problem document with a code for programs and a hint for readers."""
        answer = node.request(*asked)
        assert (answer.status, answer.headers["Content-Type"]) == (status, "application/problem+json")
        found = answer.json
        assert found.keys() == {"type", "title", "status", "detail", "code", "hint", "limit"}
        assert (found["status"], found["code"], found["type"]) == (status, code, f"urn:mpsd:error:{code}")
        assert found["title"] and found["detail"] and found["hint"]  # noqa: PT018 - each is a text

    def test_allowed_methods(self, node: Node) -> None:
        """A wrong method is answered with the allowed ones."""
        assert node.request("PUT", "/v1/leases", b"{}").headers["Allow"] == "GET,HEAD,POST"

    def test_reset_of_a_daemon_that_runs(self, node: Node) -> None:
        """A reset does not touch a running control daemon."""
        before = node.unharmed()["gpu0"]
        answer = node.request("POST", "/v1/daemons/gpu0/reset")
        assert (answer.status, answer.json["state"], answer.json["daemon"]) == (202, "done", "gpu0")
        assert node.unharmed()["gpu0"] == before

    @pytest.mark.parametrize(
        "route",
        [
            each
            for each in ROUTES
            if isinstance(each.answer.schema, type) and each.method == "GET" and "{" not in each.path
        ],
    )
    def test_every_answer_is_what_the_document_says(self, node: Node, route: Any) -> None:
        """Every answer decodes as the type in the route table, and has exactly its fields."""
        answer = node.get(route.path)
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "application/json"
        assert msgspec.json.decode(answer.body, type=route.answer.schema) is not None
        assert answer.json.keys() == route.answer.schema.__annotations__.keys()

    def test_status_carries_the_tables(self, node: Node) -> None:
        """The status contains the GPUs and the control daemons as their own routes answer them, and their health."""

        def look() -> Any:
            # The limits of the lease before may be closing: then one of the two answers is older.
            status = node.get("/v1/status").json
            tables = node.get("/v1/gpus").json["gpus"], node.get("/v1/daemons").json["daemons"]
            return status if (status["gpus"], status["daemons"]) == tables else None

        status = wait_until(look, what="the answers to be the same")
        assert (status["healthy"], status["because"], status["reasons"]) == (True, WELL, [])
        assert [each["kind"] for each in status["warnings"]] == ["not_closed"]
        assert (status["headline"].split(":")[0], status["violations"]) == ("healthy, not closed", [])

    def test_config(self, node: Node) -> None:
        """`/v1/config` returns the settings in force by section, in the words of the file."""
        config = node.get("/v1/config").json["config"]
        assert config["api"]["socket"] == str(node.socket)
        assert config["api"]["mode"] == "0666"
        assert config["paths"]["runtime_dir"] == str(node.root / "run")
        assert config["roles"]["users"] == [f"%{GROUP.gr_name}"]
        assert config["limits"] == {"active_thread_percentage": 100.0, "pinned_device_mem_limit": None}


DAEMON: Final = "name gpu state because pid start_time pipe_directory since ready_since limits drift servers version"
GPU: Final = (
    "uuid index name memory_total memory_reserved memory_granted memory_held threads_granted"
    " clients clients_max health because"
)
LEASE: Final = (
    "id state because gpus daemon owner active_thread_percentage pinned_device_mem_limit"
    " env clients created granted ended"
)
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")


class TestContract:
    """The names that checks outside the project rely on (section 4 of the design): none is missing."""

    def test_daemons(self, node: Node) -> None:
        """A control daemon."""
        found = node.get("/v1/daemons").json
        assert found.keys() == {"daemons"}
        for daemon in found["daemons"]:
            assert daemon.keys() >= set(DAEMON.split())
            assert daemon["limits"].keys() == {"active_thread_percentage", "pinned_device_mem_limit"}
            assert all(_TIME.fullmatch(daemon[time]) for time in ("start_time", "since", "ready_since"))
            assert isinstance(daemon["pid"], int)

    def test_gpus(self, node: Node) -> None:
        """A GPU."""
        found = node.get("/v1/gpus").json
        assert found.keys() == {"gpus"}
        for index, gpu in enumerate(found["gpus"]):
            assert gpu.keys() >= set(GPU.split())
            assert (gpu["index"], gpu["health"], gpu["memory_held"], gpu["clients_max"]) == (index, "ok", 0, 48)
            assert gpu["memory_total"] == 80 << 30
            assert gpu["memory_reserved"] == 512 << 20

    def test_lease(self, node: Node) -> None:
        """A lease, its owner and its environment."""
        answer = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB"})
        lease = answer.json
        assert node.request("DELETE", f"/v1/leases/{lease['id']}").status == 204
        assert answer.status == 201
        assert lease.keys() >= set(LEASE.split())
        assert lease["owner"].keys() == {"uid", "gid", "pid", "start_time"}
        assert lease["env"].keys() == {
            "CUDA_MPS_PIPE_DIRECTORY",
            "CUDA_VISIBLE_DEVICES",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
            "MPSD_LEASE",
            "MPSD_LEASE_TOKEN",
        }
        assert all(_TIME.fullmatch(time) for time in (lease["created"], lease["granted"], lease["owner"]["start_time"]))

    def test_lists(self, node: Node) -> None:
        """A list is always an object with one array."""
        for name in ("gpus", "daemons", "clients", "leases"):
            found = node.get(f"/v1/{name}").json
            assert [key for key, value in found.items() if isinstance(value, list)] == [name]


class TestSocket:
    """The socket in the file system."""

    def test_it_appears_with_its_final_mode(self, make_node: Start) -> None:
        """As soon as it is visible, the socket has the configured mode and group."""
        # The group may have no name.
        mine = next((each for each in grp.getgrall() if each.gr_gid == os.getegid()), None)
        group = GROUP if os.geteuid() == 0 else mine
        config = '[api]\nmode = "0640"\n' + (f'group = "{group.gr_name}"\n' if group else "")
        node = make_node(simulate=1, config=config)
        seen: set[tuple[int, int]] = set()
        over = threading.Event()

        def look() -> None:
            while not over.is_set():
                try:
                    found = node.socket.stat()
                except FileNotFoundError:
                    continue
                seen.add((stat.S_IMODE(found.st_mode), found.st_gid))

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            node.start()
        finally:
            over.set()
            watcher.join()
        assert seen == {(0o640, group.gr_gid if group else os.getegid())}
        assert [path.name for path in node.socket.parent.iterdir() if path.is_socket()] == ["mpsd.sock"]

    def test_stale_socket(self, make_node: Start) -> None:
        """The socket that a killed mpsd left behind is replaced."""
        node = make_node(simulate=1)
        node.socket.parent.mkdir()
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(node.socket))
        before = node.socket.stat().st_ino
        node.start()
        assert node.socket.stat().st_ino != before
        assert node.get("/healthz").status == 200

    @needs_root
    def test_mode_keeps_others_out(self, make_node: Start) -> None:
        """A mode without rights for others prevents them even from connecting."""
        node = make_node(simulate=1, config='[api]\nmode = "0600"\n').start(ready=False)
        with calling(node.socket, uid=NOBODY) as stranger, pytest.raises(OSError, match="Permission denied"):
            stranger.request("GET", "/healthz")


def test_socket_of_a_directory(make_node: Start, short_tmp: Path) -> None:
    """When a directory is in the socket's place, mpsd says so and does not start."""
    node = make_node()
    node.socket.mkdir(parents=True)
    status, said = node.refuse()
    assert status == 78
    assert f"cannot listen on {node.socket}" in said
    assert short_tmp in node.root.parents
