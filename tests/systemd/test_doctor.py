"""`mpsctl doctor` under a real systemd: its verdicts about mpsd's units, compared with systemd's own."""

import json
from typing import Any

import pytest

from tests import systemd
from tests.systemd.machine import CONTROL, Machine

pytestmark = pytest.mark.machine

_UNIT = "/etc/systemd/system/mpsd.service.d/test.conf"
_MEND = """
import asyncio, sys
from mpsd.core.doctor.finding import Means, Mend
from mpsd.core.settings import Settings
from mpsd.system.doctor import fixes
asyncio.run(fixes.mend(Settings(), "leftovers", Mend(Means.REMOVE, (sys.argv[1],))))
"""
_RUN = f"[Service]\nExecStart=\nExecStart=/usr/bin/mpsd run --simulate 1 --control {CONTROL}\n"


def doctor(machine: Machine, *checks: str) -> dict[str, Any]:
    """Run doctor in the machine, and return the worst verdict of each of these checks."""
    only = [word for check in checks for word in ("--only", check)]
    done = machine.run("mpsctl", "doctor", "-o", "json", *only, check=False)
    assert done.stderr == ""
    found = sorted(
        json.loads(done.stdout)["checks"],
        key=lambda each: ("ok", "note", "unknown", "warn", "fail").index(each["verdict"]),
    )
    assert {each["id"] for each in found} == set(checks)
    return {each["id"]: each for each in found}


class TestUnits:
    """The states of the units that an operator meets."""

    SUITE = systemd.SUITES["trixie"]

    def test_from_nothing_to_well(self, machine: Machine) -> None:
        """Missing, failed, masked, misconfigured and healthy units are distinguished, each with a remedy."""
        machine.install()
        found = doctor(machine, "unit", "mpsd")
        assert (found["unit"]["verdict"], found["mpsd"]["verdict"]) == ("unknown", "fail")
        assert "systemd has none of the units mpsd.service" in found["unit"]["because"]

        # There is no driver in the machine, so mpsd is refused, and not started again.
        machine.install_units()
        machine.run("systemctl", "daemon-reload")
        machine.run("systemctl", "start", "mpsd.service", check=False)
        machine.run("systemctl", "stop", "mpsd.socket")  # otherwise a query would start mpsd again
        found = doctor(machine, "unit")
        assert (found["unit"]["verdict"], found["unit"]["subject"]) == ("fail", "mpsd.service")
        assert found["unit"]["evidence"]["Result"] == machine.show("mpsd.service", "Result") == "exit-code"
        assert "systemctl reset-failed mpsd.service" in found["unit"]["remedy"]

        machine.run("systemctl", "reset-failed", "mpsd.service")
        machine.run("systemctl", "mask", "mpsd.service")
        assert doctor(machine, "unit")["unit"]["remedy"] == "systemctl unmask mpsd.service"
        machine.run("systemctl", "unmask", "mpsd.service")

        machine.write(_UNIT, f"{_RUN}KillMode=control-group\n")
        machine.run("systemctl", "daemon-reload")
        wrong = doctor(machine, "unit")["unit"]
        assert (wrong["verdict"], wrong["evidence"]["KillMode"]) == ("fail", "control-group")
        assert _UNIT in wrong["evidence"]["DropInPaths"]

        machine.write(_UNIT, _RUN)
        machine.enable("mpsd.socket", "mpsd.service")
        well = ("mpsd", "version", "configuration", "unit", "directories", "disk")
        found = doctor(machine, *well)
        assert {name: each["verdict"] for name, each in found.items()} == dict.fromkeys(well, "ok"), found

        machine.run("chmod", "0700", "/run/mpsd")
        closed = doctor(machine, "directories")["directories"]
        assert (closed["verdict"], closed["remedy"].partition(",")[0]) == ("fail", "chmod o+x /run/mpsd")
        machine.run("chmod", "0755", "/run/mpsd")

        # The socket of a running mpsd is removed: starting the socket unit would have no effect.
        machine.run("rm", "/run/mpsd/mpsd.sock")
        assert doctor(machine, "mpsd")["mpsd"]["remedy"].startswith("systemctl restart mpsd.socket,")
        machine.run("systemctl", "restart", "mpsd.socket")
        assert doctor(machine, "mpsd")["mpsd"]["verdict"] == "ok"

        machine.run("systemctl", "stop", "mpsd.socket", "mpsd.service")
        stale = "/run/mpsd/mps/gpu7/control"
        machine.run("mkdir", "--mode=0700", "/run/mpsd/mps/gpu7")
        machine.run("touch", stale)
        # In a pid namespace of its own, doctor takes nothing for a leftover; what it would do then is done here.
        python = machine.run("head", "-n", "1", "/usr/bin/mpsctl").stdout.removeprefix("#!").split()
        machine.run(*python, "-c", _MEND, stale)
        (told,) = machine.journal("MPSD_EVENT=doctor_fixed")
        assert told["MPSD_DID"] == f"removed {stale}"
        found = doctor(machine, "unit", "mpsd")
        assert found["mpsd"]["verdict"] == "fail"
        assert (found["unit"]["verdict"], found["unit"]["remedy"]) == ("warn", "systemctl start mpsd.service")
