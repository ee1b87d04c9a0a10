"""Another kernel, whose control groups are of version 2 alone, for tests that this machine's own do not allow.

It is user-mode Linux: a kernel that runs as a process, without virtualization, from the root file system of a newer
Debian (tests/slurm/building.py). It shows the files of this machine, and keeps in memory what is written to them. It
has one processor, no network and no cpuset, and starts processes about four times as slowly as the machine (measured
on its 7.2; 6.1, of Debian 12, takes ten times as long as that).

`python -m tests.slurm.kernel tests/slurm/test_jobs.py` runs tests there, with any options of pytest.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.slurm import building

_FIRST: Final = Path(__file__).with_name("first_process.py")

_ROOT: Final = Path(__file__).parents[2]

_MEMORY: Final = "2G"

_START: Final = """\
set -e
mount --rbind / "$0/mnt"; mount -t tmpfs -o size=3G,mode=1777 tmpfs "$0/tmp"; mount -t proc proc "$0/proc"
chroot "$0" "$@"
"""


class Done(NamedTuple):
    """A command that ran under the other kernel."""

    status: int | None
    """None where the kernel did not start, and -1 where it ended before the command, or did not end in time."""
    output: str
    """Of the command, or of the kernel."""


def tests(folder: Path, *options: str, deadline: float) -> Done:
    """Run pytest with these options as root under the kernel, at most for `deadline` seconds.

    An empty folder of the caller is for what it writes.
    """
    names = ("PATH", "HOME", "LANG", *(each for each in os.environ if each.startswith("MPSD_")))
    return _run(
        folder,
        [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-o", "timeout=150", *options],
        {each: os.environ[each] for each in names if each in os.environ},
        deadline,
    )


def _run(folder: Path, command: Sequence[str], environment: Mapping[str, str], deadline: float) -> Done:
    root = building.found("forky")
    task = {"command": command, "directory": str(_ROOT), "environment": environment}
    task["modules"] = [_module(root, each) for each in building.MODULES]
    (folder / "task").write_text(json.dumps(task))
    with (folder / "console").open("wb") as console, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [
                # Its processes are killed with the first one of their namespace, however the test ends.
                "unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private",
                "bash", "-c", _START, str(root), "/usr/bin/linux.uml", f"mem={_MEMORY}", "seccomp=auto", "loglevel=3",
                "panic=-1", "con=null", "con0=null,fd:1", "rootfstype=hostfs", "rootflags=/mnt", "ro",
                f"init={sys.executable}", "--", "-I", "-S", str(_FIRST), str(folder), "/mnt",
            ],
            stdin=subprocess.DEVNULL, stdout=console, stderr=console, timeout=deadline, check=False,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/tmp"},  # the kernel keeps files in its home
        )  # fmt: skip
    found = {each: folder / each for each in ("output", "status") if (folder / each).exists()}
    if "output" not in found:
        return Done(None, (folder / "console").read_text(errors="replace"))
    status = int(found["status"].read_text()) if "status" in found else -1
    return Done(status, found["output"].read_text(errors="replace"))


def _module(root: Path, name: str) -> str:
    (found,) = (root / "usr" / "lib" / "uml" / "modules").rglob(f"{name}.ko")
    return str(found)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        done = tests(Path(made), *sys.argv[1:], deadline=3600)
    sys.stdout.write(done.output)
    sys.exit(1 if done.status is None else done.status)
