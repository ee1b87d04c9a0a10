"""The history of a real node, over its restarts and deaths, and its readers."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.core.accounting.accounts import SECOND
from tests.accounts import check_one_story, history, totals
from tests.daemon.caller import NOBODY, calling, needs_root
from tests.daemon.conftest import Start
from tests.daemon.test_machine import DAY, Clock
from tests.disks import as_root, fill, mounted
from tests.harness import wait_until
from tests.node import Node

pytestmark = pytest.mark.thorough

ACCOUNTANT: Final = "mpsd.daemon.accounting.accountant"


@pytest.fixture(scope="module")
def node(node_for_all: Start) -> Node:
    """Start a node that is shared by the tests that do not change it."""
    return node_for_all(simulate=1).start()


def granted(node: Node, **asked: Any) -> Any:
    """Take out a lease for the process of the tests."""
    answer = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB", "pid": os.getpid(), **asked})
    assert answer.status == 201, answer.json
    return answer.json


def pass_time(seconds: float) -> None:
    """Wait, since amounts accumulate over time."""
    end = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() >= end, what=f"{seconds} s to pass", deadline=seconds + 10)


def release(node: Node, lease: Any) -> None:
    assert node.request("DELETE", f"/v1/leases/{lease['id']}").status == 204


def total(node: Node, by: str, key: str | None, **query: object) -> Any:
    return next(each["total"] for each in history(node, by, **query)["history"] if each["key"] == key)


class TestGranted:
    """Granted amounts are exact."""

    def test_one_story(self, make_node: Start) -> None:
        """The sums follow the times of the events, by GPU, user, name, label and lease."""
        node = make_node(simulate=2).start()
        first = granted(node, name="first", labels={"team": "red"})
        both = granted(node, gpus=2, name="both", labels={"team": "blue"})
        release(node, first)
        third = granted(node, name="first", labels={"team": "red"})
        check_one_story(node)
        release(node, third)
        release(node, both)
        check_one_story(node)
        uid = str(os.getuid())
        (user,) = totals(history(node, "user")).items()
        by_name, by_label, by_lease = (totals(history(node, by)) for by in ("name", "label:team", "lease"))
        assert user[0] == uid
        assert by_name["first"]["leases"] == by_label["red"]["leases"] == 2
        assert by_label["blue"] == pytest.approx(by_name["both"], rel=1e-9)
        assert by_name["both"] == pytest.approx(by_lease[both["id"]], rel=1e-9)
        for amount in ("leases", "threads_granted", "memory_granted"):
            assert sum(each[amount] for each in by_lease.values()) == pytest.approx(user[1][amount], rel=1e-9)

    def test_a_change_is_seen_when_it_came(self, make_node: Start) -> None:
        """Samples of a second show the begin of a lease, even after a long time without changes."""
        node = make_node(simulate=1).start()
        lease = granted(node, threads=40)
        pass_time(3.5)
        more = granted(node, threads=20)
        pass_time(1.2)
        answer = history(node, "gpu", since=30, step=1)
        means = [each["threads_granted"] for each in answer["history"][0]["samples"] if each["threads_granted"]]
        assert answer["resolution"] == 1
        assert all(each == pytest.approx(40) for each in means[1:3])
        assert means[-1] == pytest.approx(60)
        release(node, lease)
        release(node, more)

    def test_thousands_of_brief_leases(self, make_node: Start) -> None:
        """All leases of any number and any names count in the sums; few are stored individually."""
        node = make_node(simulate=1, config="[api]\nlines_per_uid = 60\n").start()
        for number in range(300):
            release(node, granted(node, name=f"job {number}", labels={"n": str(number)}))
        answer = history(node, "name")
        assert len(answer["history"]) <= 17
        assert sum(each["total"]["leases"] for each in answer["history"]) == 300
        assert total(node, "user", str(os.getuid()))["leases"] == 300
        assert 0 < len(history(node, "lease")["history"]) < 300


class TestRestart:
    """mpsd stops and starts, and the accounts lose and double nothing."""

    def test_ended_while_mpsd_was_dead(self, make_node: Start) -> None:
        """A lease whose holder ends while no mpsd runs counts once, up to the event of its end."""
        node = make_node(simulate=1).start()
        with calling(node.socket) as caller:
            lease = granted(node, pid=caller.pid)
            wait_until(lambda: total(node, "lease", lease["id"])["threads_granted"] > 1, what="it to be counted")
            pass_time(1.2)  # a sample with the lease is stored
            node.end(signal.SIGKILL)
        pass_time(0.3)
        node.start()
        wait_until(lambda: node.events("lease_ended"), what="it to end")
        assert total(node, "lease", lease["id"])["leases"] == 1
        check_one_story(node)

    def test_a_pause_is_a_gap(self, make_node: Start) -> None:
        """The answer reports a pause of mpsd that is longer than the interval between readings of the GPUs."""
        node = make_node(simulate=1, durations={f"{ACCOUNTANT}._READING": 2 * SECOND}).start()
        lease = granted(node)
        node.end()
        pass_time(3)
        node.start()
        (gap,) = history(node, "gpu")["gaps"]
        assert gap["because"] == "mpsd did not run"
        assert total(node, "lease", lease["id"])["threads_granted"] > 30
        check_one_story(node)

    @pytest.mark.parametrize("days", [1, -1])
    @pytest.mark.parametrize("runs", [True, False])
    def test_a_jump_of_the_clock_is_a_gap(self, make_node: Start, short_tmp: Path, days: int, *, runs: bool) -> None:
        """No lease counts for the time by which the clock jumps, while mpsd runs or is away, and a gap tells of it."""
        clock = Clock(short_tmp)
        node = make_node(simulate=1, env=clock.variables).start()
        begun, lease = time.monotonic(), granted(node)
        pass_time(1.2)  # a sample with the lease is stored
        if runs:
            clock.set(days * DAY)
        else:
            node.end()
            clock.set(days * DAY)
            node.start()
        by = {"since": 3 * DAY}
        wait_until(lambda: history(node, "gpu", **by)["gaps"], what="the gap")
        (gap,) = history(node, "gpu", **by)["gaps"]
        assert gap["because"] == "the clock was set, or the machine was suspended"
        counted = total(node, "lease", lease["id"], **by)["threads_granted"]
        assert 10 < counted <= 10 * (time.monotonic() - begun)
        assert total(node, "gpu", node.get("/v1/gpus").json["gpus"][0]["uuid"], **by)["threads_granted"] >= counted

    def test_damaged(self, make_node: Start) -> None:
        """mpsd sets a damaged store aside, and begins a new one."""
        node = make_node(simulate=1).start()
        release(node, granted(node))
        node.end()
        path = node.root / "state" / "accounts.db"
        path.write_bytes(b"nonsense" * 1000)
        node.start()
        assert (node.root / "state" / "accounts.set-aside-1").exists()
        assert node.events("store_set_aside")
        release(node, granted(node, name="new"))
        assert total(node, "name", "new")["leases"] == 1

    def test_removed_while_it_runs(self, make_node: Start) -> None:
        """mpsd creates a removed store again within a minute."""
        node = make_node(simulate=1, durations={f"{ACCOUNTANT}.MINUTE": 3 * SECOND}).start()
        (node.root / "state" / "accounts.db").unlink()
        wait_until(lambda: node.events("store_rewritten"), what="it to be made anew")
        assert (node.root / "state" / "accounts.db").exists()


@as_root
def test_full_disk(make_node: Start) -> None:
    """Samples stop, with an event and a note in the status; leases continue. Later, the history shows the gap."""
    node = make_node(simulate=1)
    (node.root / "state").mkdir(mode=0o700)
    with mounted(node.root / "state", "3m"):
        node.start()
        granted(node, name="before")
        full = fill(node.root / "state")
        lease = granted(node, name="during")
        note = "the history of granted and held amounts is not stored: "
        wait_until(
            lambda: any(each.startswith(note) for each in node.get("/v1/status").json["notes"]), what="it to be noted"
        )
        assert history(node, "gpu")["because"]
        assert len(history(node, "gpu")["gaps"]) == 1
        release(node, lease)
        full.unlink()
        wait_until(lambda: node.events("history_stored"), what="samples to be stored again")
        assert len(node.events("history_not_stored")) == 1
        assert not history(node, "gpu")["because"]
        assert len(history(node, "gpu")["gaps"]) == 1
        check_one_story(node)
        node.end(signal.SIGKILL)
        node.start()
        check_one_story(node)
        node.end()


@needs_root
def test_who_sees_what(make_node: Start) -> None:
    """On a closed node, a user sees its own leases and the sums of the GPUs; an administrator sees all."""
    node = make_node(simulate=1, config="[api]\nopen = false\n").start()
    release(node, granted(node, name="secret", labels={"team": "secret"}))
    with calling(node.socket, uid=NOBODY) as caller:
        assert [each["total"]["leases"] for each in caller.request("GET", "/v1/history").json["history"]] == [1]
        for by in ("user", "name", "lease", "label:team"):
            assert caller.request("GET", f"/v1/history?by={by}").json["history"] == []
        assert caller.request("GET", "/v1/history?by=gpu&user=0").json["history"] == []
    assert [each["key"] for each in history(node, "user")["history"]] == ["0"]
    assert "secret" in json.dumps(history(node, "name"))


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("since=10&until=20", "is empty"),
        ("since=3600&step=1", "more than 2000 samples"),
        ("by=nothing", "is not gpu"),
        ("since=yesterday", "RFC 3339"),
        ("since=2026-13-01T00:00:00Z", "is not a time"),
        ("user=root", "is not a uid"),
    ],
)
def test_refused(node: Node, query: str, words: str) -> None:
    """mpsd refuses a request that makes no sense, and names one that would."""
    answer = node.get(f"/v1/history?{query}")
    assert answer.status == 422
    assert words in answer.json["detail"]
    assert answer.json["hint"]
