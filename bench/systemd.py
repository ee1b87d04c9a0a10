"""mpsd under a real systemd, in a machine of tests/systemd: from boot to a lease, and a restart as callers see it."""

import json
import os
import shutil
import statistics
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from bench.side_by_side import Result, in_turn
from tests import systemd
from tests.harness import wait_until
from tests.systemd.building import HOME
from tests.systemd.machine import Machine
from tests.systemd.node import Service

_SUITE: Final = systemd.SUITES["trixie"]

_BOOTS: Final = 3
_RESTARTS: Final = 5

_FLOOR: Final = """\
import os, select, signal, socket
listener, (told, ends) = socket.socket(fileno=3), socket.socketpair()
ends.setblocking(False)
signal.set_wakeup_fd(ends.fileno())
signal.signal(signal.SIGTERM, lambda *_: None)
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
    manager.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"])
while told not in select.select([listener, told], [], [])[0]:
    caller, _ = listener.accept()
    caller.recv(1024)
    caller.sendall(b"HTTP/1.1 201 Created")
    caller.close()
"""
"""A minimal service in Python: it notifies that it is ready, and gives all callers the same answer."""

_FLOOR_UNITS: Final = {
    "floor.socket": "[Socket]\nListenStream=/run/floor.sock\n[Install]\nWantedBy=sockets.target\n",
    "floor.service": "[Unit]\nRequires=floor.socket\nAfter=floor.socket\nStartLimitIntervalSec=0\n"
    f"[Service]\nType=notify\nExecStart=/{HOME}/bin/python3 -I /usr/local/bin/floor.py\n"
    "[Install]\nWantedBy=multi-user.target\n",
}

_ASK: Final = """\
import json, socket, sys, threading, time
place, name, forever = sys.argv[1], sys.argv[2], len(sys.argv) > 3
body = b'{"threads": 1, "memory": "1MiB", "ttl": 1}'
head = "POST /v1/leases HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}", "", ""
request = "\\r\\n".join(head).encode() + body
over, longest = threading.Event(), 0.0
if forever:
    threading.Thread(target=lambda: (sys.stdin.read(), over.set())).start()
    print("begun", flush=True)
while True:
    before = time.monotonic()
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(place)
        caller.sendall(request)
        answer = caller.recv(65536)
        assert b"201 Created" in answer, answer
    longest = max(longest, time.monotonic() - before)
    if over.wait(0.01) or not forever:
        break
with open("/run/asked-" + name, "w") as file:
    file.write(json.dumps(longest if forever else time.monotonic()))
"""
"""A caller that requests a lease, once at boot or repeatedly; it records the time of the grant, or its longest wait."""

_PLACES: Final = {"mpsd": "/run/mpsd/mpsd.sock", "floor": "/run/floor.sock"}


def _caller(name: str) -> str:
    """Return a unit that requests once at boot, as soon as there is a socket."""
    return (
        f"[Unit]\nAfter={name}.socket\n[Service]\nType=oneshot\n"
        f"ExecStart=/{HOME}/bin/python3 -I /usr/local/bin/ask.py {_PLACES[name]} {name}\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )


def _prepared(root: Path) -> dict[str, Path]:
    """Install everything in a machine, and return the written files, for other boots."""
    kept = ("/usr/bin/mpsd", "/usr/bin/mpsctl", "/usr/local/bin", "/etc/systemd/system", f"/{HOME}/lib")
    with Machine(_SUITE, f"bench-{os.getpid()}-prepared", root) as machine:
        machine.install()
        machine.install_units()
        for unit in ("mpsd.socket", "mpsd.service"):
            machine.copy(machine.path(f"/usr/lib/systemd/system/{unit}"), f"/etc/systemd/system/{unit}")
        machine.write("/usr/local/bin/floor.py", _FLOOR)
        machine.write("/usr/local/bin/ask.py", _ASK)
        callers = {f"ask-{name}.service": _caller(name) for name in _PLACES}
        for unit, text in {**_FLOOR_UNITS, **callers}.items():
            machine.write(f"/etc/systemd/system/{unit}", text)
        Service(machine).start()
        machine.run("systemctl", "enable", *_FLOOR_UNITS, *callers)
        for path in kept:
            outside = root / path.lstrip("/")
            outside.parent.mkdir(parents=True, exist_ok=True)
            if machine.path(path).is_dir():
                shutil.copytree(machine.path(path), outside, symlinks=True)
            else:
                shutil.copy(machine.path(path), outside)
    return {path: root / path.lstrip("/") for path in kept}


def service(_: str, root: Path) -> Iterator[Result]:
    """Measure the time from PID 1's start to a lease, and callers' longest wait across `systemctl restart`.

    Both are compared with a bare service.
    """
    if (absent := systemd.missing()) is not None:
        raise SystemExit(f"{absent}; or leave this one out: --only")
    root.mkdir(parents=True)
    binds = _prepared(root)
    boots = [_boot(root, binds, number) for number in range(_BOOTS)]
    ours, theirs = (statistics.median(times) for times in zip(*boots, strict=True))
    yield Result("from the start of PID 1 to a lease", ours, theirs, at_most=3)
    with Machine(_SUITE, f"bench-{os.getpid()}-restarts", root, binds) as machine:
        ours, theirs = in_turn(lambda: _restart(machine, "mpsd"), lambda: _restart(machine, "floor"), rounds=_RESTARTS)
    yield Result("a caller's longest wait across a restart", ours, theirs, at_most=15)


def _boot(root: Path, binds: Mapping[str, Path], number: int) -> list[float]:
    """Boot a machine, and return how many seconds after PID 1 began the callers had their answers."""
    with Machine(_SUITE, f"bench-{os.getpid()}-{number}", root, binds) as machine:
        began = int(machine.run("systemctl", "show", "-P", "UserspaceTimestampMonotonic").stdout) / 1_000_000
        asked = [machine.path(f"/run/asked-{name}") for name in _PLACES]
        wait_until(lambda: all(each.exists() and each.stat().st_size for each in asked), what="the answers")
        return [float(each.read_text()) - began for each in asked]


def _restart(machine: Machine, name: str) -> float:
    command = machine.command(f"/{HOME}/bin/python3", "-I", "/usr/local/bin/ask.py", _PLACES[name], name, "forever")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as caller:
        assert caller.stdin is not None
        assert caller.stdout is not None
        caller.stdout.readline()
        machine.run("systemctl", "restart", f"{name}.service")
        caller.stdin.close()
    assert caller.returncode == 0
    return float(json.loads(machine.path(f"/run/asked-{name}").read_text()))
