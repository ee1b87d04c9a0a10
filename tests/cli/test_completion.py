"""Tab completion: the shells ask mpsctl, and mpsctl asks mpsd, as long as that causes no delay."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.cli.answering import answering, http
from tests.cli.conftest import ROOT
from tests.node import Node
from tests.tools import needed

pytestmark = pytest.mark.thorough

BASH: Final = """
set -u
source completions/bash/mpsctl
COMP_WORDS=($0) COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
[ "${0: -1}" != ' ' ] || COMP_WORDS+=('') COMP_CWORD=$((COMP_CWORD + 1))
_mpsctl_completion mpsctl
printf '%s\\n' "${COMPREPLY[@]}"
"""


def offered(line: str, environment: Mapping[str, str]) -> list[str]:
    """Return bash's completions of a line with the cursor at its end; nothing else may be printed."""
    script = [needed("bash", "bash"), "--norc", "-c", BASH, line]
    done = subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.fixture
def lease(node: Node) -> str:
    """Return the id of a lease of the test's own."""
    taken = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB", "pid": os.getpid(), "name": "a name"})
    return str(taken.json["id"])


def test_commands_and_options(in_path: dict[str, str]) -> None:
    """mpsctl's commands and options are completed without mpsd."""
    alone = {**in_path, "MPSD_SOCKET": "/nonexistent"}
    assert sorted(offered("mpsctl re", alone)) == ["release", "reload", "renew", "reset", "restart", "resume"]
    assert offered("mpsctl drain --t", alone) == ["--timeout"]


def test_names(in_path: dict[str, str], lease: str) -> None:
    """Leases, control daemons and GPUs are completed by the names that mpsd knows."""
    assert lease in offered("mpsctl show ", in_path)
    assert offered(f"mpsctl release {lease[:-2]}", in_path) == [lease]
    assert offered("mpsctl drain ", in_path) == ["gpu0", "gpu1"]
    assert offered("mpsctl admit --gpu ", in_path) == ["0", "1"]


def test_columns(in_path: dict[str, str]) -> None:
    """The columns of a list are completed, and those of another list are not."""
    alone = {**in_path, "MPSD_SOCKET": "/nonexistent"}
    assert offered("mpsctl clients --sort h", alone) == ["held"]
    assert offered("mpsctl leases --sort p", alone) == ["pid", "priority"]
    assert offered("mpsctl usage --by label:team --sort t", alone) == ["team"]
    assert offered("mpsctl gpus -o ", alone) == ["table", "wide", "name", "csv", "json"]


def test_behind_dashes(in_path: dict[str, str], lease: str) -> None:
    """Arguments behind `--` are completed as before it; the first word of a command is a program in PATH."""
    assert offered("mpsctl drain -- gp", in_path) == ["gpu0", "gpu1"]
    assert offered(f"mpsctl release -- {lease[:-2]}", in_path) == [lease]
    assert offered(f"mpsctl show --share 0 -- {lease[:-2]}", in_path) == [lease]
    assert "mpsctl" in offered("mpsctl run --threads 5 -- mpsct", in_path)
    assert offered("mpsctl help sta", in_path) == ["status"]


def test_the_socket_of_the_line(in_path: dict[str, str], node: Node) -> None:
    """The completion asks the same mpsd as the command would, wherever --socket stands."""
    elsewhere = {**in_path, "MPSD_SOCKET": "/nonexistent"}
    assert offered(f"mpsctl --socket {node.socket} hold gpu1", elsewhere) == ["gpu1"]
    assert offered(f"mpsctl hold --socket {node.socket} gpu1", elsewhere) == ["gpu1"]
    assert offered("mpsctl hold ", elsewhere) == []


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(http({"detail": "no", "code": "not_permitted"}, "403 Forbidden"), id="refused"),
        pytest.param(http({"daemons": [{"colour": "red"}]}), id="of another version"),
        pytest.param(http(["gpu0"]), id="of another shape"),
        pytest.param(b"SSH-2.0-OpenSSH_9.2\r\n", id="not HTTP"),
        pytest.param(None, id="silent"),
    ],
)
def test_whoever_answers(in_path: dict[str, str], short_tmp: Path, answer: bytes | None) -> None:
    """A listener that is no mpsd, refuses, or is silent results in no completions, and in no message."""
    path = short_tmp / "s"
    with answering(path, answer) as server:
        assert offered("mpsctl hold ", {**in_path, "MPSD_SOCKET": f"{path}"}) == []
        assert server.connections == 1


def test_fish(in_path: dict[str, str], lease: str) -> None:
    """Fish completes the same."""
    line = "source completions/fish/mpsctl.fish; complete --do-complete 'mpsctl show '"
    done = subprocess.run(
        [needed("fish", "fish"), "--no-config", "-c", line],
        cwd=ROOT, env=in_path, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.stderr == ""
    assert lease in done.stdout


ZSH: Final = """
compdef() { registered=$* }
_describe() { print -rl -- ${(P)3} }
compadd() { print -rl -- ${(P)@[-1]} }
words=(mpsctl drain gpu) CURRENT=3
source completions/zsh/_mpsctl
print -r -- "$registered"
"""
"""A three-line substitute for zsh's own completion, whose editor needs a terminal."""


def test_zsh(in_path: dict[str, str]) -> None:
    """Zsh completes the same, the first time too, and afterwards without loading the file again."""
    done = subprocess.run(
        [needed("zsh", "zsh"), "-f", "-c", ZSH],
        cwd=ROOT, env=in_path, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["gpu0:ready", "gpu1:ready", "_mpsctl_completion mpsctl"]


def test_where_the_program_is_gone(in_path: dict[str, str]) -> None:
    """Without an mpsd in PATH there are no completions, and no message."""
    alone = {**in_path, "PATH": "/usr/bin:/bin"}
    for script in (
        [needed("bash", "bash"), "--norc", "-c", "source completions/bash/mpsd"],
        [needed("fish", "fish"), "--no-config", "-c", "source completions/fish/mpsd.fish"],
        [needed("zsh", "zsh"), "-f", "-c", "source completions/zsh/_mpsd; true"],
    ):
        done = subprocess.run(script, cwd=ROOT, env=alone, capture_output=True, text=True, check=False, timeout=60)
        assert (done.stdout, done.stderr) == ("", ""), script
