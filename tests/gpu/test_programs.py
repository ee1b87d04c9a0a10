"""The programs that measure a real GPU, run without one: they run to their end, and say what is missing."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

import pytest

from tests.daemon.helpers import is_running
from tests.gpu import everything
from tests.gpu.everything import PARTS
from tests.real import real_daemons

pytestmark = pytest.mark.thorough

MIB: Final = 1 << 20
_ROOT: Final = Path(__file__).parents[2]


OUTSIDE: Final = "OUTSIDE MPS (get_client_list lacks it, attribute 133 is unknown): "


def rows(table: str) -> list[tuple[str, str]]:
    found = [tuple(line.strip("| ").split(" | ")) for line in table.splitlines() if line.startswith("| ")]
    assert all(len(row) == 2 for row in found), table
    return [(what, answer) for what, answer in found if what != "what"]


@pytest.mark.measuring
@pytest.mark.timeout(200)
@pytest.mark.real_daemon(535)
def test_questions(library: Path) -> None:
    """Every question has an answer by NVIDIA's own control daemon; clients without a server are OUTSIDE MPS."""
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(library),
        "FAKE_CUDA_MEMORY": str(300 * MIB),
        "PATH": f"{real_daemons()[535].parent}:{os.environ['PATH']}",
    }
    command = [sys.executable, "-m", "tests.gpu.questions", "--quick"]
    done = subprocess.run(
        command, env=environment, cwd=_ROOT, stdout=subprocess.PIPE, text=True, timeout=180, check=True
    )
    answers = rows(done.stdout)
    found = dict(answers)
    context = (
        "8 multiprocessors ran (CUDA says 8); 256 MiB, then CUDA_ERROR_OUT_OF_MEMORY (CUDA says 0.3 of 0.3 GiB free)"
    )
    assert found["opened, then closed: cuInit before, the context 5 s later"] == f"{OUTSIDE}{context}"
    assert found["part, since then: it is reset"] == f"{OUTSIDE}{context}"
    assert found["1 MiB: a context"] == f"{OUTSIDE}{context}; read back before: 100.0 1M"
    assert not [what for what, _ in answers if "could not be measured" in what]
    # Each result says so.
    assert not [what for what, answer in answers[1:] if "OUTSIDE MPS" not in answer]


def test_names_of_parts() -> None:
    """A program names its parts, and refuses others."""
    command = [sys.executable, "-m", "tests.gpu.questions"]
    told, refused = (
        subprocess.run([*command, each], cwd=_ROOT, capture_output=True, text=True, timeout=60, check=False)
        for each in ("--help", "nothing")
    )
    assert (told.returncode, told.stderr) == (0, "")
    assert "any of least, " in told.stdout
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "no part nothing: there are least, " in refused.stderr


_PART: Final = """
import os, sys, time
started = {started!r}
for _ in range(2):  # a daemon of a daemon, each in a session of its own
    if os.fork():
        {first}
        sys.exit(3)
    os.setsid()
open(started, "w").write(str(os.getpid()))
time.sleep(600)
"""

_RUN: Final = """
import sys
from tests.gpu import everything
everything._GRACE = 3.0
with open(sys.argv[2], "wb") as copy:
    print(everything.run_part([sys.executable, "-c", sys.argv[1]], {}, 3, copy))
print([*everything.descendants(everything.os.getpid())])
"""


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)", ["not done after 3 s"]),
        ("while not os.path.exists(started): pass", ["status 3"]),
        ("try: time.sleep(600)\n        except KeyboardInterrupt: print('so far')", ["so far", "not done after 3 s"]),
    ],
)
def test_nothing_outlives_a_part(tmp_path: Path, first: str, expected: list[str]) -> None:
    """The processes of a part end with it, its daemons too; one that takes too long is interrupted, and says so far."""
    started = tmp_path / "started"
    part = _PART.format(first=first, started=str(started))
    command = [sys.executable, "-c", _RUN, part, str(tmp_path / "copy")]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [*expected, "[]"]
    assert (tmp_path / "copy").read_text().splitlines() == expected[:-1]
    assert not is_running(int(started.read_text()))


def test_time_of_all_parts() -> None:
    """All parts, and the end of one that hangs, take less than ten minutes; signals in mid-kernel come last."""
    assert sum(seconds for _, _, seconds in PARTS) + everything._GRACE + everything._LEAVE < 590
    assert "--kills" in PARTS[-1][1]


def test_carried(tmp_path: Path) -> None:
    """A control program that was carried along is used only where the driver has none."""
    carried, own = tmp_path / "550.163.01", tmp_path / "own"
    for program in (carried / "usr/bin" / everything.CONTROL, own / everything.CONTROL):
        program.parent.mkdir(parents=True)
        program.touch(mode=0o755)
    without, with_one = {"PATH": "/nowhere"}, {"PATH": f"{own}"}
    everything.carry(carried, without)
    everything.carry(carried, with_one)
    assert without["MPSD_GPU_CARRIED"] == "550.163.01"
    assert shutil.which(everything.CONTROL, path=without["PATH"]) == str(carried / "usr/bin" / everything.CONTROL)
    assert with_one == {"PATH": f"{own}"}


def run_everything(
    place: Path, environment: dict[str, str], *options: str
) -> tuple["subprocess.CompletedProcess[str]", list[str]]:
    """Run all parts with one wheel, which is empty, and return the result and the names in the archive of logs."""
    wheels, logs = place / "wheels", place / "logs.tar.gz"
    wheels.mkdir()
    (wheels / "nothing-0-py3-none-any.whl").write_bytes(b"PK\5\6" + bytes(18))
    command = [sys.executable, str(_ROOT / "tests/gpu/everything.py"), "--wheels", str(wheels), "--logs", str(logs)]
    done = subprocess.run(
        [*command, *options], env=environment, capture_output=True, text=True, timeout=700, check=False
    )
    with tarfile.open(logs) as tar:
        return done, tar.getnames()


@pytest.mark.root("measure a GPU with tests/gpu/everything.py")
def test_what_a_machine_lacks(tmp_path: Path) -> None:
    """A machine that lacks something is looked at, and everything that it lacks is listed; nothing else is tried."""
    environment = {"PATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path), "TMPDIR": str(tmp_path)}
    done, archived = run_everything(tmp_path, environment)
    assert done.returncode == 1, done.stderr
    said = done.stdout[done.stdout.index("This machine lacks:") :].splitlines()
    for each in ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "libcuda.so.1", "libnvidia-ml.so.1"):
        assert any(line.startswith(f"- {each}") for line in said), each
    assert "| nvidia-cuda-mps-control | not in PATH |" in done.stdout
    assert [name for name in archived if name.endswith(".txt")] == ["logs/0-a-look-at-the-machine.txt"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["logs.tar.gz", "wheels"]


@pytest.mark.measuring
@pytest.mark.timeout(720)
def test_everything_on_a_simulated_gpu(tmp_path: Path, short_tmp: Path) -> None:
    """One command runs every part to its end, and its archive has the output and the logs of each."""
    short_tmp.chmod(0o711)  # some clients are other users'
    environment = {**os.environ, "TMPDIR": str(short_tmp)}
    del environment["PYTEST_CURRENT_TEST"]  # logs would be kept under this name
    done, names = run_everything(tmp_path, environment, "--simulated")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    headings = [line for line in done.stdout.splitlines() if line.startswith("--- ")]
    assert [each for each in headings if "(simulated)" in each] == headings[:-1]
    assert len(headings) == len(PARTS) + 1
    for what, answer in rows(done.stdout):
        assert answer.endswith(" (simulated)"), what
        assert "could not be" not in what, answer
        assert "OUTSIDE" not in answer, what
    found = {what: answer.removesuffix(" (simulated)") for what, answer in rows(done.stdout)}
    for what, beginning in EXPECTED.items():
        assert found[what].startswith(beginning), (what, found[what])
    for number in range(len(PARTS)):
        assert any(name.startswith(f"logs/{number}-") for name in names)
    for node in ("test_memory_ceiling", "fault", "bare-faults", "bare-ending-by-SIGTERM"):
        assert any(f"logs/{node}" in name and name.endswith("server.log") for name in names), names


EXPECTED: Final = {
    "30 % and 1044 MiB are set, and read back": "30.0 1G 30.0 1G",
    "a lease of 25 %": "0.242; 32 multiprocessors ran it, CUDA tells of 32",
    "verify --canary says": "gpu0: ok: canary ",
    "its honest neighbour": "works",
    "to another client of the GPU, in its work": "CUDA_ERROR_",
    "its client, in its work": "CUDA_ERROR_MPS_RPC_FAILURE",
    "0.1 % and 1 MiB: a context": "CUDA_ERROR_OUT_OF_MEMORY from cuCtxCreate_v2; read back before: 0.1 1M",
    "part: a successor that connects at once": "38 multiprocessors ran (CUDA says 38); 3904 MiB",
    "a forked child: cuInit, and a new context": "CUDA_ERROR_NOT_INITIALIZED and CUDA_ERROR_NOT_INITIALIZED",
    "a fatal fault: one that comes when only who caused it is gone": "CUDA_ERROR_MPS_SERVER_NOT_READY from cuInit",
    "a fatal fault: one that comes when both are gone": "works",
    "a stopped server: get_server_status": "no answer within 3 s",
    "SIGTERM of a client in mid-kernel: its neighbour, in its work": "CUDA_ERROR_ILLEGAL_ADDRESS",
}
"""The beginnings of some results of the simulated GPU."""
