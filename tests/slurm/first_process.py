"""The first process under another kernel (tests/slurm/kernel.py): it prepares files, runs a command, and powers off.

Its arguments are the folder with the command, in which it leaves output and status, and the path by which that kernel
calls the root directory of the machine that runs it.
"""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

_FINIT_MODULE: Final = 313
"""Source: asm/unistd_64.h."""

_POWER_OFF: Final = 0x4321FEDC
"""Source: linux/reboot.h."""

_NEW: Final = "/mnt/root"


def _mount(kind: str, place: str, options: str = "rw") -> None:
    Path(place).mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", kind, "-o", options, kind, place], check=True)


def main() -> None:
    """Run the command, whatever it takes, and end this kernel."""
    os.environ["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"
    folder, outside = Path(sys.argv[1]), sys.argv[2]
    task = json.loads((folder / "task").read_text())
    library = ctypes.CDLL(None, use_errno=True)
    for each in task["modules"]:
        with Path(each).open("rb") as module:
            if library.syscall(_FINIT_MODULE, module.fileno(), b"", 0):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), each)
    _mount("tmpfs", "/mnt", "size=1500M")
    for each in ("upper", "work"):
        Path("/mnt", each).mkdir()
    _mount("overlay", _NEW, "lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work")
    for kind, place in (("proc", "proc"), ("sysfs", "sys"), ("devtmpfs", "dev"), ("devpts", "dev/pts")):
        _mount(kind, f"{_NEW}/{place}")
    _mount("tmpfs", f"{_NEW}/dev/shm", "mode=1777")
    _mount("tmpfs", f"{_NEW}/run", "mode=755")
    _mount("cgroup2", f"{_NEW}/sys/fs/cgroup")
    Path(f"{_NEW}/sys/fs/cgroup/system.slice").mkdir()  # as systemd does; slurmd of 22.05 makes none
    _mount("hostfs", f"{_NEW}{folder}", f"{outside}{folder}")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    os.chroot(_NEW)
    os.chdir(task["directory"])
    with (folder / "output").open("wb") as output:
        child = os.posix_spawn(
            task["command"][0], task["command"], task["environment"],
            file_actions=[(os.POSIX_SPAWN_DUP2, output.fileno(), 1), (os.POSIX_SPAWN_DUP2, output.fileno(), 2)],
        )  # fmt: skip
        while (ended := os.wait())[0] != child:  # what others leave behind ends up here
            pass
    (folder / "status").write_text(str(os.waitstatus_to_exitcode(ended[1])))
    library.reboot(_POWER_OFF)


if __name__ == "__main__":
    main()
