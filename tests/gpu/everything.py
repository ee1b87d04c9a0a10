"""All measurements on a GPU, in one command, on a machine with only Python and NVIDIA's driver.

    python3 tests/gpu/everything.py --fetch wheels [--python 3.12]   where there is a network: what that machine needs
    python3 tests/gpu/everything.py --wheels wheels --logs logs.tar.gz   there, as root, in a checkout of mpsd

It needs no pip, no network and no CUDA toolkit there: wheels are archives, and are unpacked into a virtual environment,
in which mpsd is found as if it were installed. The parts are a look at the machine, the tests of a real GPU, the
report, the questions, and last of all the signals in mid-kernel: ten minutes at most, and half of that if nothing
hangs. A part that takes too long is asked to end (SIGINT), so that it says what it has, and then ended; its time is its
own, and what it leaves is the next one's. Nothing that a part started outlives it. The status is 0 when all parts ran
and no test failed.

With --logs, what each part printed, and all logs of control daemons, servers and mpsd, come back as one archive, which
is written anew after each part. With --carried, NVIDIA's unpacked nvidia-cuda-mps is used where the driver has no
control program, and every result says so. With --simulated, everything runs on a simulated GPU, quickly, and every
result says so.
"""

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
import site
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import tomllib
import venv
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Final

ROOT: Final = Path(__file__).resolve().parents[2]

CONTROL: Final = "nvidia-cuda-mps-control"
SERVER: Final = "nvidia-cuda-mps-server"

PROGRAMS: Final = (
    "/usr/local/nvidia/bin",
    "/usr/local/nvidia/sbin",
    "/opt/nvidia/bin",
    "/driver-root/usr/bin",
    "/driver-root/usr/sbin",
    "/usr/sbin",
)
LIBRARIES: Final = ("/usr/local/nvidia/lib64", "/opt/nvidia/lib64", "/driver-root/usr/lib64")
"""Directories of the driver's programs and libraries in containers and cloud images, beside the usual ones."""

PLUGINS: Final = ("xdist.plugin", "pytest_timeout", "_hypothesis_pytestplugin")
"""The plugins of pytest that the tests need; those that the machine's Python has besides could break them."""

PYTEST: Final = ("-m", "pytest", *(f"-p{each}" for each in PLUGINS), "-q", "-n", "0", "-p", "no:cacheprovider")
REAL: Final = (*PYTEST, "-m", "gpu", "tests/gpu")
SIMULATED: Final = (*PYTEST, "-k", "simulated", "tests/gpu/test_gpu.py")

PARTS: Final = (
    ("a look at the machine", ("-m", "tests.gpu.preflight"), 60),
    ("the tests of a real GPU", REAL, 120),
    ("the report", ("-m", "tests.gpu.report"), 130),
    ("what NVIDIA does not document", ("-m", "tests.gpu.questions"), 140),
    ("signals in mid-kernel", ("-m", "tests.gpu.questions", "--kills"), 90),
)
"""The programs to run, as arguments of Python, with the seconds for each; the most dangerous one is the last."""

_PR_SET_CHILD_SUBREAPER: Final = 36
"""From linux/prctl.h: processes whose parents are gone become children of this one."""

_GRACE: Final = 20.0
"""Seconds that a part has after SIGINT, to end its node and keep the logs."""

_LEAVE: Final = 15.0
"""Seconds for the processes of a part to be gone after SIGKILL; one in the driver's code may never be."""

_GVISOR: Final = "4.4.0"
"""The kernel release that gVisor shows."""


def requirements() -> list[str]:
    """Return the requirements of mpsd and these tests, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tests = project["optional-dependencies"]["test"]
    return [*project["dependencies"], *(each for each in tests if each.startswith(("pytest", "hypothesis")))]


def fetch(directory: Path, python: str | None) -> int:
    """Download the wheels for a machine with this version of Python, by default the local one."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", str(directory)]
    command += ["--python-version", python] if python else []
    status = subprocess.run([*command, *requirements()], check=False).returncode
    if status == 0:
        print(f"{directory} has {len(list(directory.glob('*.whl')))} wheels: take it to the machine with the GPU")
    return status


# -- the machine -------------------------------------------------------------------------------------------------------


def impossible(release: str) -> Iterator[str]:
    """Yield each reason why nothing can be tried here, on a kernel of this release."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this is where that is said
        yield f"Python 3.11 or newer: this is {sys.version.split()[0]}"
    if os.geteuid() != 0:
        yield "root: the tests start control daemons and clients of several users"
    if release == _GVISOR:
        yield f"a Linux kernel: {release} is gVisor's, and NVIDIA's server cannot start there; take another machine"


def foreign(wheels: Path) -> Iterator[str]:
    """Yield what to do if these wheels are for another Python."""
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    tags = [each.stem.split("-")[-3:-1] for each in wheels.glob("*.whl")]
    if any(python.startswith("cp3") and python != own and abi != "abi3" for python, abi in tags):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        yield f"wheels for Python {version}: those in {wheels} are for another one (--fetch DIR --python {version})"


def lacking(environment: dict[str, str]) -> Iterator[str]:
    """Yield everything of the driver that this machine lacks."""
    if shutil.which(CONTROL, path=environment["PATH"]) is None:
        yield f"{CONTROL} in PATH: it comes with NVIDIA's driver, or as a package of its own (--carried)"
    if shutil.which(SERVER, path=environment["PATH"]) is None:
        yield f"{SERVER} in PATH: a control daemon starts it for the first client"
    for library in ("libcuda.so.1", "libnvidia-ml.so.1"):
        if _loaded(library, environment) is None:
            yield f"{library}: it comes with NVIDIA's driver"


def _loaded(library: str, environment: dict[str, str]) -> ctypes.CDLL | None:
    for place in (*(Path(each, library) for each in environment["LD_LIBRARY_PATH"].split(":") if each), library):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(place))
    return None


def hold_open(environment: dict[str, str]) -> None:
    """Keep the GPUs initialised until this program ends.

    Without persistence mode, the driver drops a GPU after its last client, and takes seconds to set it up for the next.
    """
    nvml = _loaded("libnvidia-ml.so.1", environment)
    with contextlib.suppress(AttributeError):
        count = ctypes.c_uint()
        if nvml is None or nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return
        for index in range(count.value):
            nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(ctypes.c_void_p()))


def carry(directory: Path, environment: dict[str, str]) -> None:
    """Use the control program and the server in this directory, if the driver has no control program."""
    if shutil.which(CONTROL, path=environment["PATH"]) is None:
        places = (directory / each for each in (".", "usr/bin", "usr/sbin"))
        environment["PATH"] = ":".join([environment["PATH"], *(str(each.resolve()) for each in places)])
        environment["MPSD_GPU_CARRIED"] = directory.resolve().name


def copy_checkout(directory: Path) -> None:
    """Copy the modules to where every user can read them: some clients are other users', and a checkout may be root's.

    So nothing is written to the checkout, either.
    """
    for source in (ROOT / "pyproject.toml", *ROOT.glob("mpsd/**/*"), *ROOT.glob("tests/**/*")):
        if source.is_file() and "__pycache__" not in source.parts:
            copy = directory / source.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)


def make_python(directory: Path, wheels: Path, checkout: Path = ROOT) -> Path:
    """Make a virtual environment with the wheels and a checkout, and return its Python.

    The modules of the running Python come last. mpsd starts its canary with `python -I`, which ignores PYTHONPATH.
    """
    venv.create(directory, symlinks=True)
    # Its home is where Python's own modules are: a link to a Python elsewhere, as uv makes, does not lead there.
    (directory / "pyvenv.cfg").write_text(
        f"home = {sys.base_exec_prefix}/bin\ninclude-system-site-packages = false\n", encoding="utf-8"
    )
    packages = next(directory.glob("lib/python3*/site-packages"))
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(packages)  # noqa: S202 - of a zip file, which cannot leave the directory
    others = (f"import site; site.addsitedir({each!r})" for each in site.getsitepackages())
    (packages / "checkout.pth").write_text("\n".join([str(checkout), *others, ""]), encoding="utf-8")
    return directory / "bin" / "python3"


# -- the parts ---------------------------------------------------------------------------------------------------------


def run(wheels: Path, *, logs: Path | None = None, carried: Path | None = None, simulated: bool = False) -> int:
    inherited = os.environ.get("LD_LIBRARY_PATH", "")
    environment = {
        **os.environ,
        "PATH": ":".join([os.environ.get("PATH", os.defpath), *PROGRAMS]),
        "LD_LIBRARY_PATH": ":".join(filter(None, [inherited, *LIBRARIES])),
        "MPSD_REQUIRE_GPU": "" if simulated else "1",
        "MPSD_GPU_SIMULATED": "1" if simulated else "",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if reasons := [*impossible(os.uname().release), *foreign(wheels)]:
        print("This machine lacks:", *reasons, sep="\n- ")
        return 1
    if carried is not None:
        carry(carried, environment)
    hold_open(environment)
    begin, failed = time.monotonic(), list[str]()
    os.umask(0o022)
    place = Path(tempfile.mkdtemp(prefix="mg-"))
    place.chmod(0o755)  # clients of other users import from it
    kept, work, checkout = place / "logs", place / "tmp", place / "checkout"
    for each in (kept, work):
        each.mkdir()
    work.chmod(0o711)
    # Nothing is compiled twice.
    environment |= {"TMPDIR": str(work), "MPSD_GPU_LOGS": str(kept), "PYTHONPYCACHEPREFIX": str(place / "compiled")}
    try:
        copy_checkout(checkout)
        python = str(make_python(place / "venv", wheels, checkout))
        until = begin
        for number, (what, arguments, seconds) in enumerate(PARTS):
            until += seconds
            name = f"{what}{' (simulated)' if simulated else ''}"
            print(f"\n--- {name}, {until - time.monotonic():.0f} s at most", flush=True)
            command = [python, *(SIMULATED if simulated and arguments == REAL else arguments)]
            with (kept / f"{number}-{what.replace(' ', '-')}.txt").open("wb") as copy:
                wrong = run_part(command, environment, until - time.monotonic(), copy, checkout)
            failed += [f"{name}: {wrong}"] if wrong else []
            keep_rest(work, kept / f"{number}-left-behind")
            if logs is not None:
                archive(kept, logs)
            if number == 0 and not simulated and (missing := list(lacking(environment))):
                print("This machine lacks:", *missing, sep="\n- ")
                return 1
    finally:
        shutil.rmtree(place)
    print(f"\n--- {time.monotonic() - begin:.0f} s;", "; ".join(failed) or "all of it ran, and no test failed")
    return 1 if failed else 0


def run_part(
    command: Sequence[str], environment: dict[str, str], seconds: float, copy: IO[bytes], place: Path = ROOT
) -> str:
    """Run a program there for this long at most, end everything that it started, and return what is wrong, if anything.

    Its output is printed, and copied. A control daemon has a session of its own, and its server may have one too: they
    are found as descendants.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    program = subprocess.Popen(command, cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert program.stdout is not None
    printer = threading.Thread(target=_print, args=(program.stdout, copy), daemon=True)
    printer.start()
    wrong = ""
    try:
        status = program.wait(max(seconds, 0))
        wrong = f"status {status}" if status else ""
    except subprocess.TimeoutExpired:
        wrong = f"not done after {seconds:.0f} s"
        program.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(_GRACE)
    finally:
        program.kill()
        program.wait()
        left = end_descendants()
        printer.join(1)  # a process that cannot be ended may hold the pipe open
    return f"{wrong or 'done'}, and these processes cannot be ended: {left}" if left else wrong


def _print(source: IO[bytes], copy: IO[bytes]) -> None:
    for line in source:
        copy.write(line)
        copy.flush()
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


def end_descendants() -> list[int]:
    """End all processes below this one, and return those that cannot be ended."""
    deadline = time.monotonic() + _LEAVE
    while left := [*descendants(os.getpid())]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > deadline:
            return left
        time.sleep(0.05)
    return []


def descendants(ancestor: int) -> Iterator[int]:
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


# -- the logs ----------------------------------------------------------------------------------------------------------


def keep_rest(work: Path, there: Path) -> None:
    """Keep the logs of a part that was ended by force, and remove what it left."""
    for path in work.rglob("*"):
        if path.is_file() and (path.name in {"out", "mpsd.stderr"} or ".log" in path.name):
            copy = there / path.relative_to(work)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    for path in work.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def archive(kept: Path, logs: Path) -> None:
    new = logs.with_name(f"{logs.name}.new")
    with tarfile.open(new, "w:gz") as tar:
        tar.add(kept, "logs")
    new.rename(logs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fetch", type=Path, metavar="DIR", help="download what is needed, and do nothing else")
    parser.add_argument("--python", metavar="VERSION", help="of the machine that it is for, such as 3.12")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="what --fetch downloaded")
    parser.add_argument("--logs", type=Path, metavar="FILE", help="a new archive for all output and all logs (.tar.gz)")
    parser.add_argument("--carried", type=Path, metavar="DIR", help="nvidia-cuda-mps, if the driver has none")
    parser.add_argument("--simulated", action="store_true", help="try this program on a simulated GPU")
    given = parser.parse_args()
    if given.fetch is not None:
        return fetch(given.fetch, given.python)
    if given.wheels is None or not list(given.wheels.glob("*.whl")):
        parser.error("--wheels DIR has to name a directory with what --fetch downloaded")
    # The parts inherit it: `nohup`, or an `&`, ignores SIGINT, which is how they are asked to end.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    return run(given.wheels, logs=given.logs, carried=given.carried, simulated=given.simulated)


if __name__ == "__main__":
    sys.exit(main())
