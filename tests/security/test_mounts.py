"""File systems that a holder mounts in its own user namespace: mpsd sends them no request, and never waits.

FUSE by itself refuses root. With overlayfs above it, the kernel asks FUSE in the name of the mounting user, and a
process that looks at such a path waits until that user answers; not even SIGKILL ends the wait.
"""

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from tests.daemon.caller import calling, needs_root
from tests.daemon.conftest import Start
from tests.node import Answer, Node
from tests.tools import lacking

pytestmark = needs_root

EVE: Final = 61301

SMALL: Final[dict[str, Any]] = {"threads": 1, "memory": "1GiB"}

MOUNTS: Final = """
import ctypes, json, os, socket, struct, sys, threading
device, work, where, uid = {device!r}, {work!r}, {where!r}, {uid}
libc = ctypes.CDLL(None, use_errno=True)
def need(failed):
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def mount(kind, target, flags=0, data=b""):
    need(libc.mount(b"none", target.encode(), kind, flags, data))
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
need(libc.prctl(4, 1, 0, 0, 0))  # PR_SET_DUMPABLE: /proc/self is its own again
need(libc.unshare(0x10000000 | 0x00020000))  # CLONE_NEWUSER | CLONE_NEWNS
for name, value in (("setgroups", "deny"), ("uid_map", f"0 {{uid}} 1"), ("gid_map", f"0 {{uid}} 1")):
    with open(f"/proc/self/{{name}}", "w") as file:
        file.write(value)
mount(None, "/", 0x4000 | 0x40000)  # MS_REC | MS_PRIVATE
mount(b"tmpfs", work)
for name in ("slow", "upper", "both"):
    os.mkdir(f"{{work}}/{{name}}")
fuse = os.open(device, os.O_RDWR)
mount(b"fuse", f"{{work}}/slow", 0, f"fd={{fuse}},rootmode=40000,user_id=0,group_id=0,allow_other".encode())
silent = threading.Event()
def serve():
    def answer(unique, data=b"", error=0):
        os.write(fuse, struct.pack("<IiQ", 16 + len(data), -error, unique) + data)
    def attributes(node):
        return struct.pack("<6Q10I", node, *[0] * 8, 0o40755, 2, 0, 0, 0, 4096, 0)
    while True:
        asked = os.read(fuse, 1 << 20)
        _, operation, unique, node = struct.unpack_from("<IIQQ", asked)
        if operation in (2, 36, 42) or silent.is_set():  # FORGET, INTERRUPT and the like have no answer
            continue
        if operation == 26:  # INIT
            answer(unique, struct.pack("<4I2H2I2H8I", 7, 31, 0, 0, 12, 9, 131072, 1, 32, *[0] * 9))
        elif operation == 1:  # LOOKUP: everything is a directory
            answer(unique, struct.pack("<4Q2I", 2, *[0] * 5) + attributes(2))
        elif operation == 3:  # GETATTR
            answer(unique, struct.pack("<QII", 0, 0, 0) + attributes(node))
        elif operation == 17:  # STATFS
            answer(unique, bytes(80))
        elif operation in (18, 25, 29):  # RELEASE, FLUSH, RELEASEDIR
            answer(unique)
        else:
            answer(unique, error=38)  # ENOSYS
threading.Thread(target=serve, daemon=True).start()
mount(b"overlay", where or f"{{work}}/both", 0, f"lowerdir={{work}}/slow:{{work}}/upper,userxattr".encode())
{then}
silent.set()
"""


def script(tmp: Path, *, where: Path | None, then: str = "") -> str:
    """Return a script that mounts a file system that never answers, as an ordinary user."""
    device, work = tmp / "fuse", tmp / "work"
    os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(10, 229))  # as /dev/fuse is on systems where users may mount
    device.chmod(0o666)
    work.mkdir()
    try:
        device.read_bytes()
    except PermissionError:  # the process has no file system yet
        pass
    except OSError as error:
        lacking(f"FUSE cannot be had here: {error}")
    return MOUNTS.format(device=str(device), work=str(work), where=str(where or ""), uid=EVE, then=then)


def asked(node: Node, tmp: Path, *, where: Path | None, then: str = "") -> Answer:
    """Request a lease from a process that has mounted a file system that never answers; return the answer."""
    before = script(tmp, where=where, then=then)
    with ThreadPoolExecutor(1) as pool, calling("mpsd.sock", cwd=node.socket.parent, before=before) as caller:
        answer = pool.submit(caller.admit, **SMALL)
        # Before waiting for it: with a defect, mpsd would answer no caller.
        assert node.get("/healthz").status == 200
        return answer.result(timeout=30)


@pytest.mark.parametrize("over", ["pipe directories", "root"])
def test_file_system_that_never_answers(make_node: Start, short_tmp: Path, over: str) -> None:
    """A holder's file system that never answers, over the pipe directories or as its root, delays no caller."""
    node = make_node(control=None).start()
    if over == "root":
        answer = asked(node, short_tmp, where=None, then="os.chroot(work + '/both')")
    else:
        answer = asked(node, short_tmp, where=node.root / "run" / "mps")
    assert (answer.status, answer.json["limit"]) == (403, "pipe_directory")
    assert node.get("/healthz").status == 200


def test_doctor(make_node: Start, short_tmp: Path) -> None:
    """`mpsctl doctor` touches neither the file systems of look-alikes nor a path that they name."""
    node = make_node(control=None, simulate=1).start()
    program = short_tmp / "nvidia-cuda-mps-server"
    program.write_text(f"{script(short_tmp, where=Path('/dev/shm'))}print(flush=True)\nsys.stdin.read()\n")
    with (
        subprocess.Popen(
            [sys.executable, program],
            env={"CUDA_MPS_PIPE_DIRECTORY": "/" + "x" * 300},  # no file name can be as long
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as stranger,
        ThreadPoolExecutor(1) as pool,
    ):
        try:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == b"\n"
            found = pool.submit(node.mpsctl, "doctor").result(timeout=45)
        finally:
            stranger.kill()
    assert "internal" not in found.stderr
    assert found.stderr == ""
    assert str(stranger.pid) in found.stdout
