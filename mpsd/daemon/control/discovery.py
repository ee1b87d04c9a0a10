"""Which control daemon has a pipe directory, and whether it is ours: by what the kernel says, never by a pid file."""

from dataclasses import dataclass

from mpsd.core.errors import ForeignDaemonError
from mpsd.core.model import DaemonProcess, ProcessIdentity
from mpsd.core.mps import daemon_flags
from mpsd.core.settings import Users
from mpsd.system import process_table
from mpsd.system.control_pipe import ControlProgram
from mpsd.system.process_table import MpsProcess, ProgramKind
from mpsd.system.rundir import DaemonPaths


@dataclass(frozen=True, slots=True)
class DiscoveredProcesses:
    """What was found on a pipe directory: our control daemon if it runs, and servers whose control daemon is dead."""

    daemon: DaemonProcess | None
    orphans: tuple[ProcessIdentity, ...]


def look(paths: DaemonPaths, program: ControlProgram, environment: dict[str, str]) -> DiscoveredProcesses:
    """Look for processes of MPS on a pipe directory.

    Ours is a control daemon that runs under mpsd's own uid, in the foreground, with just the CUDA environment that mpsd
    would give it; whether it serves many users is as it was configured when it was started. Raises ForeignDaemonError
    for any other: mpsd would fight it for the directory, and lose.
    """
    processes = process_table.on_pipe_directory(paths.pipe_directory, program.argv)
    daemons = [each for each in processes if each.part is ProgramKind.DAEMON]
    foreign = [each for each in daemons if not _ours(each, environment)]
    if foreign:
        stranger = foreign[0]
        raise ForeignDaemonError(
            f"pid {stranger.identity.pid} (uid {stranger.uid}, {stranger.executable}) is a control daemon on"
            f" {paths.pipe_directory} that mpsd did not start with its present configuration",
            hint=f"when its clients have exited: echo quit | CUDA_MPS_PIPE_DIRECTORY={paths.pipe_directory}"
            f" {program.argv[0]}; mpsctl reset {paths.pipe_directory.name}",
        )
    servers = [each for each in processes if each.part is ProgramKind.SERVER]
    if not daemons:
        return DiscoveredProcesses(None, tuple(each.identity for each in servers))
    ours = daemons[0]
    many_users = daemon_flags.users_of(ours.arguments) is Users.MANY
    found = DaemonProcess(ours.identity, ours.executable, str(paths.pipe_directory), ours.started, many_users)
    return DiscoveredProcesses(found, tuple(each.identity for each in servers if each.parent != ours.identity.pid))


def _ours(each: MpsProcess, environment: dict[str, str]) -> bool:
    wanted = {name: value for name, value in environment.items() if name.startswith("CUDA_")}
    known = daemon_flags.users_of(each.arguments) is not None
    return known and each.uid == process_table.own_uid() and each.variables == wanted
