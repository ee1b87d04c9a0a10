"""Debian programs that some tests need and mpsd does not."""

import shutil
from pathlib import Path
from typing import NoReturn

import pytest

from tests import real


def needed(program: str, package: str) -> str:
    """Return the path of a program; without it, the test skips, or fails where everything is required."""
    found = shutil.which(program)
    if found is None:
        lacking(f"{program} is not installed (Debian: {package})")
    return found


def compiler() -> str:
    """Return the path of a C compiler that finds the headers of libc; the test skips or fails as for any program."""
    found = needed("gcc", "gcc")
    if not Path("/usr/include/stdio.h").exists():
        lacking("the headers of libc are not installed (Debian: libc6-dev)")
    return found


def lacking(because: str) -> NoReturn:
    """Skip a test because this machine lacks something, or fail it where everything is required."""
    __tracebackhide__ = True
    if real.required():
        pytest.fail(f"{because}, and {real.REQUIRE} is set", pytrace=False)
    pytest.skip(because)
