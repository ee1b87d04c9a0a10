"""The program `mpsd`, and the one place that assembles its parts: `run`, `stop`, `demo` and `check`.

Each command imports its parts when it runs, so that `mpsd --help` is fast.
"""

import os
import signal
import sys

from mpsd import __version__, find_own_libraries_first, keep_rich_out

if __name__ == "__main__" or sys.argv[0].endswith("/mpsd"):
    # SIGHUP must wait until mpsd can reload; its default action would end mpsd. The imports below take time, so this
    # comes first, and only where this module is the running program.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    find_own_libraries_first(os.environ.get("PYTHONPATH", ""))

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from mpsd.cli.groups import Commands, add_examples
from mpsd.core.errors import ConfigurationError, ExhaustedError, MpsdError, OperatorError
from mpsd.core.sanitize import plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpsd.core.settings import Settings
    from mpsd.daemon.service import Plan


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
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


def _of_node(function: "Callable[..., None]") -> "Callable[..., None]":
    """Add the options that select a node to a command."""
    for option in (
        click.option(
            "--control",
            metavar="PROGRAM",
            help="The control program.  [default: NVIDIA's; with --simulate, the simulator's]",
        ),
        click.option(
            "--simulate", type=click.IntRange(1, 64), metavar="N", help="Simulate N GPUs instead of using NVML."
        ),
        click.option(
            "--root",
            type=click.Path(path_type=Path, file_okay=False),
            metavar="DIR",
            help="Write everything under DIR.",
        ),
        _CONFIG,
    ):
        function = option(function)
    return function


@cli.command()
@_of_node
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

    Logs go to stderr: text on a terminal, structured fields in the journal, JSON elsewhere. SIGTERM and Ctrl-C end mpsd
    and leave the control daemons running: the next mpsd adopts them, and `mpsd stop` stops them. SIGHUP reloads the
    configuration.
    """
    _run(config, root, simulate, control, drain=stop_daemons or stop_daemons_on_exit, stop_now=stop_daemons)


@cli.command()
@_of_node
def stop(config: Path | None, root: Path | None, simulate: int | None, control: str | None) -> None:
    """End mpsd, and stop its control daemons.

    An mpsd that `mpsd run` started is ended. Each control daemon is then stopped once it has no leases and no clients;
    Ctrl-C leaves those that are left running. The options are those that mpsd was started with. The service of systemd
    is stopped by systemd: systemctl start mpsd-stop-daemons.service.
    """
    from mpsd.system.host import event_loop, installation

    event_loop.run(installation.end(_settings(config, root).paths.runtime_dir))
    _run(config, root, simulate, control, drain=True, stop_now=True)


def _settings(config: Path | None, root: Path | None) -> "Settings":
    from mpsd.system.host.configuration import read_configuration

    settings = read_configuration(config)
    return settings if root is None else settings.under(root.absolute())


def _run(
    config: Path | None, root: Path | None, simulate: int | None, control: str | None, *, drain: bool, stop_now: bool
) -> None:
    keep_rich_out()
    from dataclasses import replace

    from mpsd.daemon.http.startup_refusal import answer_refused_start, exhausted
    from mpsd.daemon.service import StopDaemons
    from mpsd.system.host.notify import ServiceManager

    def read() -> "Settings":
        return _settings(config, root)

    def wanted() -> "Settings | str":
        try:
            return read()
        except ConfigurationError as error:
            return error.detail

    manager = ServiceManager.take(os.environ)
    while True:
        try:
            plan = _plan(read(), read, simulate=simulate, control=control, private=root is not None)
            stop = StopDaemons.DRAIN if drain else StopDaemons.NEVER
            plan = replace(plan, stop_daemons=stop, stop_now=stop_now, manager=manager, farewell=_say_what_is_left)
            return _serve(plan)
        except (MpsdError, OSError) as failure:
            error = exhausted(failure) or failure
            if isinstance(error, OSError) or error.exit_code not in {OperatorError.exit_code, ExhaustedError.exit_code}:
                raise  # the next mpsd may succeed
            _say(error)
            manager.notify(f"STATUS=refused: {plain(error.detail)}")
            if not answer_refused_start(manager.listener, error, wanted):
                sys.exit(error.exit_code)


def _plan(
    settings: "Settings", reread: "Callable[[], Settings]", *, simulate: int | None, control: str | None, private: bool
) -> "Plan":
    from mpsd.core.capabilities import DAEMON
    from mpsd.daemon.service import Plan
    from mpsd.simulator.control import program as control_program
    from mpsd.simulator.gpus import SimulatedGpus
    from mpsd.system.files import rundir
    from mpsd.system.gpus import driver
    from mpsd.system.gpus.gpu import NvmlGpus
    from mpsd.system.mps.canary import CanaryProgram
    from mpsd.system.mps.control_pipe import ControlProgram

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
        source=(lambda: SimulatedGpus(simulate, gpus)) if simulate is not None else (lambda: NvmlGpus(nvml)),
        driver=found,
        simulated=simulate is not None,
        private=private,
        reread=reread,
    )


@cli.command()
@_CONFIG
@click.option(
    "--explain", "explains", is_flag=True, help="Print what the configuration means for users, and not the settings."
)
def check(config: Path | None, *, explains: bool) -> None:
    """Validate the configuration, and print the effective settings.

    They are TOML; the exit status is 0, or 78 for an invalid configuration. Comments at the end show where NVIDIA's
    driver was found.
    """
    from mpsd.core.configuration.document import document
    from mpsd.core.configuration.explanation import explain
    from mpsd.core.roles import UNKNOWN_NAMES_HINT, unknown_names
    from mpsd.system.doctor import profiles
    from mpsd.system.files import rundir
    from mpsd.system.gpus import driver
    from mpsd.system.host import event_loop
    from mpsd.system.host.configuration import read_configuration, with_names
    from mpsd.system.mps import control_flags
    from mpsd.system.mps.control_pipe import ControlProgram

    settings = read_configuration(config)
    rundir.check(settings, ["gpu0"], private=False)
    rundir.check_acl_support(settings)
    named = event_loop.run(with_names(settings))
    if unknown := unknown_names(named.names):
        raise ConfigurationError(unknown, hint=UNKNOWN_NAMES_HINT)
    try:
        found = driver.find(settings.daemon.control, settings.daemon.driver_root)
    except ConfigurationError as error:
        facts = {"driver": f"{error.detail}; {error.hint}"}
    else:
        facts = found.facts()
        program = ControlProgram((str(found.control),), found.directories)
        event_loop.run(control_flags.check(program, settings))
    if explains:
        machine = event_loop.run(profiles.look(settings))
        for topic, said in explain(settings, serves_many=machine.serves_many).items():
            click.echo(f"{topic + ':':<13}{plain(said)}")
        return
    click.echo(document(settings), nl=False)
    for part, where in facts.items():
        if where:
            click.echo(f"# {part}: {plain(where)}")


@cli.command()
@click.option(
    "--no-shell", is_flag=True, help="Open no shell, print what to try, and run until Ctrl-C, as without a terminal."
)
@click.option("--until-eof", type=click.Path(path_type=Path), hidden=True)
def demo(*, no_shell: bool, until_eof: Path | None) -> None:
    """Run a simulated node with two GPUs, and open a shell to try it in.

    It needs no GPU and no rights. When the shell ends, so does the node, and its directory is removed.
    """
    import shutil
    import tempfile

    from mpsd import demo as show
    from mpsd.cli.absent import DEMO

    if until_eof is not None:
        _simulate(until_eof, until_eof=True, announce=lambda: click.echo("ready"))
        shutil.rmtree(until_eof, ignore_errors=True)  # the process that should do this may have been killed
        return
    with tempfile.TemporaryDirectory(prefix=DEMO, ignore_cleanup_errors=True) as name:
        root = Path(name)
        if no_shell or not (sys.stdin.isatty() and sys.stdout.isatty()):
            show.write_programs(root)
            _simulate(root, until_eof=False, announce=lambda: click.echo(show.what_to_try(root)))
        else:
            sys.exit(show.in_a_shell(root, os.environ))


def _simulate(root: Path, *, until_eof: bool, announce: "Callable[[], None]") -> None:
    """Run a simulated node in a directory until a signal, or the end of stdin; its log is a file there."""
    from mpsd.core.settings import Settings

    settings = Settings().under(root)
    plan = _plan(settings, lambda: settings, simulate=2, control=None, private=True)
    _serve_privately(plan, root, until_eof=until_eof, announce=announce)


def _serve_privately(plan: "Plan", root: Path, *, until_eof: bool, announce: "Callable[[], None]") -> None:
    """Run the service in a directory until a signal, or the end of stdin, with its control daemons."""
    import asyncio
    from dataclasses import replace

    from mpsd.daemon.service import StopDaemons
    from mpsd.demo import LOG
    from mpsd.system.host.notify import ServiceManager

    def announced() -> None:
        if until_eof:
            asyncio.get_running_loop().add_reader(0, lambda: signal.raise_signal(signal.SIGTERM))
        announce()

    plan = replace(plan, stop_daemons=StopDaemons.AT_ONCE, settle=True, announce=announced)
    stderr, log = os.dup(2), os.open(root / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    os.dup2(log, 2)
    try:
        _serve(replace(plan, manager=ServiceManager.take(os.environ)))
    finally:
        os.dup2(stderr, 2)


@cli.command(hidden=True)
@click.argument("root", type=click.Path(path_type=Path))
@click.option("--visible", help="CUDA_VISIBLE_DEVICES of the job.")
@click.option("--by-bus", is_flag=True, help="CUDA_DEVICE_ORDER of the job is PCI_BUS_ID.")
@click.option("--gpus", default="all", help="Those of these GPUs that the job takes.")
@click.option("--simulate", type=click.IntRange(1, 64), help="As for `mpsd run`.")
@click.option("--control", help="As for `mpsd run`.")
def job(root: Path, *, visible: str | None, by_bus: bool, gpus: str, simulate: int | None, control: str | None) -> None:
    """Run the service of one job, in a directory of its user, until the end of stdin; its control daemons end with it.

    The keeper of `mpsctl job` starts it.
    """
    from collections.abc import Sequence
    from dataclasses import replace

    from mpsd.cli.job import place
    from mpsd.core.model import Gpu
    from mpsd.core.programs import job as jobs
    from mpsd.core.settings import Settings
    from mpsd.system.gpus.chosen import ChosenGpus

    def choose(found: Sequence[Gpu]) -> Sequence[Gpu]:
        known = [jobs.JobGpu(each.index, each.uuid, each.name) for each in found]
        taken = jobs.chosen(gpus, jobs.visible(visible, known, by_bus=by_bus))
        uuids = {each.uuid for each in taken}
        return [each for each in found if each.uuid in uuids]

    settings = Settings().under(root)
    # No other user reaches the node of a job, and what its ranks do is all that its log is about.
    settings = replace(settings, api=replace(settings.api, mode=0o600, lines_per_uid=100_000))
    plan = _plan(settings, lambda: settings, simulate=simulate, control=control, private=True)
    source = plan.source
    plan = replace(plan, program=replace(plan.program, bound=True), source=lambda: ChosenGpus(source(), choose))
    try:
        _serve_privately(plan, root, until_eof=True, announce=lambda: click.echo("ready"))
    finally:
        place.remove_dead(root.parent)


_FAREWELL: Final = 1.0
"""Seconds for the last message on a terminal."""


def _say_what_is_left(left: int, of: int) -> None:
    """Report on a terminal the control daemons that keep running, and how to stop them."""
    import shlex
    from threading import Thread

    if left and sys.stderr.isatty():
        options = [each for each in sys.argv[2:] if each not in {"--stop-daemons", "--stop-daemons-on-exit"}]
        text = (
            f"mpsd: {left} of {of} control daemons keep running, with their clients; the next mpsd adopts them\n"
            f"  to stop them once they have no clients: {shlex.join(['mpsd', 'stop', *options])}\n"
        )
        # A full terminal without a reader would block mpsd for ever.
        writer = Thread(target=os.write, args=(sys.stderr.fileno(), text.encode()), daemon=True)
        writer.start()
        writer.join(_FAREWELL)


def _serve(plan: "Plan") -> None:
    """Run the service."""
    from mpsd.daemon.service import serve
    from mpsd.system.host import event_loop

    event_loop.run(serve(plan))


def _say(error: MpsdError) -> None:
    """Print an error: one sentence, its code, and a hint."""
    from mpsd.system.host.journal import is_behind
    from mpsd.system.host.log_output import LogOutput

    output = LogOutput(sys.stderr.fileno())
    # The prefix makes the journal record a line as an error. Source: sd-daemon(3).
    priority = "<3>" if is_behind(sys.stderr.fileno(), os.environ.get("JOURNAL_STREAM", "")) else ""
    for line in (f"mpsd: {plain(error.detail)} [{error.code}]", f"  hint: {plain(error.hint)}"):
        output.write(f"{priority}{line}\n".encode(errors="backslashreplace"))
    output.close(0.5)


add_examples(cli, "mpsd")


def main() -> None:
    """Run the program; an error of mpsd is printed, not raised."""
    try:
        status = cli(prog_name="mpsd", standalone_mode=False)
        sys.exit(status if isinstance(status, int) else 0)
    except click.Abort:  # Ctrl-C before it runs
        sys.exit(1)
    except click.UsageError as mistake:
        from mpsd.cli.mistakes import refusal

        error = refusal(mistake, "mpsd")
    except MpsdError as failure:
        error = failure
    _say(error)
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
