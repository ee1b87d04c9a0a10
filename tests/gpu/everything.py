"""All measurements on a GPU, in one command, on a machine with only Python and NVIDIA's driver.

    python3 tests/gpu/everything.py --fetch wheels [--python 3.12]   where there is a network: what that machine needs
    python3 tests/gpu/everything.py --wheels wheels                  there, as root, in a checkout of mpsd

It needs no pip, no network and no CUDA toolkit there: wheels are archives, and are unpacked. It lists what the machine
lacks; runs the questions, the tests of a real GPU and the report, 7.5 minutes for all; and prints their tables for
docs/gpu.md. A part that ends early leaves its time to the next. Nothing that a part started outlives it. The status is
0 when all parts ran and no test failed.
"""

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]

PROGRAMS: Final = ("/usr/local/nvidia/bin", "/opt/nvidia/bin", "/driver-root/usr/bin")
LIBRARIES: Final = ("/usr/local/nvidia/lib64", "/opt/nvidia/lib64", "/driver-root/usr/lib64")
"""Directories of the driver's programs and libraries in containers and cloud images, beside the usual ones."""

PARTS: Final = (
    ("what NVIDIA does not document", ("-m", "tests.gpu.questions"), 200),
    (
        "the tests of a real GPU",
        ("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"),
        140,
    ),
    ("the report", ("-m", "tests.gpu.report"), 110),
)
"""The programs to run, as arguments of Python, with the seconds for each; the unknown comes first."""

_PR_SET_CHILD_SUBREAPER: Final = 36
"""From linux/prctl.h: processes whose parents are gone become children of this one."""

_LEAVE: Final = 15.0
"""Seconds for the processes of a part to be gone after SIGKILL; one in the driver's code may never be."""


def requirements() -> list[str]:
    """Return the requirements of mpsd and these tests, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tests = project["optional-dependencies"]["test"]
    return [*project["dependencies"], *(each for each in tests if each.startswith("pytest"))]


def fetch(directory: Path, python: str | None) -> int:
    """Download the wheels for a machine with this version of Python, by default the local one."""
    which = ["--python-version", python] if python else []
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--only-binary=:all:",
        *which,
        "--dest",
        str(directory),
    ]
    return subprocess.run([*command, *requirements()], check=False).returncode


def lacking(environment: dict[str, str]) -> Iterator[str]:
    """Yield everything that this machine lacks."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this is where that is said
        yield f"Python 3.11 or newer: this is {sys.version.split()[0]}"
    if os.geteuid() != 0:
        yield "root: the tests start control daemons and clients of several users"
    if shutil.which("nvidia-cuda-mps-control", path=environment["PATH"]) is None:
        yield "nvidia-cuda-mps-control in PATH: it comes with NVIDIA's driver, or as a package of its own"
    if shutil.which("nvidia-cuda-mps-server", path=environment["PATH"]) is None:
        yield "nvidia-cuda-mps-server in PATH: a control daemon starts it for the first client"
    for library in ("libcuda.so.1", "libnvidia-ml.so.1"):
        places = [*(Path(each, library) for each in environment["LD_LIBRARY_PATH"].split(":") if each), library]
        if not any(_loads(each) for each in places):
            yield f"{library}: it comes with NVIDIA's driver"


def _loads(library: Path | str) -> bool:
    try:
        ctypes.CDLL(str(library))
    except OSError:
        return False
    return True


def run(wheels: Path) -> int:
    """Unpack the wheels, and run all parts."""
    inherited = os.environ.get("LD_LIBRARY_PATH", "")
    environment = {
        **os.environ,
        "PATH": ":".join([os.environ.get("PATH", os.defpath), *PROGRAMS]),
        "LD_LIBRARY_PATH": ":".join(filter(None, [inherited, *LIBRARIES])),
        "MPSD_REQUIRE_GPU": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if missing := list(lacking(environment)):
        print("This machine lacks:", *missing, sep="\n- ")
        return 1
    site = Path(tempfile.mkdtemp(prefix="mpsd-site-", dir="/tmp"))
    site.chmod(0o755)  # clients of other users import from it
    begin, failed = time.monotonic(), list[str]()
    try:
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
        environment["PYTHONPATH"] = f"{ROOT}:{site}"
        until = begin
        for what, arguments, seconds in PARTS:
            until += seconds
            print(f"\n--- {what}, {until - time.monotonic():.0f} s at most", flush=True)
            wrong = run_part([sys.executable, *arguments], environment, until - time.monotonic())
            failed += [f"{what}: {wrong}"] if wrong else []
    finally:
        shutil.rmtree(site)
    print(f"\n--- {time.monotonic() - begin:.0f} s;", "; ".join(failed) or "all of it ran, and no test failed")
    return 1 if failed else 0


def run_part(command: Sequence[str], environment: dict[str, str], seconds: float) -> str:
    """Run a program for this long at most, end everything that it started, and return what is wrong, if anything.

    A control daemon has a session of its own, and its server may have one too: they are found as descendants.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    program = subprocess.Popen(command, cwd=ROOT, env=environment)
    wrong = ""
    try:
        status = program.wait(seconds)
        wrong = f"status {status}" if status else ""
    except subprocess.TimeoutExpired:
        wrong = f"not done after {seconds:.0f} s"
    program.kill()
    program.wait()
    deadline = time.monotonic() + _LEAVE
    while left := [*descendants(os.getpid())]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > deadline:
            return f"{wrong or 'done'}, and these processes cannot be ended: {left}"
        time.sleep(0.05)
    return wrong


def descendants(ancestor: int) -> Iterator[int]:
    """Yield the pids of all processes below this one."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # The second field is the name of the program, in parentheses, and the fourth is the parent.
            parent = stat.read_bytes().rpartition(b")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    below = [ancestor]
    while below:
        found = children.get(below.pop(), [])
        below += found
        yield from found


def main() -> int:
    """Carry out the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fetch", type=Path, metavar="DIR", help="download what is needed, and do nothing else")
    parser.add_argument("--python", metavar="VERSION", help="of the machine that it is for, such as 3.12")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="what --fetch downloaded")
    given = parser.parse_args()
    if given.fetch is not None:
        return fetch(given.fetch, given.python)
    if given.wheels is None or not list(given.wheels.glob("*.whl")):
        parser.error("--wheels DIR has to name a directory with what --fetch downloaded")
    return run(given.wheels)


if __name__ == "__main__":
    sys.exit(main())
