"""The program `mpsd-slurm`: the hooks of slurmd, its health check, and the service beside it.

slurm.conf names hooks by a path without arguments: the name of the program, or its first argument, says which it is,
and otherwise slurmd. Nothing of mpsd's is imported above: an upgrade may replace its files while a hook starts.
"""

import gc
import os
import sys
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from mpsd.core.slurm.settings import Settings

CONFIG: Final = "MPSD_SLURM_CONFIG"
"""The variable with the path of another configuration file; slurmd's hooks have none, unless slurmd was started so."""

_USAGE: Final = "usage: mpsd-slurm prolog|task-prolog|epilog|health|service"

_NAMES: Final = frozenset({"prolog", "task-prolog", "epilog", "health"})
"""What slurmd runs, by the names of the links to this program."""

_CONTEXTS: Final = {"prolog_slurmd": "prolog", "prolog_task": "task-prolog", "epilog_slurmd": "epilog"}
"""The hooks by slurmd's variable, for links of other names, as in a directory of Prologs. Run on 22.05 and 26.05."""


def main(arguments: list[str] | None = None) -> int:
    """Run one hook, and return its exit status: that of Prolog and Epilog is always 0, since Slurm drains the node."""
    if arguments is None:
        name = os.path.basename(sys.argv[0])
        told = _CONTEXTS.get(os.environ.get("SLURM_SCRIPT_CONTEXT", ""))
        arguments = [name] if name in _NAMES else sys.argv[1:] or ([told] if told else [])
    match arguments:
        case ["prolog" | "epilog" as name]:
            _leave(_as_root(name))
        case ["task-prolog"]:
            _leave(_as_user())
        case ["health" | "service" as name]:
            return _beside(name)
    sys.stderr.write(f"{_USAGE}\n")
    return 2


def _leave(status: int) -> NoReturn:
    """Exit at once: to tear the interpreter down takes a tenth of a hook's time."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _settings() -> "Settings":
    from mpsd.core.slurm.settings import FILE, Settings, parse

    try:
        with open(os.environ.get(CONFIG) or FILE, encoding="utf-8") as file:
            return parse(file.read())
    except FileNotFoundError:
        return Settings()


def _as_root(name: str) -> int:
    gc.disable()  # it ends before there is garbage, and slurmd waits for it
    try:
        from mpsd.slurm import hooks

        getattr(hooks, name)(_settings(), os.environ)
    except Exception as error:  # noqa: BLE001 - whatever it is: the node must not be drained
        hint = getattr(error, "hint", "")
        sys.stderr.write(f"mpsd: {error}" + (f"; {hint}" if hint else "") + "\n")
    return 0


def _as_user() -> int:
    gc.disable()
    try:
        from mpsd.slurm import hooks
    except ImportError as error:
        sys.stdout.write(f"print mpsd: {error}\n")
        return 1
    try:
        sys.stdout.write(hooks.task_prolog(_settings(), os.environ))
    except Exception as error:  # noqa: BLE001 - the user must see it, and slurmstepd drops what comes to stderr
        sys.stdout.write(hooks.refusal(error))
        return 1
    return 0


def _beside(name: str) -> int:
    from mpsd.core.errors import MpsdError
    from mpsd.slurm import service

    try:
        return (service.run if name == "service" else service.check_health)(_settings(), os.environ)
    except (MpsdError, OSError) as error:
        sys.stderr.write(f"mpsd-slurm: {error}\n")
        return error.exit_code if isinstance(error, MpsdError) else 1


if __name__ == "__main__":
    sys.exit(main())
