"""mpsd in a machine, as a service: with simulated GPUs, NVIDIA's control daemons, and a process that holds a lease."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tests.harness import wait_until
from tests.systemd.building import HOME
from tests.systemd.machine import CONTROL, Machine

UNITS: Final = ("mpsd.socket", "mpsd.service")

STOP: Final = "mpsd-stop-daemons.service"

_RUN: Final = f"run --simulate 2 --control {CONTROL}"

_LOAD: Final = """
import json, os, sys, threading, time
from mpsd.client import Client
wrong, waits, over = [], [], threading.Event()
def come_and_go():
    while not over.is_set():
        before = time.monotonic()
        try:
            with Client("/run/mpsd/mpsd.sock", deadline=30) as client:
                lease = client.post("/v1/leases", {"threads": 1, "memory": "1MiB"})
                client.close()
                client.delete("/v1/leases/" + lease["id"])
        except Exception as error:
            wrong.append(repr(error))
        waits.append(time.monotonic() - before)
        over.wait(0.02)
callers = [threading.Thread(target=come_and_go) for _ in range(2)]
for each in callers:
    each.start()
print("begun", flush=True)
sys.stdin.read()
over.set()
for each in callers:
    each.join()
print(json.dumps({"wrong": wrong, "times": len(waits), "longest": max(waits)}))
"""
"""Two callers that request and release leases, each request over a new connection, until they are stopped."""


@dataclass
class Service:
    """mpsd in a machine."""

    machine: Machine
    python: str = f"/{HOME}/bin/python3"
    """The interpreter that can import mpsd there."""

    def simulate(self, program: str = "/usr/bin/mpsd") -> None:
        """Have mpsd run with simulated GPUs, by drop-ins like an operator's."""
        for unit, command in (("mpsd.service", f"{program} {_RUN}"), (STOP, f"{program} {_RUN} --stop-daemons")):
            self.drop_in(unit, "simulate", f"[Service]\nExecStart=\nExecStart={command}\n")

    def start(self) -> None:
        """Enable mpsd, with simulated GPUs."""
        self.simulate()
        self.drop_in("mpsd.service", "watchdog", "[Service]\nWatchdogSec=2\n")
        self.machine.enable(*UNITS)

    def simulate_all(self) -> None:
        """Start mpsd with the simulator's control daemons, whose servers need no GPU, in place of NVIDIA's."""
        self.machine.run("systemctl", "stop", "holder.service", check=False)
        self.machine.run("systemctl", "start", STOP)
        for unit, more in (("mpsd.service", ""), (STOP, " --stop-daemons")):
            command = f"/usr/bin/mpsd run --simulate 2{more}"
            self.drop_in(unit, "zz-simulator", f"[Service]\nExecStart=\nExecStart={command}\n")
        self.machine.run("systemctl", "start", *UNITS)

    def simulate_no_more(self) -> None:
        """Stop those control daemons, and have NVIDIA's started from now on."""
        self.machine.run("systemctl", "start", STOP)
        for unit in ("mpsd.service", STOP):
            self.drop_in(unit, "zz-simulator", "")

    def drop_in(self, unit: str, name: str, text: str) -> None:
        """Change a unit like `systemctl edit`; an empty text reverts the change."""
        place = f"/etc/systemd/system/{unit}.d/{name}.conf"
        if text:
            self.machine.write(place, text)
        else:
            self.machine.path(place).unlink()
        self.machine.run("systemctl", "daemon-reload")

    def ask(self, *arguments: str) -> Any:
        """Return the JSON output of mpsctl."""
        return json.loads(self.machine.run("mpsctl", *arguments, "-o", "json").stdout)

    @property
    def main_pid(self) -> int:
        """The pid of mpsd, or 0 if it is not running."""
        return int(self.machine.show("mpsd.service", "MainPID"))

    @property
    def status(self) -> str:
        """mpsd's status text in systemd."""
        return self.machine.show("mpsd.service", "StatusText")

    def daemons(self) -> dict[str, int]:
        """Return the pids of the control daemons."""
        return {each["name"]: each["pid"] for each in self.ask("daemons")["daemons"]}

    def leases(self) -> list[str]:
        return sorted(each["id"] for each in self.ask("leases")["leases"])

    def running(self) -> list[int]:
        """Return the pids of all running control daemons, known to mpsd or not."""
        found = self.machine.run("pgrep", "-f", f"^{CONTROL} -f", check=False).stdout
        return sorted(map(int, found.split()))

    def signal(self, number: str) -> int:
        """Send mpsd a signal, and return its pid at the time."""
        pid = self.main_pid
        assert pid > 1
        self.machine.run("kill", f"-{number}", str(pid))
        return pid

    def wait_for_another(self, before: int) -> None:
        """Wait until another mpsd runs, and is ready."""
        wait_until(
            lambda: self.main_pid not in {0, before} and self.machine.show("mpsd.service", "ActiveState") == "active",
            what="the next mpsd",
            deadline=30,
        )

    def hold(self) -> str:
        """Start a process that holds a lease, and return the lease's id."""
        before = self.leases()
        self.machine.run(
            "systemd-run",
            "--collect",
            "--unit=holder",
            "mpsctl",
            "run",
            "--threads",
            "10",
            "--memory",
            "1GiB",
            "--",
            "sleep",
            "inf",
        )
        (lease,) = wait_until(lambda: set(self.leases()) - set(before), what="the lease")
        return lease

    def under_load(self, do: Callable[[], object]) -> dict[str, Any]:
        """Do something while other callers request and release leases; return their results."""
        with subprocess.Popen(
            self.machine.command(self.python, "-c", _LOAD), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as load:
            assert load.stdin is not None
            assert load.stdout is not None
            assert load.stdout.readline() == b"begun\n"
            try:
                do()
            finally:
                load.stdin.close()
            said: dict[str, Any] = json.loads(load.stdout.read())
            return said
