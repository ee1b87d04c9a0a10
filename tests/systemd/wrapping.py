"""The effects of `mpsctl service wrap` on a unit, for a machine of each systemd."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from tests.harness import wait_until
from tests.systemd.machine import Machine
from tests.systemd.node import Service

_UNIT: Final = "trainer.service"

_PROGRAM: Final = "env >/run/trainer/environment; sleep inf | /opt/mpsd/bin/python3 -I -m mpsd.simulator.client"

_TEXT: Final = f"""\
[Unit]
StartLimitIntervalSec=0
[Service]
User=daemon
RuntimeDirectory=trainer
ExecStart=/bin/sh -c "{_PROGRAM}"
Restart=on-failure
RestartSec=100ms
RestartSteps=4
RestartMaxDelaySec=10min
"""
"""A client of MPS that attaches and stays, as a service of Debian's user 1."""


def check(machine: Machine, service: Service) -> None:
    """Each start has a lease, held by the unit's control group; a restart renews or keeps it; a refusal is logged."""
    machine.write(f"/etc/systemd/system/{_UNIT}", _TEXT)
    machine.run("systemctl", "daemon-reload")
    before = service.leases()

    said = _mpsctl(machine, "wrap", "trainer", "--fraction", "0.25")
    assert said.endswith(f"systemctl restart {_UNIT}\n")
    machine.run("systemctl", "start", _UNIT)
    first = _lease(machine, service)
    assert first["owner"]["uid"] == 1
    assert first["name"] == _UNIT
    wait_until(lambda: _variable(machine, "MPSD_LEASE") == first["id"], what="its program to have begun")
    assert float(_variable(machine, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")) == 25
    wait_until(lambda: _lease(machine, service)["clients"], what="its client to be attributed")
    assert service.ask("verify", first["id"])["verdict"] == "ok"
    secret = machine.path(f"/run/mpsd-units/{_UNIT}.env")
    assert (secret.stat().st_mode & 0o777, secret.stat().st_uid) == (0o600, 0)

    machine.run("systemctl", "restart", _UNIT)
    second = _lease(machine, service)
    assert second["id"] != first["id"]
    assert service.ask("show", first["id"])["state"] == "ended"

    _check_ending_clients(machine, service)
    _check_keeping(machine, service)
    assert service.leases() == before
    assert not secret.exists()
    _check_refusal(machine)


def _check_ending_clients(machine: Machine, service: Service) -> None:
    """On request, a client's server ends its work before systemd sends a signal."""
    _mpsctl(machine, "wrap", "trainer", "--fraction", "0.25", "--end-clients")
    machine.run("systemctl", "restart", _UNIT)
    wait_until(lambda: _lease(machine, service)["clients"], what="its client to be attributed")
    lease = _lease(machine, service)
    machine.run("systemctl", "stop", _UNIT)
    assert service.ask("show", lease["id"])["state"] == "ended"
    (client,) = lease["clients"]
    steps = [each["MPSD_STEP"] for each in machine.journal("MPSD_EVENT=client_forced", f"MPSD_PID={client}")]
    assert steps[0] == "terminate_client"


def _check_keeping(machine: Machine, service: Service) -> None:
    """A kept lease is that of the next start, unless that requests something else."""
    _mpsctl(machine, "wrap", "trainer", "--fraction", "0.25", "--on-restart", "keep")
    machine.run("systemctl", "restart", _UNIT)
    kept = _lease(machine, service)
    machine.run("systemctl", "restart", _UNIT)
    assert _lease(machine, service)["id"] == kept["id"]
    pid = machine.show(_UNIT, "MainPID")
    machine.run("kill", "-KILL", pid)
    wait_until(lambda: machine.show(_UNIT, "MainPID") not in {"0", pid}, what="systemd to start it again")
    assert _lease(machine, service)["id"] == kept["id"]
    wait_until(lambda: _variable(machine, "MPSD_LEASE") == kept["id"], what="its program to have begun")
    machine.run("systemctl", "restart", "mpsd.service")  # the next mpsd restores the stored lease
    assert _lease(machine, service)["id"] == kept["id"]
    machine.run("systemctl", "stop", _UNIT)
    (claim,) = service.ask("show", kept["id"])["holders"]
    left = (datetime.fromisoformat(claim["deadline"]) - datetime.now(UTC)).total_seconds()
    grows = machine.show(_UNIT, "RestartMaxDelayUSec") == "10min"  # systemd 254 and later
    assert (claim["kind"], left > 300) == ("claim", grows)
    machine.write(
        f"/etc/systemd/system/{_UNIT}.d/pause.conf", "[Service]\nRestartMaxDelaySec=infinity\nRestartSec=infinity\n"
    )
    machine.run("systemctl", "daemon-reload")
    wraps = ("mpsctl", "service", "wrap", "trainer", "--fraction", "0.5", "--on-restart", "keep")
    refused = machine.run(*wraps, check=False)
    assert refused.returncode == 2
    assert "may pause for inf s" in refused.stderr
    machine.path(f"/etc/systemd/system/{_UNIT}.d/pause.conf").unlink()
    machine.run("systemctl", "daemon-reload")

    # Other options result in another lease, even if the former lease should be kept.
    _mpsctl(machine, "wrap", "trainer", "--fraction", "0.5", "--on-restart", "keep")
    machine.run("systemctl", "start", _UNIT)
    wait_until(lambda: _variable(machine, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"), what="its program to have begun")
    assert float(_variable(machine, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")) == 50
    assert service.ask("show", kept["id"])["state"] == "ended"
    machine.run("systemctl", "stop", _UNIT)
    _mpsctl(machine, "wrap", "trainer", "--fraction", "0.5")
    machine.run("systemctl", "start", _UNIT)
    machine.run("systemctl", "stop", _UNIT)


def _check_refusal(machine: Machine) -> None:
    """A start without a lease fails, and says why; without the drop-in the unit has no lease."""
    _mpsctl(machine, "wrap", "trainer", "--threads", "100", "--memory", "1000GiB")
    assert machine.run("systemctl", "start", _UNIT, check=False).returncode != 0
    assert any("1000GiB" in str(each["MESSAGE"]) for each in machine.journal(f"--unit={_UNIT}"))
    machine.run("systemctl", "stop", _UNIT)

    _mpsctl(machine, "unwrap", "trainer")
    machine.run("systemctl", "start", _UNIT)
    wait_until(lambda: _variable(machine, "PATH"), what="its environment")
    assert _variable(machine, "MPSD_LEASE") == ""
    machine.run("systemctl", "stop", _UNIT)
    assert not machine.path(f"/etc/systemd/system/{_UNIT}.d").exists()


def _mpsctl(machine: Machine, *arguments: str) -> str:
    return machine.run("mpsctl", "service", *arguments).stdout


def _lease(machine: Machine, service: Service) -> dict[str, Any]:
    """Return the only lease that the unit's control group holds."""
    group = machine.show(_UNIT, "ControlGroup")
    held = [each for each in service.ask("leases")["leases"] if group in json.dumps(each["holders"])]
    (lease,) = held
    found: dict[str, Any] = lease
    return found


def _variable(machine: Machine, name: str) -> str:
    """Return a variable from the environment of the unit's program; empty if it has not started, or lacks it."""
    path: Path = machine.path("/run/trainer/environment")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((each.partition("=")[2] for each in lines if each.startswith(f"{name}=")), "")
