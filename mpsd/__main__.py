"""The program `mpsd`, and the one place that puts the house together: `run`, `demo` and `check`.

What each command needs is imported when it runs, so that `mpsd --help` costs nothing.
"""

import signal
import sys

if __name__ == "__main__" or sys.argv[0].endswith("/mpsd"):
    # A reload that is asked for before mpsd can do it waits until then; the usual action would end mpsd. Everything
    # that is imported below takes its time, so this comes first, and only where this is the program that runs.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mpsd import __version__
from mpsd.core.errors import ConfigurationError, MpsdError, OperatorError
from mpsd.core.sanitize import plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpsd.core.settings import Settings
    from mpsd.daemon.service import Plan


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mpsd")
def cli() -> None:
    """Supervise NVIDIA MPS on this node: run a control daemon for each GPU, verify its limits, and admit clients.

    Use mpsctl to query and control a running mpsd.
    """


_CONFIG = click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Configuration file.  [default: /etc/mpsd/mpsd.toml, if it exists]",
)


@cli.command()
@_CONFIG
@click.option(
    "--root",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write everything under DIR.",
)
@click.option("--simulate", type=click.IntRange(1, 64), metavar="N", help="Simulate N GPUs instead of using NVML.")
@click.option(
    "--control", metavar="PROGRAM", help="The control program.  [default: NVIDIA's; with --simulate, the simulator's]"
)
@click.option(
    "--stop-daemons-on-exit",
    is_flag=True,
    help="On SIGTERM or SIGINT, stop admission, and stop each control daemon once it has no leases and no"
    " clients. A second signal ends mpsd at once and leaves the remaining control daemons running.",
)
@click.option(
    "--stop-daemons",
    is_flag=True,
    help="Adopt the control daemons of an earlier mpsd, stop admission, stop each control daemon once it has no"
    " leases and no clients, then exit. A signal ends mpsd earlier and leaves the remaining control daemons"
    " running.",
)
def run(
    config: Path | None,
    root: Path | None,
    simulate: int | None,
    control: str | None,
    *,
    stop_daemons_on_exit: bool,
    stop_daemons: bool,
) -> None:
    """Run the service in the foreground.

    Logs go to stderr: text on a terminal, structured fields in the journal, JSON elsewhere. SIGTERM ends mpsd and
    leaves the control daemons running: the next mpsd adopts them. SIGHUP reloads the configuration.
    """
    import os
    from dataclasses import replace

    from mpsd.daemon.http.startup_refusal import answer_refused_start
    from mpsd.daemon.service import StopDaemons
    from mpsd.system.configuration import read_configuration
    from mpsd.system.notify import ServiceManager

    def read() -> "Settings":
        settings = read_configuration(config)
        return settings if root is None else settings.under(root.absolute())

    def wanted() -> "Settings | str":
        try:
            return read()
        except ConfigurationError as error:
            return error.detail

    manager = ServiceManager.take(os.environ)
    drains = stop_daemons or stop_daemons_on_exit
    while True:
        try:
            plan = _plan(read(), read, simulate=simulate, control=control, private=root is not None)
            stop = StopDaemons.DRAIN if drains else StopDaemons.NEVER
            return _serve(replace(plan, stop_daemons=stop, stop_now=stop_daemons, manager=manager))
        except MpsdError as error:
            if error.exit_code != OperatorError.exit_code:
                raise  # the next mpsd may be luckier, and whoever waits is its caller
            _say(error)
            manager.notify(f"STATUS=refused: {plain(error.detail)}")
            if manager.listener is None or not answer_refused_start(manager.listener, error, wanted):
                sys.exit(error.exit_code)


def _plan(
    settings: "Settings", reread: "Callable[[], Settings]", *, simulate: int | None, control: str | None, private: bool
) -> "Plan":
    from mpsd.core.capabilities import DAEMON
    from mpsd.daemon.service import Plan
    from mpsd.simulator.control import program as control_program
    from mpsd.simulator.gpus import SimulatedGpus
    from mpsd.system import driver, rundir
    from mpsd.system.canary import CanaryProgram
    from mpsd.system.control_pipe import ControlProgram
    from mpsd.system.gpu import NvmlGpus

    gpus = settings.paths.runtime_dir / "simulated"
    canary = CanaryProgram()
    if simulate is not None and control is None:
        found = None
        program = ControlProgram(control_program(gpus=str(gpus)))
        client = (sys.executable, "-I", "-m", "mpsd.simulator.client")
        canary = CanaryProgram(client, {"MPSD_SIMULATED_GPUS": str(gpus)})
    else:
        found = driver.find(control or settings.daemon.control, settings.daemon.driver_root)
        linked = rundir.libraries(settings) if found.libraries is not None else None
        program = ControlProgram((str(found.control),), found.directories, linked, DAEMON)
    nvml = None if found is None else found.nvml
    return Plan(
        settings=settings,
        program=program,
        canary=canary,
        source=(lambda: SimulatedGpus(simulate, directory=gpus)) if simulate is not None else (lambda: NvmlGpus(nvml)),
        driver=found,
        simulated=simulate is not None,
        private=private,
        reread=reread,
    )


@cli.command()
@_CONFIG
def check(config: Path | None) -> None:
    """Validate the configuration, print the effective settings as TOML, and exit with 0 or 78.

    Comments at the end show where NVIDIA's driver was found.
    """
    from mpsd.core.roles import unknown_names
    from mpsd.core.settings import document
    from mpsd.system import driver, rundir
    from mpsd.system.configuration import read_configuration

    settings = read_configuration(config)
    rundir.check(settings, ["gpu0"], private=False)
    rundir.check_acl_support(settings)
    click.echo(document(settings), nl=False)
    try:
        facts = driver.find(settings.daemon.control, settings.daemon.driver_root).facts()
    except ConfigurationError as error:
        facts = {"driver": f"{error.detail}; {error.hint}"}
    facts["roles and quotas"] = unknown_names(settings.names)
    for part, where in facts.items():
        if where:
            click.echo(f"# {part}: {plain(where)}")


@cli.command()
def demo() -> None:
    """Run a simulated node with two GPUs in a private directory, and print commands to try.

    The directory is removed at the end.
    """
    import os
    import tempfile
    from dataclasses import replace

    from mpsd.core.settings import Settings
    from mpsd.daemon.service import StopDaemons
    from mpsd.system.notify import ServiceManager

    with tempfile.TemporaryDirectory(prefix="mpsd-demo-") as root:
        settings = Settings().under(Path(root))
        plan = _plan(settings, lambda: settings, simulate=2, control=None, private=True)
        client = f"{sys.executable} -m mpsd.simulator.client"
        what_to_try = _WHAT_TO_TRY.format(socket=settings.socket, mpsctl=_mpsctl(), client=client)
        plan = replace(plan, stop_daemons=StopDaemons.AT_ONCE, announce=lambda: click.echo(what_to_try))
        _serve(replace(plan, manager=ServiceManager.take(os.environ)))


def _serve(plan: "Plan") -> None:
    """Run the service."""
    from mpsd.daemon.service import serve
    from mpsd.system import event_loop

    event_loop.run(serve(plan))


_WHAT_TO_TRY = """\
A simulated node with 2 GPUs is running. In a second terminal:

    export MPSD_SOCKET={socket}
    {mpsctl} status
    {mpsctl} run --threads 25 --memory 2GiB -- env | grep CUDA
    {mpsctl} run --threads 25 --memory 2GiB -- {client}    # say: alloc 1GiB
    {mpsctl} run --fraction 0.5 -- sleep 60 &
    {mpsctl} leases
    {mpsctl} run --threads 80 --memory 2GiB --gpu 0 -- true

Ctrl-C ends the node and removes its files.
"""


def _mpsctl() -> str:
    """Return how to call mpsctl from another terminal: by its name if that is found there, by its path otherwise."""
    import shutil

    beside = Path(sys.argv[0]).absolute().with_name("mpsctl")
    return "mpsctl" if shutil.which("mpsctl") or not beside.exists() else str(beside)


def _priority() -> str:
    """Return what has the journal take a line for an error, where stderr leads there. Source: sd-daemon(3)."""
    import os

    from mpsd.system.journal import is_behind

    return "<3>" if is_behind(sys.stderr.fileno(), os.environ.get("JOURNAL_STREAM", "")) else ""


def _say(error: MpsdError) -> None:
    """Say what went wrong: one sentence, its code, and a hint."""
    from mpsd.system.log_output import LogOutput

    output, priority = LogOutput(sys.stderr.fileno()), _priority()
    for line in (f"mpsd: {plain(error.detail)} [{error.code}]", f"  hint: {plain(error.hint)}"):
        output.write([f"{priority}{line}\n".encode(errors="backslashreplace")])
    output.close(0.5)


def main() -> None:
    """Run the program; an error of ours is said, and not raised."""
    try:
        cli(prog_name="mpsd")
    except MpsdError as error:
        _say(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
