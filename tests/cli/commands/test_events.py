"""Events are shown completely and in order, each once, also to followers while mpsd restarts."""

import csv
import io
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mpsd.cli.render import as_here
from mpsd.cli.users import name_of
from mpsd.core.events import COMMON, FACTS, EventName, facts_of
from tests.cli.answering import Answering, answering, http
from tests.cli.conftest import end, run_mpsctl, start_mpsctl
from tests.node import Node

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\n\u202e"


def happen(node: Node) -> Any:
    """Cause events: a lease is granted and released. Return it."""
    lease = node.request("POST", "/v1/leases", {"threads": 1, "memory": "1GiB", "name": "short"}).json
    node.request("DELETE", f"/v1/leases/{lease['id']}")
    return lease


def event(number: int, **facts: object) -> dict[str, object]:
    """Return an event in mpsd's form."""
    return {"seq": number, "at": "2026-11-21T03:00:00.5Z", "level": "info", "event": "lease_ended", **facts}


def chunks(*events: object) -> Iterator[bytes]:
    """Return the beginning of an answer with these events, each as a line in its own chunk."""
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    for each in events:
        text = json.dumps(each, ensure_ascii=False).encode() + b"\n"
        yield b"%x\r\n%b\r\n" % (len(text), text)


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_json(node: Node) -> None:
    """With `-o json` each line is mpsd's own, byte for byte, from the one after the given number."""
    happen(node)
    done = node.mpsctl("events", "-o", "json")
    assert (done.returncode, done.stderr) == (0, "")
    kept = node.get("/v1/events").body.decode()
    assert kept.startswith(done.stdout)  # there may be more by then
    *before, last = done.stdout.splitlines(keepends=True)
    assert before
    number = json.loads(last)["seq"]
    assert node.mpsctl("events", "-o", "json", "--after", str(number - 1)).stdout.startswith(last)
    done = node.mpsctl("events", "-o", "json", "--after", str(number))
    assert (done.returncode, done.stderr, last in done.stdout) == (0, "", False)


def test_sentences(node: Node) -> None:
    """By default it is a sentence; each filter shows only the events that it selects."""
    lease, user = happen(node)["id"], name_of(os.getuid())
    granted, ended = node.mpsctl("events", "--lease", lease).stdout.splitlines()
    line = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d    "
    assert re.fullmatch(rf"{line}{lease}: granted to {user}, pid {os.getpid()}: .* were free on gpu\d", granted)
    assert re.fullmatch(rf"{line}{lease}: ended: {as_here(f'uid {os.getuid()}')} released it", ended)
    for filters in (
        ["-n", "1", "--mine"],
        ["--lease", lease, "-k", "lease_ended"],
        ["--lease", "short", "-n1"],
        ["--lease", lease.removeprefix("lease-")[:9], "-n1"],
        ["--user", f"{os.getuid()}", "-n", "1"],
        ["--since", "1h", "-n1", "--kind", "lease_*"],
    ):
        assert node.mpsctl("events", *filters).stdout.splitlines() == [ended], filters
    (row,) = csv.DictReader(io.StringIO(node.mpsctl("events", "--lease", lease, "-n1", "-o", "csv").stdout))
    assert (row["event"], row["lease"]) == ("lease_ended", lease)
    assert node.mpsctl("events", "--lease", lease, "-n1", "-o", "name").stdout == f"{row['seq']}\n"
    about = node.mpsctl("events", "--daemon", "gpu1", "-o", "json").stdout.splitlines()
    assert {json.loads(each)["daemon"] for each in about} == {"gpu1"}
    assert lease in node.mpsctl("events", "--gpu", "0").stdout
    assert lease not in node.mpsctl("events", "--gpu", "1").stdout
    for nothing in (["--until", "2020-01-01"], ["-n", "0"], ["--user", "4000000"]):
        assert node.mpsctl("events", *nothing).stdout == "no events\n"
    assert node.mpsctl("events", "-n", "0", "-o", "json").stdout == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kind", "daemon_deth"], "did you mean daemon_death"),
        (["--kind", "frobnicate"], "list them: mpsctl events --kinds"),
        (["--since", "a while"], "give one such as 2h (so long ago)"),
        (["--daemon", "gpu7"], "there is no control daemon 'gpu7': choose gpu0, gpu1"),
        (["--gpu", "7"], "there is no GPU '7': choose 0 (gpu0), 1 (gpu1), or a UUID"),
        (["--user", "nobody-at-all"], "there is no user 'nobody-at-all'"),
        (["--until", "1h", "--follow"], "use --follow or --until, not both"),
    ],
)
def test_what_cannot_be_meant(node: Node, arguments: list[str], says: str) -> None:
    """A filter that would silently select nothing is refused with what to type."""
    done = node.mpsctl("events", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr


def test_kinds(node: Node) -> None:
    """The list of kinds has each with its facts, and the meaning of each fact, for people and for programs."""
    lines = node.mpsctl("events", "--kinds").stdout.splitlines()
    first = {line.split()[0] for line in lines if line and not line.startswith(" ")}
    assert {*EventName, *FACTS, *COMMON} <= first
    listed = json.loads(node.mpsctl("events", "--kinds", "-o", "json").stdout)
    assert {each["event"]: each["facts"] for each in listed["kinds"]} == {each: facts_of(each) for each in EventName}
    assert listed["facts"].keys() == {*FACTS, *COMMON}


@pytest.mark.parametrize("form", ["table", "wide", "json"])
def test_escape_sequences(short_tmp: Path, form: str) -> None:
    """An event has no effect on the terminal, and is one line, whatever it contains."""
    told = event(1, because=HOSTILE, **{HOSTILE: "x"})
    with answering(short_tmp / "s", [*chunks(told), b"0\r\n\r\n"]):
        done = run_mpsctl(short_tmp / "s", "events", "-o", form)
    (line,) = done.stdout.splitlines()
    assert line.isprintable()
    if form == "json":
        assert json.loads(line) == told


@pytest.mark.parametrize(
    ("said", "status", "reason"),
    [
        pytest.param([*chunks({"event": "x"}), b"0\r\n\r\n"], 1, "has no 'seq'", id="without a number"),
        pytest.param([*chunks([1]), b"0\r\n\r\n"], 1, "has no 'seq'", id="no object"),
        pytest.param([*chunks({"seq": 1}), b"0\r\n\r\n"], 1, "different versions", id="without a time"),
        pytest.param([*chunks(), b"2\r\nx\n\r\n"], 69, "does not answer as mpsd does", id="no JSON"),
    ],
)
def test_what_is_no_event(short_tmp: Path, said: list[bytes], status: int, reason: str) -> None:
    """An mpsd of another version, or another program, is reported as such, and not asked again."""
    with answering(short_tmp / "s", said):
        done = run_mpsctl(short_tmp / "s", "events", "--follow")
    assert (done.returncode, done.stdout) == (status, "")
    assert reason in done.stderr


# -- what is to come ---------------------------------------------------------------------------------------------------


@pytest.fixture
def follower() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Return a function that follows events until the end of the test."""
    followers = []

    def follow(socket: Path, *options: str, **more: Any) -> "subprocess.Popen[str]":
        followers.append(start_mpsctl(socket, "events", "--follow", *options, **more))
        return followers[-1]

    yield follow
    for process in followers:
        end(process)


def test_following(node: Node, follower: Callable[..., "subprocess.Popen[str]"]) -> None:
    """A follower gets each event as it happens, and ends by Ctrl-C without a message."""
    last = json.loads(node.get("/v1/events").body.splitlines()[-1])["seq"]
    process = follower(node.socket, "--after", str(last), "-o", "wide")
    assert process.stdout is not None
    for _ in range(3):
        lease = happen(node)["id"]
        about = (line.split()[1] for line in iter(process.stdout.readline, "") if f" lease={lease} " in line)
        assert [next(about), next(about)] == ["lease_granted", "lease_ended"]
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == -signal.SIGINT


def test_following_the_latest(node: Node, follower: Callable[..., "subprocess.Popen[str]"]) -> None:
    """A follower of the latest events gets these, then each new one, once, as far as the filters select it."""
    first, second = happen(node)["id"], happen(node)["id"]
    process = follower(node.socket, "-n", "2", "--kind", "lease_ended")
    assert process.stdout is not None
    heard = [process.stdout.readline(), process.stdout.readline()]
    third = happen(node)["id"]
    heard.append(process.stdout.readline())
    for lease, line in zip((first, second, third), heard, strict=True):
        assert f" {lease}: ended: " in line


@pytest.mark.thorough
def test_restarts_of_mpsd(make_node: Callable[..., Node], follower: Callable[..., "subprocess.Popen[str]"]) -> None:
    """Every event of three lives of mpsd arrives once, in order, however each life ended."""
    node = make_node(simulate=1).start()
    process = follower(node.socket, "-o", "json")
    assert process.stdout is not None
    assert process.stderr is not None
    heard: list[Any] = []

    def hear(last: str) -> None:
        while not heard or heard[-1].get("lease") != last or heard[-1]["event"] != "lease_ended":
            heard.append(json.loads(process.stdout.readline()))  # type: ignore[union-attr]

    hear(happen(node)["id"])
    for number in (signal.SIGKILL, signal.SIGTERM):
        node.end(number)
        told = r"mpsctl: mpsd is gone; continuing after event \d+ when it is back\n"
        assert re.fullmatch(told, process.stderr.readline())
        node.start()
        hear(happen(node)["id"])
    assert [each["seq"] for each in heard] == list(range(1, len(heard) + 1))
    kept = [json.loads(line) for line in node.get("/v1/events").body.splitlines()]
    assert heard == kept[: len(heard)]
    assert [each["event"] for each in heard].count("node_started") == 3


def test_being_dropped(short_tmp: Path) -> None:
    """A follower that was too slow, or cut off in a line, reconnects for the rest; a gap is reported."""
    gap = http(
        {"code": "invalid_request", "detail": "they are not kept", "hint": "start there"}, "422 Unprocessable Entity"
    )
    first = [*chunks(event(4), event(5)), b"0\r\n\r\n"]
    second = [*chunks(event(6)), next(iter(list(chunks(event(7)))[1:]))[:30], Answering.hang_up]
    third = [*chunks(event(7)), Answering.hang_up]
    with answering(short_tmp / "s", first, second, third, gap) as server:
        done = run_mpsctl(short_tmp / "s", "events", "--follow", "--after", "3", "-o", "json")
    assert [json.loads(line)["seq"] for line in done.stdout.splitlines()] == [4, 5, 6, 7]
    assert done.returncode == 2
    assert done.stderr.endswith("mpsctl: they are not kept [invalid_request]\n  hint: start there\n")
    asked = [request.split(b" ")[1].decode() for request in server.requests]
    assert asked == [f"/v1/events?after={after}&follow=true" for after in (3, 5, 6, 7)]


def test_a_reader_that_has_seen_enough(node: Node, follower: Callable[..., "subprocess.Popen[str]"]) -> None:
    """When its reader closes the pipe, as `head -1` does, mpsctl exits without a message, even in quiet times."""
    process = follower(node.socket)
    assert process.stdout is not None
    assert process.stdout.readline() != ""
    process.stdout.close()
    assert process.wait(timeout=30) == -signal.SIGPIPE
    assert process.stderr is not None
    assert process.stderr.read() == ""
