"""The capabilities of a program that mpsd starts: those that it is given, without a way to gain others."""

import subprocess
import sys
from typing import Final

import pytest

from mpsd.core.capabilities import DAEMON, Capability, parse
from tests.daemon.caller import needs_root

START: Final = """
import os, sys
from mpsd.core.capabilities import DAEMON, FRONT_END
from mpsd.system.processes import process
def sets(status):
    return [line for line in status.splitlines() if line.startswith("Cap")]
def sets_of_a_program(allowed):
    out = os.memfd_create("out")
    started = process.spawn(["cat", "/proc/self/status"], env={"PATH": "/usr/bin:/bin"}, stdout=out, allowed=allowed)
    assert started._child.wait() == 0
    return sets(os.pread(out, 65536, 0).decode())
before = open("/proc/self/status").read()
front_end, daemon, again = (sets_of_a_program(each) for each in (FRONT_END, DAEMON, DAEMON))
assert again == daemon
assert "CapBnd:\\t0000000000000000" in front_end or front_end == daemon, front_end
assert sets(before) == sets(open("/proc/self/status").read())
print(*daemon, sep="\\n")
"""
"""Starts a front-end and two control daemons, checks the sets that these programs and mpsd have, and prints those of a
control daemon."""

LISTED: Final = sum(1 << each for each in DAEMON)


def started_by(*setpriv: str) -> dict[str, int]:
    """Return the sets of a program that mpsd starts, when mpsd itself is started by this command."""
    done = subprocess.run(
        [*setpriv, sys.executable, "-c", START], capture_output=True, text=True, check=True, timeout=30
    )
    return {name: int(value, 16) for name, value in (line.split(":\t") for line in done.stdout.splitlines())}


@needs_root
def test_root() -> None:
    """The program has the listed ones, can never gain another, and mpsd's own are unchanged."""
    wanted = {"CapInh": 0, "CapPrm": LISTED, "CapEff": LISTED, "CapBnd": LISTED, "CapAmb": 0}
    assert started_by() == wanted
    # The program cannot gain those that mpsd inherited either, which no bounding set limits.
    assert started_by("setpriv", "--inh-caps=+sys_ptrace,+net_raw", "--ambient-caps=+sys_ptrace") == wanted


@needs_root
def test_fewer() -> None:
    """An mpsd that lacks a capability cannot pass it on."""
    assert started_by("setpriv", "--bounding-set=-chown")["CapPrm"] == LISTED & ~(1 << Capability.CHOWN)


@needs_root
def test_mpsd_that_may_take_none_away() -> None:
    """Without SETPCAP mpsd starts it with all its own capabilities, which `host_environment` reports."""
    found = started_by("setpriv", "--bounding-set=-setpcap", "--inh-caps=-all")
    assert found["CapPrm"] & 1 << Capability.SYS_ADMIN


def test_names() -> None:
    """A capability's name is accepted with and without the prefix; an unknown one is refused by name."""
    assert parse(["SYS_PTRACE", "CAP_SYS_NICE"]) == {Capability.SYS_PTRACE, Capability.SYS_NICE}
    with pytest.raises(ValueError, match="'sys_ptrace' is not a capability"):
        parse(["sys_ptrace"])
