"""The package as a program has it: what its import costs, its names, and their types."""

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

import mpsd
from mpsd.core.errors import NeverFitsError
from tests.cli.conftest import ROOT


def imported(program: str) -> set[str]:
    """Return the modules that Python has imported at the end of a program, beside its own at the start."""
    command = [sys.executable, "-c", f"import os, sys; {program}; print(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split())


def test_the_import_costs_nothing() -> None:
    """`import mpsd` imports os and sys, which Python has already, and no more."""
    assert imported("import mpsd") - imported("pass") == {"mpsd"}


def test_each_name_is_imported_at_its_first_use() -> None:
    """asyncio comes with AsyncClient alone, and a client imports none of mpsd's libraries."""
    blocking, later = imported("import mpsd; mpsd.Client"), imported("import mpsd; mpsd.AsyncClient")
    assert {"mpsd.client.client", "json"} <= blocking
    assert "asyncio" not in blocking
    assert {"mpsd.client.async_client", "asyncio"} <= later
    libraries = {"click", "httptools", "msgspec", "prometheus_client", "psutil", "pynvml", "structlog", "tenacity"}
    assert (blocking | later) & libraries == set()


@pytest.mark.parametrize("name", mpsd.__all__)
def test_names(name: str) -> None:
    """A public name is there before its first use, in `dir` too."""
    assert imported(f"import mpsd; assert '{name}' in dir(mpsd); mpsd.{name}; assert '{name}' in vars(mpsd)")


def test_a_name_that_is_not_there() -> None:
    """Another name is an AttributeError, as of any module."""
    with pytest.raises(AttributeError, match="module 'mpsd' has no attribute 'Cleint'"):
        mpsd.Cleint  # type: ignore[attr-defined]  # noqa: B018


def test_the_errors_are_a_module() -> None:
    """The errors may be imported by their names, and are those that mpsd raises."""
    assert "mpsd.errors" in imported("import mpsd.errors; from mpsd.errors import NeverFitsError")
    assert mpsd.errors.NeverFitsError is NeverFitsError


PROGRAM = """
import mpsd
from mpsd.errors import NeverFitsError

def ask(api: mpsd.Client) -> int:
    try:
        lease = api.admit({"threads": 25})
    except mpsd.errors.DoesNotFitError as error:
        reveal_type(error.gpu)
        raise
    except NeverFitsError as error:
        reveal_type(error.limit)
        raise
    reveal_type(lease["env"])
    reveal_type(api.verify(lease["id"])["violations"])
    with mpsd.lease(fraction="25%", wait="10m") as held, mpsd.spawn(["true"], threads=25) as program:
        reveal_type(held.id)
        reveal_type(program.pid)
    return mpsd.MpsdError.exit_code

async def later() -> None:
    async with mpsd.AsyncClient() as api, api.leased(threads=25, wait=60) as lease:
        reveal_type(lease["gpus"])
        reveal_type((await api.principal())["uid"])
        async for line, event in api.events(0, follow=True):
            reveal_type(line)
            api.statsu()
    mpsd.Cleint()
"""


@pytest.mark.thorough
@pytest.mark.timeout(300)  # without a cache, mypy reads the types of the standard library first
def test_types(tmp_path: Path) -> None:
    """A type checker knows the types of all of it in a program of its user, and finds what is misspelled."""
    (tmp_path / "program.py").write_text(dedent(PROGRAM), encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", f"{ROOT}/.mypy_cache", "program.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    found = [line.partition(": ")[2] for line in done.stdout.splitlines() if line.startswith("program.py")]
    assert found == [
        'note: Revealed type is "str | None"',
        'note: Revealed type is "str | None"',
        'note: Revealed type is "dict[str, str]"',
        'note: Revealed type is "list[str]"',
        'note: Revealed type is "str"',
        'note: Revealed type is "int"',
        'note: Revealed type is "list[str]"',
        'note: Revealed type is "int"',
        'note: Revealed type is "str"',
        'error: "AsyncClient" has no attribute "statsu"  [attr-defined]',
        'error: Module has no attribute "Cleint"; maybe "Client"?  [attr-defined]',
    ], done.stdout + done.stderr
