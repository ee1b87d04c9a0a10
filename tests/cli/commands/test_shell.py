"""`mpsctl shell`: a shell that holds a lease, and shows it in its prompt."""

import os
import re
from pathlib import Path
from typing import Final

import pytest

from tests.harness import wait_until
from tests.node import Node
from tests.terminals import Terminal
from tests.tools import needed

_PROMPTS: Final = {"bash": "(LEASE) mine> ", "dash": "(LEASE) $ ", "zsh": "(LEASE)", "fish": "(LEASE) "}


@pytest.mark.thorough
@pytest.mark.parametrize("shell", _PROMPTS)
def test_shell(node: Node, in_path: dict[str, str], short_tmp: Path, shell: str) -> None:
    """The shell is the lease's holder and has its environment, whatever its start-up file sets; it ends the lease."""
    home = short_tmp / "home"
    home.mkdir()
    (home / ".bashrc").write_text("PS1='mine> '; unset CUDA_VISIBLE_DEVICES")
    (home / ".zshrc").touch()
    environment = {**in_path, "HOME": f"{home}", "TMPDIR": f"{home}", "SHELL": needed(shell, shell)}
    with Terminal.running(["mpsctl", "shell", "--fraction", "0.25"], environment) as terminal:
        said = terminal.wait_for(r"mpsctl: (lease-\w+): 25% and 19\.87GiB on GPU 0, until you leave this shell")
        lease = said.group(1)
        start = terminal.wait_for(re.escape(_PROMPTS[shell].replace("LEASE", lease)), behind=said.end()).end()
        terminal.type('echo "[$MPSD_LEASE|$CUDA_VISIBLE_DEVICES]"\n')
        found = node.get(f"/v1/leases/{lease}").json
        terminal.wait_for(re.escape(f"[{lease}|{found['gpus'][0]}]"), behind=start)
        assert found["owner"]["pid"] == terminal.process.pid
        terminal.type("mpsctl show -o json | grep '\"id\"'; mpsctl renew --ttl 1h -o json | grep expires\n")
        terminal.wait_for(rf'"id": "{lease}"', behind=start)
        terminal.wait_for(r'"expires": "', behind=start)
        terminal.type("exit\n")
        terminal.wait_for_the_end()
    wait_until(lambda: node.get(f"/v1/leases/{lease}").json["state"] == "ended", what="the lease to end")


def test_no_room(node: Node) -> None:
    """Without a lease there is no shell, and the exit status gives the reason."""
    done = node.mpsctl("shell", "--threads", "10", "--memory", "900GiB", env={**os.environ, "SHELL": "/bin/false"})
    assert (done.returncode, done.stdout) == (65, "")
    assert "[never_fits]" in done.stderr
