"""The hooks where mpsd's own files are not there, or half of them: a package is being replaced, or is broken."""

import os
import subprocess
import sys

import pytest

_PROGRAM = "import sys; sys.modules[sys.argv[2]] = None; from mpsd.slurm.__main__ import main; main([sys.argv[1]])"


@pytest.mark.parametrize("missing", ["mpsd.slurm.hooks", "mpsd.core.errors", "mpsd.core.slurm.settings"])
@pytest.mark.parametrize(("hook", "status"), [("prolog", 0), ("epilog", 0), ("task-prolog", 1)])
def test_a_hook_without_a_module(hook: str, status: int, missing: str) -> None:
    """Prolog and Epilog drain no node, and TaskProlog has a word for the user."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, hook, missing],
        env={**os.environ, "SLURM_JOB_ID": "1", "SLURM_JOB_UID": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    said = done.stdout if hook == "task-prolog" else done.stderr
    assert said.startswith("print mpsd: " if hook == "task-prolog" else "mpsd: ")
    assert missing in said
    assert "Traceback" not in done.stderr
