"""The simulator's control program: control daemon and front-end in one, as NVIDIA's `nvidia-cuda-mps-control` is.

Run as `python -m mpsd.simulator.control [--driver BRANCH] [--gpus DIRECTORY] [-f [-multiuser-server]]`. With `-f` it is
a control daemon in the foreground and logs to stdout; without, a front-end that reads commands from stdin until its
end. It takes its directories from the same variables as NVIDIA's, imitates one driver branch, 555 unless `--driver`
names another, and has no GPU unless `--gpus` names the directory of simulated ones (see `devices`).

A front-end is started for each conversation, so this module and `front_end` import next to nothing: not even typing or
pathlib, each of which would cost as much as all the rest.
"""

import os
import sys

DEFAULT_BRANCH = 555
"""The driver branch that is imitated unless another is named, as mpsd.simulator.gpus.DRIVER_VERSION has it."""

_USAGE = "usage: python -m mpsd.simulator.control [--driver BRANCH] [--gpus DIRECTORY] [-f [-multiuser-server]]"


def program(branch: int = DEFAULT_BRANCH, gpus: str | None = None) -> tuple[str, ...]:
    """Return the command line that starts this program, from wherever and however mpsd is installed.

    The interpreter is told to look at neither the environment nor site-packages: nothing of them is needed, and without
    them it starts in half the time.
    """
    driver = () if branch == DEFAULT_BRANCH else ("--driver", str(branch))
    directory = () if gpus is None else ("--gpus", gpus)
    return (sys.executable, "-I", "-S", os.path.abspath(__file__), *driver, *directory)  # noqa: PTH100 - pathlib is too slow here


def main(arguments: list[str]) -> int:
    """Be a control daemon or a front-end; return the exit status."""
    branch = DEFAULT_BRANCH
    if arguments[:1] == ["--driver"] and len(arguments) > 1 and arguments[1].isdecimal():
        branch, arguments = int(arguments[1]), arguments[2:]
    gpus = None
    if arguments[:1] == ["--gpus"] and len(arguments) > 1:
        gpus, arguments = arguments[1], arguments[2:]
    if arguments in (["-f"], ["-f", "-multiuser-server"]):
        from mpsd.simulator import control_daemon  # noqa: PLC0415 - a front-end does without

        return control_daemon.main(branch, many_users=len(arguments) > 1, gpus=gpus)
    if arguments:
        sys.stderr.write(f"{_USAGE}\n")
        return 1
    from mpsd.simulator import front_end  # noqa: PLC0415 - the module path is set up below when this is a script

    return front_end.main()


if __name__ == "__main__":
    if not __package__:  # started by its path: only then is the package not on the way already
        sys.path.insert(0, __file__.rpartition("/mpsd/")[0])
    sys.exit(main(sys.argv[1:]))
