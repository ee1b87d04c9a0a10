"""`mpsctl doctor` under a real systemd: its verdicts about mpsd's units, compared with systemd's own."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from tests import systemd
from tests.harness import wait_until
from tests.systemd.machine import CONTROL, Machine

pytestmark = pytest.mark.machine

_FILES: Final = Path(__file__).parents[2] / "monitoring/prometheus"
_UNIT = "/etc/systemd/system/mpsd.service.d/test.conf"
_RUN = f"[Service]\nExecStart=\nExecStart=/usr/bin/mpsd run --simulate 1 --control {CONTROL}\n"


def doctor(machine: Machine, *checks: str) -> dict[str, Any]:
    """Run doctor in the machine, and return the worst verdict of each of these checks."""
    only = [word for check in checks for word in ("--only", check)]
    done = machine.run("mpsctl", "doctor", "-o", "json", *only, check=False)
    assert done.stderr == ""
    found = sorted(
        json.loads(done.stdout)["checks"], key=lambda each: ("ok", "unknown", "warn", "fail").index(each["verdict"])
    )
    assert {each["id"] for each in found} == set(checks)
    return {each["id"]: each for each in found}


class TestUnits:
    """The states of the units that an operator meets."""

    SUITE = systemd.SUITES["trixie"]

    def test_from_nothing_to_well(self, machine: Machine) -> None:
        """Missing, failed, masked, misconfigured and healthy units are distinguished, each with a remedy."""
        machine.install()
        found = doctor(machine, "unit", "unit-settings", "mpsd")
        assert found["unit"]["verdict"] == found["unit-settings"]["verdict"] == "unknown"
        assert "systemd has none of the units mpsd.service" in found["unit"]["because"]

        # There is no driver in the machine, so mpsd is refused, and not started again.
        machine.install_units()
        machine.run("systemctl", "daemon-reload")
        machine.run("systemctl", "start", "mpsd.service", check=False)
        machine.run("systemctl", "stop", "mpsd.socket")  # otherwise a query would start mpsd again
        found = doctor(machine, "unit", "unit-settings")
        assert (found["unit"]["verdict"], found["unit"]["subject"]) == ("fail", "mpsd.service")
        assert found["unit"]["evidence"]["Result"] == machine.show("mpsd.service", "Result") == "exit-code"
        assert "systemctl reset-failed mpsd.service" in found["unit"]["remedy"]
        assert found["unit-settings"]["verdict"] == "ok"

        machine.run("systemctl", "reset-failed", "mpsd.service")
        machine.run("systemctl", "mask", "mpsd.service")
        assert doctor(machine, "unit")["unit"]["remedy"] == "systemctl unmask mpsd.service"
        machine.run("systemctl", "unmask", "mpsd.service")

        machine.write(_UNIT, f"{_RUN}KillMode=control-group\n")
        machine.run("systemctl", "daemon-reload")
        found = doctor(machine, "unit-settings")
        assert found["unit-settings"]["verdict"] == "fail"
        assert found["unit-settings"]["evidence"]["KillMode"] == "control-group"
        assert _UNIT in found["unit-settings"]["evidence"]["DropInPaths"]

        machine.write(_UNIT, _RUN)
        machine.enable("mpsd.socket", "mpsd.service")
        well = ("mpsd", "socket", "version", "configuration", "reload", "unit", "unit-settings")
        found = doctor(machine, *well)
        assert {name: each["verdict"] for name, each in found.items()} == dict.fromkeys(well, "ok"), found
        found = doctor(machine, "nofile", "capabilities", "user-namespace")  # mpsd is found, and inspected
        assert {each["verdict"] for each in found.values()} == {"ok"}, found

        machine.run("chmod", "0700", "/run/mpsd")
        assert doctor(machine, "traverse")["traverse"]["verdict"] == "fail"
        machine.run("mpsctl", "doctor", "--fix", "--only", "traverse")
        assert doctor(machine, "traverse")["traverse"]["verdict"] == "ok"
        (told,) = machine.journal("MPSD_EVENT=doctor_fixed")
        assert told["MPSD_DID"] == "opened /run/mpsd to every uid (o+x)"

        # The socket of a running mpsd is removed: starting the socket unit would have no effect.
        machine.run("rm", "/run/mpsd/mpsd.sock")
        found = doctor(machine, "mpsd", "socket")
        assert found["mpsd"]["remedy"].startswith("systemctl restart mpsd.socket,")
        assert found["socket"]["remedy"] == found["mpsd"]["remedy"]
        machine.run("systemctl", "restart", "mpsd.socket")
        assert doctor(machine, "mpsd")["mpsd"]["verdict"] == "ok"

        machine.run("systemctl", "stop", "mpsd.socket", "mpsd.service")
        found = doctor(machine, "unit", "mpsd")
        assert found["mpsd"]["verdict"] == "fail"
        assert (found["unit"]["verdict"], found["unit"]["remedy"]) == ("warn", "systemctl start mpsd.service")

    def test_metrics(self, machine: Machine) -> None:
        """The outputs of the metrics that the package's files set up are checked, each before and after it works."""
        machine.install()
        machine.install_units()
        machine.write(_UNIT, _RUN)
        machine.write("/etc/mpsd/mpsd.toml", '[metrics]\nlisten = "127.0.0.1:9410"\n')
        machine.enable("mpsd.socket", "mpsd.service")
        checks = ("history-store", "history-samples", "metrics-listener", "metrics-textfile")
        found = doctor(machine, *checks)
        assert [found[each]["verdict"] for each in checks] == ["ok", "ok", "fail", "ok"], found
        assert "mpsd-tcp.conf" in found["metrics-listener"]["remedy"]

        machine.write("/etc/systemd/system/mpsd.service.d/mpsd-tcp.conf", (_FILES / "mpsd-tcp.conf").read_text())
        for unit in ("mpsd-textfile.service", "mpsd-textfile.timer"):
            machine.write(f"/etc/systemd/system/{unit}", (_FILES / unit).read_text())
        machine.run("systemctl", "daemon-reload")
        machine.run("systemctl", "restart", "mpsd.service")
        wait_until(lambda: doctor(machine, "metrics-listener")["metrics-listener"]["verdict"] == "ok", what="the port")
        textfile = doctor(machine, "metrics-textfile")["metrics-textfile"]
        assert (textfile["verdict"], textfile["evidence"]["age"]) == ("fail", None)
        assert "No such file or directory" in textfile["because"]

        machine.run("mkdir", "-p", "/var/lib/prometheus/node-exporter")
        textfile = doctor(machine, "metrics-textfile")["metrics-textfile"]
        assert textfile["remedy"] == "systemctl enable --now mpsd-textfile.timer"
        machine.run(*textfile["remedy"].split())
        wait_until(
            lambda: doctor(machine, "metrics-textfile")["metrics-textfile"]["verdict"] == "ok",
            what="the file",
            deadline=40,
        )
