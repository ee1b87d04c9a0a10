"""Servers without a GPU: a stand-in that never reports ready, and so stays busy forever."""

import os
import signal
from pathlib import Path
from typing import Final

import pytest

from tests.contract.differences import DIFFERENCES, UID, answered
from tests.contract.subjects import ANOTHER, OWNER, STRANGER, Bench, Exchange, Said, as_root
from tests.harness import look_at, wait_until

GET: Final = "get_default_active_thread_percentage"

WEDGED: Final = "exec sleep 1000"
"""A server that never gets ready, and ends when it is interrupted."""
STUBBORN: Final = 'trap "" INT; exec sleep 1000'
"""A server that never gets ready, and does not end when it is interrupted."""

BUSY: Final = {
    # The printed answer, and the lines that only the log has, while SERVER is busy.
    "get_server_list": (["SERVER"], ["SERVER"]),
    "get_server_status SERVER": (["INITIALIZING"], ["INITIALIZING"]),
    "get_client_list SERVER": ([], []),
    "get_client_list 999": (["Server 999 not found"], ["Server 999 not found"]),
    "get_device_client_list": ([], ["Server SERVER is <busy>"]),
    "get_device_client_list SERVER": ([], ["Server SERVER is <busy>"]),
    "ps": (["Server not found"], ["Server SERVER is <busy>", "Server not found"]),
    "ps -p SERVER": (["Server SERVER not found", ""], ["Server SERVER is <busy>", "Server SERVER not found"]),
    "get_active_thread_percentage SERVER": ([], ["Server SERVER is <busy>"]),
    "set_active_thread_percentage SERVER 10": ([], ["Server SERVER is <busy>"]),
    "set_active_thread_percentage SERVER 150": ([], ["Server SERVER is <busy>"]),
    "get_device_pinned_mem_limit SERVER 0": ([], ["Server SERVER is <busy>"]),
    "set_device_pinned_mem_limit SERVER 0 1G": ([], ["Server SERVER is <busy>"]),
    "terminate_client SERVER 1": (
        ["Server SERVER not found!", "1"],
        ["Server SERVER is <busy>", "Server SERVER not found!", "1"],
    ),
    f"start_server -uid {OWNER}": ([], []),
    f"start_server -uid {ANOTHER}": ([], []),
    "shutdown_server SERVER": ([], []),
}


def alive(pid: int) -> bool:
    process = look_at(pid)
    return process is not None and not process.zombie


def log_from(line: str, lines: list[str]) -> list[str]:
    return lines[lines.index(line) :]


def test_busy_server(bench: Bench) -> None:
    """While a server is busy, its control daemon answers nothing to queries for it; the log says why."""
    bench.put_server(WEDGED)
    server = str(bench.start_server())
    branch = bench.subject.branch
    rows = {command.replace("SERVER", server): answer for command, answer in BUSY.items()}
    if OWNER != 0:
        refused = DIFFERENCES[branch].start_refused.replace(UID, f"{OWNER}")
        rows[f"start_server -uid {ANOTHER}"] = ([refused], [refused])
    expected = []
    for command, (printed, logged) in rows.items():
        lines = answered(command, [line.replace("SERVER", server) for line in printed], branch)
        log = answered(command, [line.replace("SERVER", server) for line in logged], branch)
        expected.append(Exchange(command, lines, log))
    assert bench.exchange(list(rows)) == expected


def test_defaults_beside_a_busy_server(bench: Bench) -> None:
    """The defaults can be set and read whatever the server does."""
    bench.put_server(WEDGED)
    bench.start_server()
    commands = ["set_default_active_thread_percentage 40", GET]
    assert [each.printed for each in bench.exchange(commands)] == [["40.0"], ["40.0"]]


ENDS: Final = {"exit 0": 0, "exit 3": 3, "kill -KILL $$": 0, "kill -TERM $$": 0}
"""Ends of a server, with the status that counts: a signal counts as 0."""


@pytest.mark.parametrize("end", ENDS)
def test_server_that_ends(bench: Bench, end: str) -> None:
    """`start_server` prints nothing, the end of the server is only in the log, and its status becomes the daemon's."""
    bench.put_server(end)
    assert bench.front_end(f"start_server -uid {OWNER}") == Said(0, [], "")
    status = ENDS[end]
    wait_until(lambda: "Removed Shm file at " in bench.log(), what="the server's end in the log")
    (ended,) = [line for line in bench.log() if line.endswith(f" exited with status {status}")]
    assert ended.startswith("Server ")
    assert bench.front_end("get_server_list") == Said(0, [], "")
    bench.front_end("quit")
    assert bench.ended() == status
    assert bench.log()[-1] == f"Exit with status {status}"


def test_no_server_program(bench: Bench) -> None:
    """Without a server program, a process that exits with status 1 is listed for a moment, if at all."""
    assert bench.front_end(f"start_server -uid {OWNER}") == Said(0, [], "")
    wait_until(lambda: any(line.endswith(" exited with status 1") for line in bench.log()), what="its end in the log")
    assert bench.front_end("get_server_list") == Said(0, [], "")


def test_first_failure_stays(bench: Bench) -> None:
    """The status of a daemon is that of the first server that failed, whatever later ones do."""
    bench.put_server('echo >>"$CUDA_MPS_LOG_DIRECTORY/n"; exit $(($(wc -l <"$CUDA_MPS_LOG_DIRECTORY/n") - 1))')
    for status in range(3):
        bench.front_end(f"start_server -uid {OWNER}")
        wait_until(lambda: any(line.endswith(f"with status {status}") for line in bench.log()), what="its end")  # noqa: B023
    bench.front_end("quit")
    assert bench.ended() == 1


def test_what_a_server_is_given(bench: Bench) -> None:
    """A server is a child of the daemon, with its environment and directory, its output in the log, and its own uid."""
    bench.put_server('echo "arguments: $*"; echo "directories: $CUDA_MPS_PIPE_DIRECTORY $PWD"; exec sleep 1000')
    server = bench.start_server()
    process = look_at(server)
    assert process is not None
    assert process.parent == bench.daemon.pid
    assert os.getsid(server) == os.getsid(bench.daemon.pid)
    expected = {"arguments: ", f"directories: {bench.pipe} /"}
    wait_until(lambda: expected <= set(bench.raw_log()), what="what it printed in the log")


@as_root
def test_one_server_at_a_time(bench: Bench) -> None:
    """The server of another uid waits silently until the first is gone."""
    bench.root.chmod(0o711)
    bench.put_server(WEDGED)
    first = bench.start_server()
    bench.front_end(f"start_server -uid {OWNER}", f"start_server -uid {STRANGER}", f"start_server -uid {STRANGER}")
    assert bench.front_end("get_server_list").printed == [str(first)]
    os.kill(first, signal.SIGKILL)

    def second() -> str | None:
        listed = bench.front_end("get_server_list").printed
        return listed[0] if listed and listed != [str(first)] else None

    follower = wait_until(second, what="the waiting uid's server")
    # The server is listed a moment before its start is logged, also behind a mark.
    started = f"Starting new server {follower} for user {STRANGER}"
    wait_until(lambda: started in bench.log(), what="the log to tell of it")
    ours = [line for line in bench.log() if line.startswith(("Starting new", "Server ", "Removed"))]
    assert ours == [
        f"Starting new server {first} for user {OWNER}",
        f"Server {first} exited with status 0",
        "Removed Shm file at ",
        started,
    ]


def test_forced_shutdown(bench: Bench) -> None:
    """`shutdown_server` has no effect on a busy server; with `-f` the server is interrupted."""
    bench.put_server(WEDGED)
    server = bench.start_server()
    assert bench.front_end(f"shutdown_server {server}", "get_server_list").printed == [str(server)]
    assert bench.front_end(f"shutdown_server {server} -f") == Said(0, [], "")
    wait_until(lambda: "Removed Shm file at " in bench.log(), what="the server's end in the log")
    assert bench.front_end("get_server_list").printed == []
    forced = [line for line in bench.log() if line == f"Force shutting down server {server}"]
    assert len(forced) == DIFFERENCES[bench.subject.branch].force_announced


def test_quit_in_time(bench: Bench) -> None:
    """`quit -t` waits, interrupts the remaining server, and exits with its status; 0, since a signal counts as 0."""
    bench.put_server(WEDGED)
    server = bench.start_server()
    said = bench.front_end("quit -t 1")
    assert (said.printed, said.complaint) == ([], "")
    assert bench.ended() == 0
    assert not alive(server)
    difference = DIFFERENCES[bench.subject.branch]
    announced = ["quit command issued with timeout of 1"] if difference.quit_announced else []
    forced = [f"Force shutting down server {server}"] if difference.force_announced else []
    assert log_from("Cmd:quit -t 1", bench.log()) == [
        "Cmd:quit -t 1",
        *announced,
        *forced,
        f"Server {server} exited with status 0",
        "Removed Shm file at ",
        "Exit with status 0",
    ]


def test_quit_without_a_time(bench: Bench) -> None:
    """`quit` waits for a wedged server forever; meanwhile no server is started, and no front-end ends."""
    bench.put_server(WEDGED)
    server = bench.start_server()
    bench.hanging_front_end("quit")
    bench.logged_conversation("Cmd:quit")  # until the daemon has dropped that front-end, it turns others away
    bench.hanging_front_end(f"start_server -uid {ANOTHER}", GET)
    assert bench.logged_conversation(f"Cmd:start_server -uid {ANOTHER}") == [
        f"Cmd:start_server -uid {ANOTHER}",
        "The MPS control daemon is shutting down",
        f"Cmd:{GET}",
        "100.0",
    ]
    assert bench.daemon.poll() is None
    os.kill(server, signal.SIGKILL)
    assert bench.ended() == 0


def test_quit_again(bench: Bench) -> None:
    """A daemon that waits forever gets a timeout by another `quit`."""
    bench.put_server(WEDGED)
    server = bench.start_server()
    bench.hanging_front_end("quit")
    bench.logged_conversation("Cmd:quit")  # until the daemon has dropped that front-end, it turns others away
    bench.front_end("quit -t 0")
    assert bench.ended() == 0
    assert not alive(server)


def _ignores(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(ignored, 16) >> (number - 1) & 1)


def test_quit_and_a_server_that_will_not_go(bench: Bench) -> None:
    """`quit -t` never ends when the server ignores SIGINT: nothing stronger is sent to it."""
    bench.put_server(STUBBORN)
    server = bench.start_server()
    wait_until(lambda: _ignores(server, signal.SIGINT), what="the server to ignore SIGINT")
    bench.hanging_front_end("quit -t 0")
    assert alive(server)
    assert bench.daemon.poll() is None
    os.kill(server, signal.SIGKILL)
    assert bench.ended() == 0


def _has_executed(server: int) -> bool:
    found = look_at(server)
    return found is not None and "-f" not in found.command.split()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_orphans(bench: Bench, number: signal.Signals) -> None:
    """The servers of a killed daemon live on, and the next daemon does not know them."""
    bench.put_server(WEDGED)
    server = bench.start_server()
    # Between fork and exec it is still the daemon's copy, and holds the daemon's lock: a new daemon would not start.
    wait_until(lambda: _has_executed(server), what="the server to be a program of its own")
    bench.daemon.send_signal(number)
    bench.ended()
    assert alive(server)
    bench.start()
    assert bench.front_end("get_server_list") == Said(0, [], "")
    assert alive(server)
