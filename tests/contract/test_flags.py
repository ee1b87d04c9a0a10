"""The flags that a control program knows, by its own answers, and by its start."""

import asyncio
from pathlib import Path
from typing import Final

import pytest

from mpsd.core.model import Known, Unknown
from mpsd.core.mps.daemon_flags import BY_USERS
from mpsd.core.settings import Users
from mpsd.system.mps.control_flags import knows_many_users
from mpsd.system.mps.control_pipe import ControlProgram
from tests.contract.subjects import Bench
from tests.daemon.helpers import program


@pytest.mark.root("have a control daemon serve several users")
def test_many_users(idle: Bench) -> None:
    """mpsd learns from the program whether it knows -multiuser-server: only then does a control daemon start with it.

    Any other program takes the flags for a call of a front-end.
    """
    knows = asyncio.run(knows_many_users(idle.subject.program))
    assert knows == Known(idle.subject.branch >= 555)
    idle.flags = BY_USERS[Users.MANY]
    if knows == Known(value=True):
        idle.start()
    else:
        assert idle.launch().wait(20) == 1
        assert idle.raw_log() == ["Cannot find MPS control daemon process"]


USAGE_OF_580: Final = """\
CUDA MPS Control for Linux/Unix/QNX. Binary version: 13000
Copyright (C) 2003 - 2025 NVIDIA Corporation.

  This program allows multiple CUDA processes to share a single GPU context. For information on how to use the CUDA \
MPS, see the nvidia-cuda-mps-control manual page.

nvidia-cuda-mps-control [options] [command]
OPTIONS:
  -h,--help                Print this message
  -d,--daemon              Setup the daemon in the background
  -f,--forground           Setup the daemon in the foreground
  -M,--multiuser-server    Enable multi-user mode
"""
"""The beginning of its usage (580.159.04)."""


@pytest.mark.parametrize(("usage", "knows"), [(USAGE_OF_580, True), (USAGE_OF_580.partition("\n\nnv")[0], False)])
def test_usage(short_tmp: Path, usage: str, *, knows: bool) -> None:
    """A usage that names the flag decides; otherwise a program that answers the flag with its usage lacks it."""
    (short_tmp / "usage").write_text(usage)
    control = program(short_tmp / "nvidia-cuda-mps-control", f"cat {short_tmp}/usage")
    assert asyncio.run(knows_many_users(ControlProgram((str(control),)))) == Known(knows)


def test_no_answer() -> None:
    """The flags of a program that cannot be started are unknown."""
    assert isinstance(asyncio.run(knows_many_users(ControlProgram(("/absent/program",)))), Unknown)
