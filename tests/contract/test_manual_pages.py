"""The tables of commands and flags, compared with NVIDIA's own manual pages, which come with the control daemons."""

import gzip
import re
from pathlib import Path
from typing import Final

import pytest

from mpsd.core.mps.commands import TABLE
from mpsd.core.mps.daemon_flags import BACKGROUND, FOREGROUND, MANY_USERS
from tests import real
from tests.contract.differences import known

PAGE: Final = "usr/share/man/man1/nvidia-cuda-mps-control.1.gz"

MISPRINTED: Final = {"get_device_pinned_mem_limit"}
"""Commands that every page has under another's name: this one as `get_default_device_pinned_mem_limit PID dev`."""


def page_of(daemon: real.RealDaemon) -> str:
    """Return the source of the manual page that came with a control program."""
    root = Path(str(daemon.control).removesuffix(real.CONTROL))
    return gzip.decompress((root / PAGE).read_bytes()).decode()


@pytest.mark.parametrize("daemon", real.real_daemon_params())
def test_every_command_is_in_the_table(daemon: real.RealDaemon) -> None:
    """The table has exactly the commands of a driver's page, since that driver or an older one."""
    described = set(re.findall(r"^\\fB([a-z]+(?:_[a-z]+)*)(?:\\fR)?(?: .*)?$", page_of(daemon), re.MULTILINE))
    in_table = {name for name in TABLE if known(name, daemon.branch)}
    assert described <= in_table
    assert in_table - described <= MISPRINTED


@pytest.mark.parametrize("daemon", real.real_daemon_params())
def test_every_flag_is_in_the_page(daemon: real.RealDaemon) -> None:
    """A driver's page describes the flags that mpsd uses for its control daemon; the one for many users from 555 on."""
    described = set(re.findall(r'^\.SS "(-[a-z-]+)"', page_of(daemon), re.MULTILINE))
    assert {FOREGROUND, BACKGROUND} <= described
    assert (MANY_USERS in described) == (daemon.branch >= 555)
