"""A control daemon's log: who gave which command, in what order. mpsd detects foreign commands only there."""

import re
from pathlib import Path
from typing import Final

from mpsd.core.mps import log_parser
from mpsd.core.mps.commands import echo_of
from mpsd.core.mps.log_parser import DaemonStarted, ForeignCommand, ServerExited, ServerStarting, Unaccounted
from tests.contract.differences import DIFFERENCES, answered
from tests.contract.subjects import OWNER, Bench
from tests.harness import wait_until

SET: Final = "set_default_active_thread_percentage"
SET_LIMIT: Final = "set_default_device_pinned_mem_limit"
STAMP: Final = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} Control ( *\d+)\] ")


def test_form_of_a_line(bench: Bench) -> None:
    """Every line has a prefix: date, milliseconds, `Control`, and the daemon's pid, padded to five places."""
    bench.complete_log()
    for line in bench.raw_log():
        match = STAMP.match(line)
        assert match is not None, line
        assert match.group(1) == f"{bench.daemon.pid:5d}"
    assert all(log_parser.parse(line) is not None for line in bench.raw_log())


def test_first_lines(bench: Bench) -> None:
    """The log begins with the socket and with the variables that a client has to set."""
    assert bench.complete_log()[:2] == [
        f"Starting control daemon using socket {bench.pipe}/control",
        f"To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY={bench.pipe}",
    ]


def test_a_conversation(bench: Bench) -> None:
    """Each conversation is between two lines, with each command as given, and each answer after its command."""
    limit = answered(SET_LIMIT, [], bench.subject.branch)
    bench.front_end(f"{SET} 150", f"  {SET}  12.25  ", f"{SET_LIMIT} 0 10T", "get_server_list", "bogus 1 2")
    assert bench.logged_conversation(f"Cmd:{SET} 150") == [
        f"Cmd:{SET} 150",
        "Invalid percentage, expected between (0.0, 100.0]",
        "100.0",
        f"Cmd:  {SET}  12.25  ",
        "12.2",
        f"Cmd:{SET_LIMIT} 0 10T",
        *limit,
        "Cmd:get_server_list",
        "Cmd:bogus 1 2",
        echo_of("bogus"),
    ]


def test_who_was_turned_away(bench: Bench) -> None:
    """A front-end that is turned away leaves one line, and none of its commands."""
    with bench.held():
        before = len(bench.log())
        for _ in range(3):
            bench.front_end(f"{SET} 10")
    lines = bench.complete_log()
    assert lines[before : before + 4] == [*["Accepting connection..."] * 3, "UI closed"]


def test_a_strangers_hand(bench: Bench) -> None:
    """Foreign changes are found in the log; foreign queries and mpsd's own changes are not reported."""
    bench.front_end("mpsd-0123abcd-0", f"{SET} 20", "mpsd-0123abcd-1")
    bench.front_end("get_server_list", f"{SET} 30", f"{SET_LIMIT} 0 2G")
    bench.front_end("mpsd-0123abce-0", f"{SET} 40", "mpsd-0123abce-1")
    bench.complete_log()
    events = log_parser.LogReader().read(bench.raw_log())
    changes = [ForeignCommand(f"{SET} 30"), ForeignCommand(f"{SET_LIMIT} 0 2G")]
    questions = [each for each in events if isinstance(each, Unaccounted)]
    assert [each for each in events if each not in questions] == [DaemonStarted(bench.daemon.pid), *changes]
    # A foreign query may hide a command; a conversation with a mark is not foreign.
    assert Unaccounted("get_server_list") in questions
    assert not [each for each in questions if each.text.startswith("mpsd-0123")]


def test_every_line_is_known(bench: Bench) -> None:
    """Every line of a daemon without a GPU is known, from the first to the last: servers, refusals and the end."""
    bench.put_server("exec sleep 1000")
    server = bench.start_server()
    with bench.held():
        bench.front_end("get_server_list")
    bench.front_end("get_active_thread_percentage 999", "terminate_client 1 2", "shutdown_server 999", "bogus", "ps")
    bench.front_end(f"get_active_thread_percentage {server}", f"shutdown_server {server} -f")
    wait_until(lambda: "Removed Shm file at " in bench.log(), what="the server's end in the log")
    bench.front_end(f"start_server -uid {OWNER}", "quit -t 0")
    bench.ended()
    reader = log_parser.LogReader()
    events = reader.read(bench.raw_log())
    assert (reader.unknown, list(reader.latest)) == (0, [])
    assert events[0] == DaemonStarted(bench.daemon.pid)
    assert ServerStarting(server, OWNER) in events
    assert ServerExited(server, 0) in events
    assert bench.log()[-1].startswith("Exit with status ")


def test_unknown_lines(bench: Bench) -> None:
    """A server's output is in the daemon's log unchanged, and is counted and kept as unknown."""
    bench.put_server("echo what a new driver says; exec sleep 1000")
    bench.start_server()
    wait_until(lambda: "what a new driver says" in bench.raw_log(), what="what it printed in the log")
    bench.complete_log()
    reader = log_parser.LogReader()
    reader.read(bench.raw_log())
    assert (reader.unknown, list(reader.latest)) == (1, ["what a new driver says"])


def test_log_on_a_full_disk(idle: Bench) -> None:
    """A daemon whose log accepts no more lines keeps serving."""
    idle.log_file, log_file = Path("/dev/full"), idle.log_file
    idle.launch()
    idle.log_file = log_file
    wait_until(lambda: idle.front_end(f"{SET} 42").printed == ["42.0"], what="the daemon to serve")


def test_who_logs_a_start(bench: Bench) -> None:
    """From 550 on the start of a server is logged under the server's own pid."""
    bench.put_server("exec sleep 1000")
    server = bench.start_server()
    bench.complete_log()
    lines = [line for raw in bench.raw_log() if (line := log_parser.parse(raw)) is not None]
    (started,) = [line for line in lines if line.text == f"Starting new server {server} for user {OWNER}"]
    expected = server if DIFFERENCES[bench.subject.branch].start_logged_by_server else bench.daemon.pid
    assert started.pid == expected
