"""The manual pages, the example of a configuration and the completions are up to date, and valid."""

import os
import re
import subprocess
from dataclasses import replace
from typing import Final

import pytest

from mpsd.cli.group import EXIT_STATUS
from mpsd.core.configuration.document import parse
from mpsd.core.errors import catalogue
from mpsd.core.kubernetes import settings as kubernetes
from mpsd.core.settings import Settings, WantedComputeMode
from tests.gate.generate import FILES
from tests.gate.source import ROOT
from tests.tools import needed

PAGES: Final = sorted(name for name in FILES if name.startswith("docs/man/"))


@pytest.mark.parametrize("name", sorted(FILES))
def test_is_written(name: str) -> None:
    """The file in the tree is the generated one."""
    stands = (ROOT / name).read_text(encoding="utf-8")
    assert stands == FILES[name](), f"{name} is not up to date: run python -m tests.gate.generate"


@pytest.mark.parametrize("folder", ["docs/man", "completions"])
def test_nothing_else_is_there(folder: str) -> None:
    """There is no page or completion of anything that no longer exists."""
    there = {f"{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*") if path.is_file()}
    assert there == {name for name in FILES if name.startswith(f"{folder}/")}


@pytest.mark.parametrize("page", PAGES)
def test_page_is_sound(page: str) -> None:
    """Neither mandoc nor man reports anything about it."""
    linted = subprocess.run(
        [needed("mandoc", "mandoc"), "-Tlint", "-Wstyle", page], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (linted.returncode, linted.stdout) == (0, "")
    shown = subprocess.run(
        [needed("man", "man-db"), "--warnings", "--encoding=UTF-8", "--local-file", "--troff-device=utf8", "-Z", page],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "LC_ALL": "C.UTF-8", "MANWIDTH": "80", "MANROFFSEQ": ""},
    )  # fmt: skip
    assert (shown.returncode, shown.stderr) == (0, "")


def test_every_exit_status_is_told() -> None:
    """The exit code of each error is in the help and the page of mpsctl."""
    assert {error.exit_code for error in catalogue()} <= EXIT_STATUS.keys()


def test_the_example_sets_the_compute_mode() -> None:
    """The example closes a new installation, and otherwise has the defaults, even if all is uncommented."""
    example = FILES["docs/mpsd.toml"]()
    closed = replace(Settings().daemon, compute_mode=WantedComputeMode.EXCLUSIVE_PROCESS)
    assert parse(example) == replace(Settings(), daemon=closed)
    uncommented = re.sub(r"^#(\w+ = .+)$", r"\1", example, flags=re.MULTILINE)
    assert uncommented.count("\n#") < example.count("\n#")
    socket = Settings().socket
    both = f'[api]\nsocket = "{socket}"\n[daemon]\ncompute_mode = "exclusive-process"\n'
    assert parse(uncommented) == parse(both)


def test_the_example_for_kubernetes_has_the_defaults() -> None:
    """The example of mpsd-kubernetes' settings is valid as it is, and with everything uncommented."""
    example = FILES["docs/kubernetes/kubernetes.toml"]()
    uncommented = re.sub(r"^#(\w+ = .+)$", r"\1", example, flags=re.MULTILINE)
    assert uncommented != example
    for text in (example, uncommented):
        assert kubernetes.parse(text, {}, {}) == kubernetes.Settings()
