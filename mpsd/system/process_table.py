"""Other processes of the node, looked at through psutil: which of them belong to a pipe directory, and as what."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Final

import psutil

from mpsd.core.model import ProcessIdentity
from mpsd.core.mps import daemon_flags
from mpsd.system import host_environment, process

CONTROL: Final = "nvidia-cuda-mps-control"
SERVER: Final = "nvidia-cuda-mps-server"


class ProgramKind(StrEnum):
    """What a process is to MPS."""

    DAEMON = "control daemon"
    FRONT_END = "front-end"
    SERVER = "server"


@dataclass(frozen=True, slots=True)
class MpsProcess:
    """A process of MPS on some pipe directory, with what the kernel says about it."""

    identity: ProcessIdentity
    part: ProgramKind
    uid: int
    executable: str
    arguments: tuple[str, ...]
    variables: dict[str, str]
    """Its CUDA_* environment, as it was started with."""
    started: datetime
    parent: int


def on_pipe_directory(pipe_directory: Path, program: Sequence[str]) -> list[MpsProcess]:
    """Return the MPS processes that were started with this pipe directory.

    `program` is the control program in use, in case it goes by another name than NVIDIA's. A process whose environment
    cannot be read is not among them: it belongs to another user, and mpsd has not the right to look. Nor is one to
    which the same path is another directory: it is in another container, which may have an mpsd of its own.
    """
    return [
        found
        for found in _mps_processes(tuple(program))
        if found.variables.get("CUDA_MPS_PIPE_DIRECTORY", "").rstrip("/") == str(pipe_directory)
        and not host_environment.hidden(found.identity.pid, [pipe_directory])
    ]


def _mps_processes(program: tuple[str, ...]) -> Iterator[MpsProcess]:
    for each in psutil.process_iter():
        try:
            with each.oneshot():
                part = kind_of(each.cmdline(), program)
                if part is None or each.status() == psutil.STATUS_ZOMBIE:
                    continue
                ticks = process.start_ticks(each.pid)
                variables = {name: value for name, value in each.environ().items() if name.startswith("CUDA_")}
                found = MpsProcess(
                    identity=ProcessIdentity(each.pid, ticks or 0),
                    part=part,
                    uid=each.uids().effective,
                    executable=each.exe().removesuffix(" (deleted)"),
                    arguments=tuple(each.cmdline()),
                    variables=variables,
                    started=datetime.fromtimestamp(each.create_time(), UTC),
                    parent=each.ppid(),
                )
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if ticks is not None:
            yield found


def kind_of(arguments: Sequence[str], program: tuple[str, ...]) -> ProgramKind | None:
    """Tell what a process is to MPS, by what it was started as; None for any other."""
    if not arguments:
        return None
    # A script is run by its interpreter, so that its own name stands second.
    names = {Path(argument).name for argument in arguments[:2]}
    if SERVER in names:
        return ProgramKind.SERVER
    if CONTROL in names or tuple(arguments[: len(program)]) == program:
        return ProgramKind.DAEMON if daemon_flags.is_daemon(arguments[1:]) else ProgramKind.FRONT_END
    return None


def started(pid: int) -> datetime | None:
    """Return when a process started, on the wall clock, for people; None when it is gone."""
    try:
        return datetime.fromtimestamp(psutil.Process(pid).create_time(), UTC)
    except psutil.NoSuchProcess:
        return None


def uid_of(pid: int) -> int | None:
    """Return a process's effective uid, or None when it is gone."""
    try:
        return psutil.Process(pid).uids().effective
    except psutil.NoSuchProcess:
        return None


def user_of(pid: int) -> tuple[int, int] | None:
    """Return a process's effective uid and gid, or None when it is gone."""
    try:
        found = psutil.Process(pid)
        return found.uids().effective, found.gids().effective
    except psutil.NoSuchProcess:
        return None


def command_of(pid: int) -> str:
    """Return a process's name for people, or an empty text when it is gone or hidden."""
    try:
        return psutil.Process(pid).name()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


@cache
def own_uid() -> int:
    """Return the effective uid that mpsd runs as, which it keeps for as long as it lives."""
    return os.geteuid()
