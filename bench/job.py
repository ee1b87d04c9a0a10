"""What a job of eight ranks costs with `mpsctl job`, beside the script that most sites hand out."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from bench.side_by_side import Result, in_turn, timed

_RANKS: Final = 8
_ROUNDS: Final = 5

_WRAPPER: Final = """\
#!/bin/bash
export CUDA_MPS_PIPE_DIRECTORY={root}/pipe CUDA_MPS_LOG_DIRECTORY={root}/log
if [ "$MPI_LOCALRANKID" -eq 0 ]; then mkdir -p {root}/pipe {root}/log; {control} -d; fi
sleep {sleep}
"$@"
if [ "$MPI_LOCALRANKID" -eq 0 ]; then echo quit | {control}; fi
"""
"""The script for one GPU, in a directory of its own instead of /tmp/nvidia-mps; `{sleep}` is the time for the start."""


def start(control: str, root: Path) -> Iterator[Result]:
    """Run `true` in eight ranks of MPICH on one GPU: with the script, which sleeps a second, and with `mpsctl job`.

    Without a GPU, neither has a client: the probes of `mpsctl job` are not in this figure.
    """
    root.mkdir(parents=True)
    wrapper = root / "mps-wrapper.sh"
    wrapper.write_text(_WRAPPER.format(root=root, control=control, sleep=1))
    wrapper.chmod(0o755)
    job = (sys.executable, "-P", "-m", "mpsd.cli.main", "job", "--simulate", "1", "--control", control, "--")
    ours, theirs = in_turn(partial(_run, root, job), partial(_run, root, (f"{wrapper}",)), rounds=_ROUNDS)
    yield Result(f"a job of {_RANKS} ranks, from the start of mpirun to its end", ours, theirs, at_most=10.0)


def _run(root: Path, wrapper: Sequence[str]) -> float:
    variables = {**os.environ, "TMPDIR": f"{root}", "MPSD_SOCKET": f"{root}/none"}
    command = ("mpirun.mpich", "-n", f"{_RANKS}", *wrapper, "true")
    return timed(lambda: subprocess.run(command, env=variables, stderr=subprocess.DEVNULL, check=True))
