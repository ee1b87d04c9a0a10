"""The program `mpsd-slurm`: the hooks of slurmd.

slurm.conf names hooks by a path without arguments: the name of the program, or its first argument, says which it is.
"""

import os
import sys
from pathlib import Path
from typing import Final

from mpsd.core.errors import MpsdError
from mpsd.core.slurm.settings import FILE, Settings, parse

CONFIG: Final = "MPSD_SLURM_CONFIG"
"""The variable with the path of another configuration file; slurmd's hooks have none, unless slurmd was started so."""

_USAGE: Final = "usage: mpsd-slurm prolog|task-prolog|epilog"


def main(arguments: list[str] | None = None) -> int:
    """Run one hook, and return its exit status: that of Prolog and Epilog is always 0, since Slurm drains the node."""
    arguments = sys.argv[1:] if arguments is None else arguments
    match arguments:
        case ["prolog" | "epilog" as name]:
            return _as_root(name)
        case ["task-prolog"]:
            return _as_user()
    sys.stderr.write(f"{_USAGE}\n")
    return 2


def _settings() -> Settings:
    path = Path(os.environ.get(CONFIG) or FILE)
    try:
        return parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Settings()


def _as_root(name: str) -> int:
    from mpsd.slurm import hooks  # noqa: PLC0415 - a job without GPUs is told quickly

    try:
        getattr(hooks, name)(_settings(), os.environ)
    except Exception as error:  # noqa: BLE001 - whatever it is: the node must not be drained
        hooks.said(error, getattr(error, "hint", ""))
    return 0


def _as_user() -> int:
    from mpsd.slurm import hooks  # noqa: PLC0415

    try:
        sys.stdout.write(hooks.task_prolog(_settings(), os.environ))
    except MpsdError as error:
        hooks.said(error, error.hint)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
