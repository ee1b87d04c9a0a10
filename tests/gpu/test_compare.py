"""`python -m tests.gpu.compare` on a simulated GPU: every part of it runs, and whatever fails is a row."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.gpu import machine
from tests.gpu.compare import PARTS, Part, compared
from tests.gpu.comparing import interrupts
from tests.gpu.comparing.rows import HEAD, Row
from tests.gpu.comparing.site import Mode, Site, Timer, Wanted, WrongError, opened
from tests.harness import wait_until

pytestmark = pytest.mark.thorough

_ROOT: Final = Path(__file__).parents[2]
COMMAND: Final = [sys.executable, "-m", "tests.gpu.compare"]

WHATS: Final = {
    "throughput": "two clients of 50 %: mpsd / bare MPS",
    "latency": "launch to end of a kernel, p99.9: mpsd / bare MPS",
    "start": "start to first context: mpsctl run, more than bare MPS",
    "churn": "churn: clients with what their leases say",
    "ends": "ends in mid-kernel",
}
"""A row of each part."""


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Have this process, and programs with the returned environment, use a simulated GPU."""
    monkeypatch.setenv(machine.SIMULATED, "1")
    return {**os.environ}


@pytest.fixture
def signals() -> Iterator[None]:
    """Have this process take signals as the program does."""
    before = {number: signal.getsignal(number) for number in interrupts.SIGNALS}
    interrupts.install()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.measuring
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", PARTS)
def test_each_part(tmp_path: Path, simulated: dict[str, str], name: str) -> None:
    """A part has its rows, none of them failed, and each says that it is simulated; so does the JSON."""
    file = tmp_path / "rows.json"
    done = subprocess.run(
        [*COMMAND, "--seconds", "8", "--json", file, name],
        env=simulated,
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[:2]) == (0, HEAD.splitlines()), f"{done.stdout}{done.stderr}"
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]
    assert all(len(row) == 4 and row[1].endswith(" (simulated)") for row in rows), done.stdout
    assert {"GPU", WHATS[name]} <= {row[0].replace(", not pinned", "") for row in rows}, done.stdout
    told = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [each["what"] for each in told] == [row[0] for row in rows]
    if name == "throughput":
        first = next(each for each in told if each["what"] == WHATS[name])
        assert [len(values) for values in first["values"].values()] == [first["estimate"]["n"]] * 2 == [16, 16]


@pytest.mark.measuring
@pytest.mark.timeout(120)
def test_interrupted(tmp_path: Path, simulated: dict[str, str]) -> None:
    """SIGINT to all of it, as from a terminal, and twice, ends it with its clients, daemons and files."""
    file = tmp_path / "rows.json"
    program = subprocess.Popen(
        [*COMMAND, "--json", file, "ends"], env=simulated, cwd=_ROOT, stdout=subprocess.PIPE, start_new_session=True
    )
    with program:
        wait_until(lambda: _clients_of(program.pid), what="clients", deadline=30)
        # Clients end before these do, so a signal of the terminal must not reach them.
        assert not [each for each in _in_session(program.pid).values() if b"\0run\0--root" in each or b"\0-f" in each]
        for _ in range(2):
            os.killpg(program.pid, signal.SIGINT)
        assert program.wait(50) == 130
    assert next(row["what"] for row in json.loads(file.read_text(encoding="utf-8"))["rows"]) == "GPU"


def _in_session(session: int) -> dict[int, bytes]:
    """Return the processes of a session, with their command lines."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(path.name)) == session:
                found[int(path.name)] = (path / "cmdline").read_bytes()
    return found


def _clients_of(session: int) -> list[int]:
    """Return the clients of a session that have begun, and so ignore SIGINT."""
    found = []
    for pid, command in _in_session(session).items():
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
            ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
            if b"tests.gpu.client" in command and ignored >> (signal.SIGINT - 1) & 1:
                found.append(pid)
    return found


@pytest.mark.usefixtures("simulated", "signals")
def test_a_part_that_fails(short_tmp: Path) -> None:
    """A part that fails, one that never ends, and one without any time are rows; the other ones are measured."""

    def broken(_site: Site, _timer: Timer) -> Iterator[Row]:
        yield Row("the first row", "1")
        raise KeyError("what is missing")

    def endless(_site: Site, _timer: Timer) -> Iterator[Row]:
        threading.Event().wait()
        yield Row("never", "1")

    def fine(_site: Site, _timer: Timer) -> Iterator[Row]:
        yield Row("the last row", "1")

    parts = {"broken": Part(broken, 1, ""), "endless": Part(endless, 0.1, ""), "late": Part(fine, 0, "")}
    parts["fine"] = Part(fine, 1, "")
    rows = [*compared(short_tmp, parts, Timer(30), grace=0.2)]
    whats = [row.what.partition(",")[0] for row in rows[2:7]]
    assert whats == ["the first row", "broken", "endless", "late", "the last row"]
    assert [row.failed for row in rows[2:7]] == [False, True, True, True, False]
    for row, text in zip(rows[3:6], ("what is missing", "OverdueError", "left out"), strict=True):
        assert text in row.result


@pytest.mark.enforcement
@pytest.mark.usefixtures("simulated")
def test_a_client_that_misses_mps(short_tmp: Path) -> None:
    """A client is measured where it should be: one that fell out of MPS, silently, is found before it works."""
    with opened(short_tmp, "") as site:
        lost = Site(site.node, {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"})
        with pytest.raises(WrongError, match="bare MPS is OUTSIDE MPS"), lost.clients([Wanted(Mode.BARE)], 1024):
            pass
        with site.clients([Wanted(Mode.BARE, 50), Wanted(Mode.MPSD, 50), Wanted(Mode.OUTSIDE)], 1024) as workers:
            assert [each.checked()["multiprocessors"] for each in workers] == [66, 66, 132]
            assert [each.checked()["mps"] for each in workers] == [True, True, False]
            assert [each.perform("busy 0.05")["rate"] > 0 for each in workers] == [True] * 3
            with pytest.raises(WrongError, match="CUDA_ERROR_OUT_OF_MEMORY"):
                workers[0].perform("alloc 2GiB")
        with site.clients([Wanted(Mode.MPSD, 50)], 1024) as (worker,):
            worker.tell("busy 0.5")
        assert worker.process.returncode == 0, "it was ended in mid-kernel"
        with pytest.raises(WrongError, match=r"mpsctl: .* memory"), site.clients([Wanted(Mode.MPSD, 50)], 1 << 20):
            pass
