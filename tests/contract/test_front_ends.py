"""The front-end itself: one at a time, open to any user, silent at the wrong moment, and blocked with its daemon."""

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from pathlib import Path
from typing import Final

import pytest

from mpsd.core.mps.commands import echo_of
from tests.contract.differences import DIFFERENCES, UID, answered
from tests.contract.subjects import OWNER, STRANGER, Bench, Exchange, Said, as_root
from tests.harness import look_at, wait_until

GET: Final = "get_default_active_thread_percentage"
SET: Final = "set_default_active_thread_percentage"
NO_DAEMON: Final = "Cannot find MPS control daemon process"
TURNED_AWAY: Final = ("Cannot send command to MPS control daemon process", "")


def assert_turned_away(said: Said) -> None:
    """Fail unless this is one of the failures of a front-end while another is served.

    A complaint comes with status 1, but on a busy machine with 0 too (seen once, on 555).
    """
    assert said.printed == []
    assert said.complaint in TURNED_AWAY
    assert said.status in {0, 1}


def test_no_daemon(idle: Bench) -> None:
    """Without a daemon a front-end says so and exits with status 1."""
    assert idle.front_end(GET) == Said(1, [], NO_DAEMON)


def test_answers_in_order(bench: Bench) -> None:
    """One front-end takes any number of commands, and answers each in turn."""
    values = [f"{number % 100 + 1}.0" for number in range(500)]
    assert bench.front_end(*(f"{SET} {value}" for value in values)) == Said(0, values, "")


def test_last_line_without_end(bench: Bench) -> None:
    """The last command counts without a newline, and an empty input is a conversation too."""
    done = subprocess.run(
        bench.subject.argv, env=bench.environment, input=f"{SET} 7\n{GET}".encode(), capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, b"7.0\n7.0\n")
    assert bench.front_end() == Said(0, [], "")


def test_answers_at_the_end(bench: Bench) -> None:
    """Into a pipe the front-end prints nothing before its input ends, even after the daemon has answered."""
    with bench.held() as front_end:
        assert front_end.stdin is not None
        assert front_end.stdout is not None
        front_end.stdin.write(f"{SET} 42\n".encode())
        front_end.stdin.flush()
        wait_until(lambda: "42.0" in bench.log(), what="the answer in the log")
        assert select.select([front_end.stdout], [], [], 0)[0] == []
        assert front_end.communicate()[0] == b"42.0\n"


def test_answers_at_once_on_a_terminal(bench: Bench) -> None:
    """On a terminal the front-end prints each answer when it comes."""
    ours, theirs = pty.openpty()
    front_end = subprocess.Popen(bench.subject.argv, env=bench.environment, stdin=subprocess.PIPE, stdout=theirs)
    os.close(theirs)
    try:
        assert front_end.stdin is not None
        front_end.stdin.write(f"{SET} 42\n".encode())
        front_end.stdin.flush()
        assert select.select([ours], [], [], 20)[0] == [ours]
        assert os.read(ours, 100) == b"42.0\r\n"
    finally:
        front_end.communicate()
        os.close(ours)


def test_one_at_a_time(bench: Bench) -> None:
    """While one front-end is served, every other fails without effect, by status 1 or by silence with status 0."""
    with bench.held() as holder:
        for _ in range(9):
            assert_turned_away(bench.front_end(f"{SET} 10", GET))
        output, complaint = holder.communicate(f"{GET}\n".encode())
        assert (holder.returncode, output, complaint) == (0, b"100.0\n", b"")
    assert f"Cmd:{SET} 10" not in bench.complete_log()


def test_many_at_once(bench: Bench) -> None:
    """Of many concurrent front-ends, each answered one has the true answer, and every other is turned away."""
    front_ends = [bench.open_front_end() for _ in range(16)]
    for number, front_end in enumerate(front_ends):
        assert front_end.stdin is not None
        try:
            front_end.stdin.write(f"mine-{number}\n".encode())
            front_end.stdin.flush()
        except BrokenPipeError:
            pass  # the front-end was turned away before
    served = 0
    for number, front_end in enumerate(front_ends):
        output, complaint = front_end.communicate()
        said = Said(front_end.returncode, output.decode().splitlines(), complaint.decode().strip())
        if said.printed:
            served += 1
            assert said == Said(0, [echo_of(f"mine-{number}")], "")
        else:
            assert_turned_away(said)
    assert served > 0


def test_daemon_dies_under_a_front_end(bench: Bench) -> None:
    """When the daemon dies, its front-end exits with status 1, with the answers until then."""
    with_answer = bench.open_front_end()
    assert with_answer.stdin is not None
    with_answer.stdin.write(f"{SET} 42\n".encode())
    with_answer.stdin.flush()
    wait_until(lambda: "42.0" in bench.log(), what="the answer in the log")
    wait_until(lambda: _waits_for_input(with_answer), what="the front-end to have the answer, too")
    bench.kill()
    assert with_answer.wait(20) == 1
    assert with_answer.communicate()[0] == b"42.0\n"
    assert bench.front_end(GET) == Said(1, [], NO_DAEMON)


def test_front_end_dies(bench: Bench) -> None:
    """Killing a front-end ends its conversation, and the next one is served."""
    with bench.held():
        pass
    assert bench.front_end(GET) == Said(0, ["100.0"], "")


def test_stopped_daemon(bench: Bench) -> None:
    """A front-end of a stopped daemon blocks; if it is killed meanwhile, its commands are never executed."""
    bench.daemon.send_signal(signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        bench.front_end(f"{SET} 10", seconds=2)
    bench.daemon.send_signal(signal.SIGCONT)
    wait_until(lambda: "Unable to accept connection" in bench.log(), what="the daemon to miss the front-end")
    assert bench.front_end(GET) == Said(0, ["100.0"], "")
    assert f"Cmd:{SET} 10" not in bench.complete_log()


def test_stopped_in_the_middle(bench: Bench) -> None:
    """Commands that a front-end has sent are executed, even if it is killed while the daemon is stopped."""
    with bench.held() as front_end:
        bench.daemon.send_signal(signal.SIGSTOP)
        assert front_end.stdin is not None
        front_end.stdin.write(f"{SET} 10\n".encode())
        front_end.stdin.flush()
        wait_until(lambda: _has_sent_all(front_end), what="the front-end to wait for the answer")
        front_end.kill()
        bench.daemon.send_signal(signal.SIGCONT)
    assert bench.front_end(GET) == Said(0, ["10.0"], "")


def _has_sent_all(front_end: "subprocess.Popen[bytes]") -> bool:
    """Return whether a front-end has read its input and sleeps: it sends before it sleeps."""
    assert front_end.stdin is not None
    unread = int.from_bytes(fcntl.ioctl(front_end.stdin, termios.FIONREAD, bytes(4)), sys.byteorder)
    process = look_at(front_end.pid)
    return unread == 0 and process is not None and process.state == "S"


def _waits_for_input(front_end: "subprocess.Popen[bytes]") -> bool:
    """Return whether a front-end has the answer to its last command: it then sleeps until the next one.

    NVIDIA's reads a pipe, the simulator's polls; for an answer both sleep in the socket. A kernel may hide where.
    """
    process = look_at(front_end.pid)
    sleeps_in = Path(f"/proc/{front_end.pid}/wchan").read_text(encoding="ascii")
    return (
        process is not None
        and process.state == "S"
        and (sleeps_in == "0" or "pipe" in sleeps_in or "poll" in sleeps_in)
    )


STRANGERS: Final = (
    f"{SET} 40",
    "set_default_device_pinned_mem_limit 0 2G",
    "set_default_client_priority 1",
)


@as_root
def test_strangers_and_defaults(bench: Bench) -> None:
    """Up to 535 any local user can change every default of root's daemon; from 550 on that is refused."""
    branch = bench.subject.branch
    refusal = DIFFERENCES[branch].defaults_refused
    setters = bench.exchange(STRANGERS, as_stranger=True)
    getters = [GET, "get_default_device_pinned_mem_limit 0", "get_default_client_priority"]
    found = [each.printed for each in bench.exchange(getters)]
    if refusal is None:
        changed = [["40.0"], [], []]
        in_force = [["40.0"], ["2G"], ["1"]]
    else:
        told = refusal.replace(UID, str(STRANGER))
        changed = [[told]] * 3
        in_force = [["100.0"], [], ["0"]]
    assert setters == [
        Exchange(command, answered(command, lines, branch), answered(command, lines, branch))
        for command, lines in zip(STRANGERS, changed, strict=True)
    ]
    assert found == [answered(command, lines, branch) for command, lines in zip(getters, in_force, strict=True)]


@as_root
def test_strangers_and_refusals(bench: Bench) -> None:
    """A stranger can neither quit the daemon nor start a server for another uid; it may send any query."""
    started = DIFFERENCES[bench.subject.branch].start_refused.replace(UID, str(STRANGER))
    quit_refused = "Not enough privilege to execute quit command"
    rows = {
        f"start_server -uid {OWNER}": [started],
        "quit": [quit_refused],
        "quit -t 1": [quit_refused],
        GET: ["100.0"],
        "get_server_list": [],
    }
    assert bench.exchange(list(rows), as_stranger=True) == [Exchange(row, lines, lines) for row, lines in rows.items()]


@as_root
def test_strangers_and_servers(bench: Bench) -> None:
    """A stranger can send any query to another uid's server, but cannot shut it down."""
    bench.put_server("exec sleep 1000")
    server = bench.start_server(uid=OWNER)
    refused = DIFFERENCES[bench.subject.branch].shutdown_refused.replace(UID, str(STRANGER))
    commands = [f"shutdown_server {server}", f"shutdown_server {server} -f", f"get_active_thread_percentage {server}"]
    found = bench.exchange(commands, as_stranger=True)
    assert [each.printed for each in found] == [[refused], [refused], []]
    assert [each.logged for each in found] == [[refused], [refused], [f"Server {server} is <busy>"]]


@as_root
def test_strangers_own_server(bench: Bench) -> None:
    """A stranger can start a server for its own uid, and the server runs as that uid."""
    bench.root.chmod(0o711)  # the server has to reach its own program
    bench.put_server("exec sleep 1000")
    assert bench.front_end(f"start_server -uid {STRANGER}", as_stranger=True) == Said(0, [], "")
    listed = wait_until(lambda: bench.front_end("get_server_list").printed, what="the server to be listed")
    status = Path(f"/proc/{listed[0]}/status")
    uids = "\t".join([str(STRANGER)] * 4)
    wait_until(lambda: f"Uid:\t{uids}\n" in status.read_text(encoding="ascii"), what="it to be the stranger's")
