"""`python -m tests.upgrades`: store the files that this release leaves behind, for later releases."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from mpsd import __version__
from mpsd.cli.group import mpsctl
from mpsd.core.errors import catalogue
from mpsd.system import clock
from tests.harness import wait_until
from tests.node import Node
from tests.upgrades import RUNTIME, STATE, Release, dumped, releases

ROOT = "{root}"
BOOT = "{boot}"
"""Placeholder for the directory that it ran in, and for the boot: both differ where the files are opened."""


def main() -> None:
    """Run a node, use everything that is stored, and write the files."""
    release = Release(__version__)
    if release.folder.exists():
        raise SystemExit(f"{release.folder} is kept already, and a release does not change")
    with tempfile.TemporaryDirectory(prefix="mpsd-", dir="/tmp") as root:
        node = Node(Path(root), config='[daemon]\ncompute_mode = "exclusive-process"\n')
        try:
            document = node.start().get("/v1/openapi.json").json
            _live(node)
            release.folder.mkdir()
            _keep(node, release.folder)
        finally:
            node.clean_up()
    _write(release.folder / "openapi.json", _terse(document))
    _write(release.folder / "errors.json", {error.code: [error.status, error.exit_code] for error in catalogue()})
    _write(release.folder / "commands.json", commands())
    *_, before, _ = releases()
    (release.folder / "mpsd.toml").write_text(before.text("mpsd.toml"), encoding="utf-8")
    print(f"now add the settings that are new to {release.folder / 'mpsd.toml'}")


def _live(node: Node) -> None:
    """Request two leases, wait for a third, hold a control daemon; and end mpsd in this state."""
    holder = subprocess.Popen(["sleep", "60"])
    call = [sys.executable, "-m", "mpsd.cli.main", "--socket", f"{node.socket}", "admit", f"--pid={holder.pid}"]
    waiting = None
    try:
        first = {"threads": 25, "memory": "2GiB", "pid": holder.pid, "name": "first", "labels": {"a": "b"}}
        second = {"fraction": 0.25, "pid": holder.pid, "gpus": 2, "processes": 2, "ttl": 3600, "request_id": "second"}
        for request in (first, second):
            answer = node.request("POST", "/v1/leases", request)
            assert answer.status == 201, answer.json
        waiting = subprocess.Popen([*call, "--threads=90", "--memory=1GiB", "--name=third", "--wait=forever"])
        wait_until(lambda: len(node.get("/v1/leases").json["leases"]) == 3, what="the third to wait")
        assert node.request("POST", "/v1/daemons/gpu1/hold", {}).status == 202
        node.wait_for_state("gpu1", "held")
        node.end()
    finally:
        for process in (waiting, holder):
            if process is not None:
                process.kill()
                process.wait()


def _keep(node: Node, folder: Path) -> None:
    kept = [(node.root / "run", name) for name in RUNTIME] + [(node.root / "state", name) for name in STATE]
    for directory, name in kept:
        _write(folder / f"{name}.json", dumped(directory / name), str(node.root))
    for path in (node.root / "state").iterdir():
        if not path.name.startswith(STATE):
            text = path.read_text(encoding="utf-8")
            (folder / path.name).write_text(_placeless(text, str(node.root)), encoding="utf-8")


def _placeless(text: str, root: str) -> str:
    return text.replace(root, ROOT).replace(clock.boot_id(), BOOT).replace(sys.executable, "python3")


def _write(path: Path, value: object, root: str = "/nowhere") -> None:
    path.write_text(_placeless(json.dumps(value, indent=1), root) + "\n", encoding="utf-8")


def _terse(document: Any) -> Any:
    """Return a document of the API without its texts for readers."""
    match document:
        case dict():
            return {
                key: _terse(value)
                for key, value in document.items()
                if key not in {"description", "title"} or not isinstance(value, str)
            }
        case list():
            return [_terse(each) for each in document]
        case _:
            return document


def commands(group: click.Group = mpsctl) -> dict[str, list[str]]:
    """Return every command of mpsctl, with its options."""
    context = click.Context(group)
    found: dict[str, list[str]] = {}
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            found |= {f"{name} {below}": options for below, options in commands(command).items()}
        else:
            found[name] = sorted(option for each in command.params for option in each.opts if option.startswith("-"))
    return found


if __name__ == "__main__":
    main()
