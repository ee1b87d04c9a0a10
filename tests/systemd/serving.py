"""mpsd's promises as a service, for a machine of each suite (test_debian_12.py, test_debian_13.py).

The tests of a class share a machine, in which a process holds a lease from the first to the last: neither that lease
nor a control daemon may be affected, until the unit that exists for stopping them.
"""

from typing import ClassVar

import pytest

from mpsd.core.capabilities import DAEMON, Capability
from mpsd.core.events import EventName
from mpsd.daemon.record.log import MESSAGE_IDS
from tests.driven_program import DrivenProgram
from tests.harness import wait_until
from tests.systemd import Suite, wrapping
from tests.systemd.machine import Machine
from tests.systemd.node import STOP, UNITS, Service

_INVALID = "[enforcement]\nunadmitted = 7\n"


class ServerHealth:
    """The tests, in their order of execution."""

    SUITE: ClassVar[Suite]

    def test_it_runs(self, machine: Machine, service: Service) -> None:
        """Enabled, it is healthy, and reports its state; systemd has no complaint about the units."""
        machine.run("mpsctl", "status")
        assert len(service.running()) == 2
        wait_until(
            lambda: service.status.startswith("2 of 2 control daemons ready, 1 lease, 0 waiting"),
            what="the status to tell of the lease",
        )
        assert machine.show("mpsd.service", "Type") == ("notify-reload" if self.SUITE.systemd >= 253 else "notify")
        units = ("/usr/lib/systemd/system/mpsd.service", f"/usr/lib/systemd/system/{STOP}")
        verified = machine.run("systemd-analyze", "verify", "--man=no", *units)
        assert not verified.stdout + verified.stderr
        complaints = [
            entry["MESSAGE"]
            for entry in machine.journal("_PID=1", "--priority=warning")
            if "mpsd" in entry.get("UNIT", "") and "left-over" not in entry["MESSAGE"]
        ]
        assert not complaints

    def test_journal(self, machine: Machine, service: Service) -> None:
        """Each event is in the journal with its id, its priority and each fact in a separate field."""
        (lease,) = service.leases()
        (granted,) = machine.journal(f"MPSD_LEASE={lease}", "MPSD_EVENT=lease_granted")
        assert granted["_TRANSPORT"] == "journal"
        assert granted["_SYSTEMD_UNIT"] == "mpsd.service"
        assert granted["SYSLOG_IDENTIFIER"] == "mpsd"
        assert granted["PRIORITY"] == "6"
        assert granted["MESSAGE_ID"] == MESSAGE_IDS[EventName.LEASE_GRANTED]
        assert lease in granted["MESSAGE"]
        found = machine.journal(f"MESSAGE_ID={MESSAGE_IDS[EventName.LEASE_GRANTED]}")
        assert lease in [each["MPSD_LEASE"] for each in found]

    def test_sandbox(self, machine: Machine, service: Service) -> None:
        """mpsd has the capabilities of the unit, control daemons some of them; nvidia-modprobe may gain privileges."""
        names = machine.show("mpsd.service", "CapabilityBoundingSet").split()
        unit = {Capability[name.removeprefix("cap_").upper()] for name in names}

        def status_of(pid: int) -> dict[str, str]:
            lines = machine.path(f"/proc/{pid}/status").read_text().splitlines()
            return dict(line.split(":\t", 1) for line in lines)

        def locked_memory(pid: int) -> list[str]:
            lines = machine.path(f"/proc/{pid}/limits").read_text().splitlines()
            return next(line.split()[3:5] for line in lines if line.startswith("Max locked memory"))

        assert machine.show("mpsd.service", "LimitMEMLOCK") == "infinity"
        has = int(status_of(1)["CapBnd"], 16)  # the machine is in a container, which may have few
        for pid in (service.main_pid, *service.running()):
            status = status_of(pid)
            most = unit if pid == service.main_pid else DAEMON
            assert int(status["CapEff"], 16) == sum(1 << each for each in most) & has
            assert status["CapBnd"] == status["CapEff"]
            assert status["NoNewPrivs"] == "0"
            assert status["Seccomp"] == "2"
            assert locked_memory(pid) in (["unlimited", "unlimited"], [locked_memory(1)[1]] * 2)
            tried = machine.run("nsenter", "-t", str(pid), "-m", "touch", "/usr/x", check=False)
            assert "Read-only file system" in tried.stderr

    @pytest.mark.usefixtures("unharmed")
    def test_reload(self, machine: Machine, service: Service) -> None:
        """A reload is accepted, or refused with the reason in the status until one is accepted.

        mpsd is the same process.
        """
        before = service.main_pid
        machine.write("/etc/mpsd/mpsd.toml", _INVALID)
        machine.run("systemctl", "reload", "mpsd.service")
        wait_until(lambda: "reload refused" in service.status, what="the refusal")
        machine.write("/etc/mpsd/mpsd.toml", "[admission]\nqueue_length = 7\n")
        machine.run("systemctl", "reload", "mpsd.service")
        wait_until(lambda: "reload" not in service.status, what="the refusal to be over")
        assert service.ask("config")["config"]["admission"]["queue_length"] == 7
        assert service.main_pid == before
        assert machine.show("mpsd.service", "ActiveState") == "active"

    @pytest.mark.timeout(180)  # twenty times the time of one restart, on a busy machine
    @pytest.mark.usefixtures("unharmed")
    def test_restarts_under_load(self, machine: Machine, service: Service) -> None:
        """Twenty restarts cause no error for callers that request and release leases meanwhile."""
        socket = machine.path("/run/mpsd/mpsd.sock").stat().st_ino
        log = machine.path("/var/log/mpsd/gpu0/control.log")
        written = log.stat().st_size

        def restart() -> None:
            for _ in range(20):
                before = service.main_pid
                machine.run("systemctl", "restart", "mpsd.service")
                assert service.main_pid not in {0, before}

        went = service.under_load(restart)
        assert not went["wrong"], went["wrong"]
        assert went["times"] > 20, went  # more than one for each restart
        assert machine.path("/run/mpsd/mpsd.sock").stat().st_ino == socket
        assert log.stat().st_size > written  # by a control daemon in the sandbox of an mpsd that has ended

    @pytest.mark.usefixtures("unharmed")
    def test_stopped_and_called(self, machine: Machine, service: Service) -> None:
        """While mpsd is stopped, a call starts it, and is answered."""
        machine.run("systemctl", "stop", "mpsd.service")
        assert service.main_pid == 0
        assert len(service.running()) == 2
        machine.run("mpsctl", "status")
        assert service.main_pid != 0

    @pytest.mark.usefixtures("unharmed")
    def test_killed(self, service: Service) -> None:
        """After SIGKILL the next mpsd continues where the last one was."""
        service.wait_for_another(service.signal("KILL"))

    @pytest.mark.usefixtures("unharmed")
    def test_stopped_by_a_signal(self, machine: Machine, service: Service) -> None:
        """After SIGSTOP there is no sign of life, so the watchdog ends mpsd, and the next one continues."""
        service.wait_for_another(service.signal("STOP"))
        said = [entry["MESSAGE"] for entry in machine.journal("_PID=1", "UNIT=mpsd.service")]
        assert any("Watchdog timeout" in line for line in said)

    @pytest.mark.usefixtures("unharmed")
    def test_refused(self, machine: Machine, service: Service) -> None:
        """The reason for a refused configuration is given by the unit, and to callers.

        Once corrected, the next call is answered.
        """
        machine.write("/etc/mpsd/mpsd.toml", _INVALID)
        machine.run("systemctl", "restart", "mpsd.service", check=False)
        assert machine.show("mpsd.service", "ActiveState") == "failed"
        assert service.status.startswith("refused: /etc/mpsd/mpsd.toml: enforcement.unadmitted")
        told = machine.run("mpsctl", "status", check=False)
        assert told.returncode == 69
        assert "mpsd cannot start: /etc/mpsd/mpsd.toml: enforcement.unadmitted" in told.stderr
        machine.write("/etc/mpsd/mpsd.toml", "")
        machine.run("mpsctl", "status")

    @pytest.mark.usefixtures("unharmed")
    def test_crash_loop(self, machine: Machine, service: Service) -> None:
        """An mpsd that cannot start is given up; callers get that answer at once.

        It is back when the cause is removed.
        """
        broken = "[Unit]\nStartLimitBurst=3\n[Service]\nExecStart=\nExecStart=/bin/false\n"
        service.drop_in("mpsd.service", "zz-broken", broken)
        machine.run("systemctl", "reset-failed", "mpsd.service")
        machine.run("systemctl", "restart", "mpsd.service", check=False)
        wait_until(
            lambda: machine.show("mpsd.service", "ActiveState") == "failed", what="it to be given up", deadline=20
        )
        wait_until(
            lambda: machine.run("mpsctl", "status", check=False).returncode == 69,
            what="callers to be told that nobody is there",
        )
        assert len(service.running()) == 2
        service.drop_in("mpsd.service", "zz-broken", "")
        machine.run("systemctl", "reset-failed", *UNITS)
        machine.run("systemctl", "start", *UNITS)
        machine.run("mpsctl", "status")

    def test_stop_daemons(self, machine: Machine, service: Service) -> None:
        """The unit that stops control daemons waits for clients, ends admission, and leaves none running."""
        busy = service.daemons()[service.ask("leases")["leases"][0]["shares"][0]["daemon"]]
        machine.run("systemctl", "start", "--no-block", STOP)
        wait_until(lambda: "draining" in machine.show(STOP, "StatusText"), what="it to say that it waits", deadline=20)
        assert machine.show("mpsd.service", "ActiveState") == "inactive"
        wait_until(lambda: service.running() == [busy], what="the idle one to be gone")
        refused = machine.run("mpsctl", "admit", "--threads", "1", "--memory", "1MiB", "--pid", "1", check=False)
        assert refused.returncode == 75
        machine.run("systemctl", "stop", "holder.service")
        wait_until(lambda: machine.show(STOP, "ActiveState") == "inactive", what="it to be done", deadline=20)
        assert machine.show(STOP, "Result") == "success"
        assert not service.running()
        assert machine.run("mpsctl", "status", check=False).returncode == 69

    def test_another_users_client(self, machine: Machine, service: Service) -> None:
        """In the sandbox a control daemon starts a server for another user; a restart does not affect its client.

        A lease of that user lives as long as a process carries its token, which mpsd can read there.
        Control daemon and server are the simulator's: NVIDIA's server needs a GPU.
        """
        machine.write("/etc/mpsd/mpsd.toml", '[daemon]\nusers = "one"\n')
        service.simulate_all()
        lease = ("mpsctl", "run", "--threads", "25", "--memory", "2GiB", "--")
        client = ("/opt/mpsd/bin/python3", "-I", "-m", "mpsd.simulator.client")
        someone = ("setpriv", "--reuid=2601", "--regid=2601", "--clear-groups")
        with DrivenProgram(machine.command(*someone, *lease, *client), {}) as told:
            assert told.hello.get("active_thread_percentage") == 25, told.hello
            server = machine.path(f"/proc/{told.hello['server']}")
            assert server.stat().st_uid == 2601
            machine.run("systemctl", "restart", "mpsd.service")
            assert told.do("alloc 1GiB")["ok"]
            assert [each["pid"] for each in service.ask("clients")["clients"]] == [told.hello["pid"]]
        background = "setsid sleep inf >/dev/null 2>&1 </dev/null &"
        machine.run(*someone, *lease, "sh", "-c", background)
        (borne,) = wait_until(lambda: machine.journal("MPSD_EVENT=lease_borne"), what="its token to be read")
        machine.run("pkill", "--uid", "2601", "sleep")
        wait_until(lambda: borne["MPSD_LEASE"] not in service.leases(), what="its lease to end")
        service.simulate_no_more()
        machine.write("/etc/mpsd/mpsd.toml", "")
        assert not server.exists()

    def test_wrapped_unit(self, machine: Machine, service: Service) -> None:
        """`mpsctl service wrap` gives a unit a lease with the lifetime of the unit."""
        service.simulate_all()
        wrapping.check(machine, service)
        service.simulate_no_more()

    def test_power_off(self, machine: Machine, service: Service) -> None:
        """The machine powers off under running control daemons, without waiting for a timeout."""
        machine.run("systemctl", "start", *UNITS)
        machine.run("mpsctl", "status")
        if not service.leases():
            service.hold()
        assert len(service.running()) == 2
        machine.run("systemctl", "poweroff", check=False)
        wait_until(machine.is_gone, what="it to be off", deadline=20)
