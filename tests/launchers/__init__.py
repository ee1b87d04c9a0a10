"""Programs that start the processes of a job, or keep a program running: Slurm, Open MPI, MPICH, supervisord."""

import shutil
from typing import Final

_PACKAGES: Final = {
    "mariadbd": "mariadb-server-core",
    "mpirun.mpich": "mpich",
    "mpirun.openmpi": "openmpi-bin",
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurmdbd": "slurmdbd",
    "srun": "slurm-client",
    "supervisord": "supervisor",
}
"""Debian's package of each program."""

_PLACES: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"
"""Where these programs are: an ordinary user's PATH may lack the directories of daemons."""


def missing(*programs: str) -> str | None:
    """Return what to install, so that all of these programs are here, or None."""
    absent = [_PACKAGES[each] for each in programs if shutil.which(each, path=_PLACES) is None]
    return f"apt-get install {' '.join(absent)}" if absent else None
