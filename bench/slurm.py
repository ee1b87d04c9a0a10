"""mpsd's hooks in a real Slurm cluster, beside hooks that do nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.side_by_side import Result, in_turn, timed
from tests import launchers
from tests.fork_server import running_fork_server
from tests.harness import wait_until
from tests.slurm.site import HOOKS, Site, site

_JOBS: Final = 10
_ROUNDS: Final = 5


def hooks(control: str, root: Path) -> Iterator[Result]:
    """Measure the time of a job with a share of a GPU, one after the other, from its submission to the end of Epilog.

    Three hooks of a shell that do nothing are the floor.
    """
    if (absent := launchers.missing("slurmctld", "slurmd", "srun", "munged")) is not None:
        raise SystemExit(f"{absent}; or leave this one out: --only")
    root.mkdir(parents=True, mode=0o711)
    root.parent.chmod(0o711)
    with (
        running_fork_server() as forks,
        site(root / "a", forks, control=Path(control)) as ours,
        site(root / "b", forks) as theirs,
    ):
        for name in HOOKS.values():
            (theirs.cluster.place / "hooks" / name).write_text("#!/bin/sh\nexit 0\n")
        ours_took, theirs_took = in_turn(lambda: _job(ours), lambda: _job(theirs), rounds=_ROUNDS)
        yield Result("a job with a share of a GPU", ours_took, theirs_took, at_most=3)


def _job(at: Site) -> float:
    """Return the seconds of one of several jobs."""
    return sum(timed(lambda: _run(at)) for _ in range(_JOBS)) / _JOBS


def _run(at: Site) -> None:
    at.cluster.run("ann", "srun", "--gres=mps:25", "true")
    wait_until(lambda: at.cluster.node_state() == "idle", what="Epilog to have ended")
