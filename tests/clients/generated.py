"""Clients that generators make from mpsd's own document, and the programs for that, from the extra `clients`."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import which
from typing import Final

from tests.tools import lacking

_PLACES: Final = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
"""The directory of the extra's programs, followed by PATH."""

_QUIET: Final = {
    "GOFLAGS": "-mod=mod",
    "GOPROXY": "off",
    "GOTOOLCHAIN": "local",
    "GOTELEMETRY": "off",
    "NODE_DISABLE_COMPILE_CACHE": "1",
}
"""Go takes nothing from the network, and Node leaves nothing in the temporary directory."""


def program(name: str) -> str:
    """Return the path of a program of the extra; without it, the test skips, or fails, as by `lacking`."""
    found = which(name, path=_PLACES)
    if found is None:
        lacking(f"{name} is not installed: pip install '.[clients]'")
    return found


def run(*command: str, cwd: Path, variables: Mapping[str, str] | None = None) -> str:
    """Run a program of the extra to its end, and return its output; a failure shows all of it."""
    done = subprocess.run(
        [program(command[0]), *command[1:]],
        cwd=cwd,
        env={**os.environ, "PATH": _PLACES, **_QUIET, **(variables or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def python_client(document: Path, folder: Path) -> None:
    """Have openapi-python-client make the package `mpsd_client` in a folder."""
    config = folder / "config.yml"
    config.write_text("post_hooks: []\ncontent_type_overrides:\n  application/x-ndjson: text/plain\n")
    run(
        "openapi-python-client", "generate", f"--path={document}", f"--output-path={folder / 'mpsd_client'}",
        "--meta=none", f"--config={config}", "--fail-on-warning", cwd=folder,
    )  # fmt: skip


_VALIDATOR: Final = """package validator

func Validate(interface{}) error { return nil }
"""


def go_client(document: Path, folder: Path) -> None:
    """Have OpenAPI Generator make the Go module `mpsdclient` in a folder.

    The generated code checks a choice of types by a library for field tags, which would come from the network. No check
    was requested for the values decoded here, so a stub that accepts everything replaces it.
    """
    parts = "apis,models,supportingFiles,apiTests=false,modelTests=false,apiDocs=false,modelDocs=false"
    run(
        "openapi-generator-cli", "generate", "-i", str(document), "-g", "go", "-o", str(folder),
        "--global-property", parts, "-p", "packageName=mpsdclient,withGoMod=true", cwd=folder,
    )  # fmt: skip
    (folder / "go.sum").unlink()
    validator = folder / "validator"
    validator.mkdir()
    (validator / "go.mod").write_text("module gopkg.in/validator.v2\n\ngo 1.23\n")
    (validator / "validator.go").write_text(_VALIDATOR)
    run("go", "mod", "edit", "-module=mpsdclient", "-replace=gopkg.in/validator.v2=./validator", cwd=folder)


def lines(said: str, beginning: str) -> Sequence[str]:
    return [line.removeprefix(beginning) for line in said.splitlines() if line.startswith(beginning)]
