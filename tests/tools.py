"""Programs of Debian's that some tests need and that mpsd does not."""

import shutil

import pytest

from tests import real


def needed(program: str, package: str) -> str:
    """Return the path of a program; where it is not there, the test skips, or fails where everything is required."""
    found = shutil.which(program)
    if found is None:
        because = f"{program} is not installed (Debian: {package})"
        if real.required():
            pytest.fail(f"{because}, and {real.REQUIRE} is set", pytrace=False)
        pytest.skip(because)
    return found
