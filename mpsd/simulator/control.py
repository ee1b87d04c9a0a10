"""The simulator's control program: control daemon and front-end in one, as NVIDIA's `nvidia-cuda-mps-control` is.

Run as `python -m mpsd.simulator.control [--driver BRANCH] [--gpus DIRECTORY] [-f [-multiuser-server]]`. With `-f` it is
a control daemon in the foreground and logs to stdout; without, a front-end that reads commands from stdin until its
end. It takes its directories from the same variables as NVIDIA's, imitates one driver branch, 555 unless `--driver`
names another, and has no GPU unless `--gpus` names the directory of simulated ones (see `devices`).

A front-end is started for each conversation, so this module and `front_end` import almost nothing: not even typing or
pathlib, each of which would cost as much as all the rest.
"""

import os
import sys

DEFAULT_BRANCH = 555
"""The driver branch that is imitated by default; mpsd.simulator.gpus.DRIVER_VERSION is of the same branch."""

KNOWS_MANY_USERS = 555
"""The first branch that knows -multiuser-server, and that answers an unknown flag with its usage; before, a call with
any other flags than `-f` alone is one of a front-end."""

_USAGE = (
    "usage: python -m mpsd.simulator.control [--driver BRANCH] [--gpus DIRECTORY] [-f]; see the nvidia-cuda-mps-control"
    " manual page"
)
"""Like that of NVIDIA's programs before 580, it does not name -multiuser-server."""


def program(branch: int = DEFAULT_BRANCH, gpus: str | None = None) -> tuple[str, ...]:
    """Return the command line that starts this program, wherever and however mpsd is installed.

    The interpreter ignores the environment and site-packages: the program needs neither, and starts in half the time
    without them.
    """
    driver = () if branch == DEFAULT_BRANCH else ("--driver", str(branch))
    directory = () if gpus is None else ("--gpus", gpus)
    return (sys.executable, "-I", "-S", os.path.abspath(__file__), *driver, *directory)  # noqa: PTH100 - pathlib is too slow here


def main(arguments: list[str]) -> int:
    """Run a control daemon or a front-end and return its exit status."""
    branch = DEFAULT_BRANCH
    if arguments[:1] == ["--driver"] and len(arguments) > 1 and arguments[1].isdecimal():
        branch, arguments = int(arguments[1]), arguments[2:]
    gpus = None
    if arguments[:1] == ["--gpus"] and len(arguments) > 1:
        gpus, arguments = arguments[1], arguments[2:]
    knows_many_users = branch >= KNOWS_MANY_USERS
    if arguments == ["-f"] or (arguments == ["-f", "-multiuser-server"] and knows_many_users):
        from mpsd.simulator import control_daemon  # noqa: PLC0415 - a front-end does not need it

        return control_daemon.main(branch, many_users=len(arguments) > 1, gpus=gpus)
    if arguments == ["-h"] or (arguments and arguments != ["-multiuser-server"] and knows_many_users):
        sys.stderr.write(f"{_USAGE}\n")
        return 1
    from mpsd.simulator import front_end  # noqa: PLC0415 - for a script, the module path is set up below

    return front_end.main()


if __name__ == "__main__":
    if not __package__:  # only when started by its path, the package is not in the module path
        sys.path.insert(0, __file__.rpartition("/mpsd/")[0])
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the interpreter's own end takes a tenth of a front-end's time
