"""Sends a canary to a control daemon: a client of mpsd's own, as the user whose server runs, within a deadline.

A place among the clients of a GPU is reserved for it. It has pipe access by a group of its own: other processes of its
user have none by that. It runs under the ceiling in force; the ceiling is opened only for an operator's command. It
launches no kernel, so mpsd may kill one that does not return, without harm to any client.
"""

import asyncio
import contextlib
import json
import math
import os
import random
import signal
from collections.abc import Callable
from typing import Any, Final

from mpsd.core.capabilities import Capability
from mpsd.core.errors import MpsdError
from mpsd.core.lifecycle import ANSWERED
from mpsd.core.model import Daemon, Known
from mpsd.core.mps.limits import PINNED_DEVICE_MEM_LIMIT, variables
from mpsd.core.supervision import wedge
from mpsd.core.supervision.wedge import CanaryEnd, Proof
from mpsd.daemon.control.pipe_access import NodePipeAccess
from mpsd.daemon.control.supervisor import Supervisor
from mpsd.daemon.leases.ceilings import Ceilings
from mpsd.system import clock
from mpsd.system.mps.canary import BEGINS, CanaryProgram
from mpsd.system.mps.control_pipe import ControlProgram
from mpsd.system.processes import capabilities, foreign_files, proc, process
from mpsd.system.processes.foreign_reader import USER_DATABASE, ForeignReader
from mpsd.system.processes.process import Process

_BECOME_A_USER: Final = frozenset({Capability.SETUID, Capability.SETGID})

_MOST_OUTPUT: Final = 65536

_CHECK: Final = 0.05
"""The average seconds between two checks whether anything hinders a canary."""

_START: Final = 20.0
"""Seconds that a canary may take until it begins to initialise CUDA, which a busy machine makes long."""

_SPARE: Final = 5
"""Seconds after its time at which a canary ends itself, if mpsd has not ended it."""

_LONGEST_ALARM: Final = 2**31 - 1
"""Seconds: the maximum of Python's signal.alarm."""


class Canaries:
    """The canaries of a node; each control daemon has at most one at a time."""

    def __init__(
        self,
        program: CanaryProgram,
        control: ControlProgram,
        ceilings: Ceilings,
        pipe_access: NodePipeAccess,
        reader: ForeignReader,
    ) -> None:
        self._program = program
        self._control = control
        self._ceilings = ceilings
        self._pipe_access = pipe_access
        self._reader = reader

    async def send(self, supervisor: Supervisor, seconds: float, *, by_command: bool) -> CanaryEnd:
        """Send one, and return its result, at the latest this many seconds after it began to initialise CUDA.

        Any user can cause a suspicion, so the ceiling is opened only for a canary that an operator has requested.
        """
        if (stopped := _stopped(supervisor)) is not None:
            return _nothing(stopped)
        uid = self._user(supervisor.snapshot())
        if uid != os.geteuid() and not capabilities.can_serve_users():
            return _unable(f"mpsd cannot become uid {uid} to send a canary: it has no CAP_SETUID")
        opened = (
            self._ceilings.opened_for_canary(supervisor.name, wedge.LIMITS) if by_command else contextlib.nullcontext()
        )
        try:
            async with opened:
                return await self._send_as(uid, supervisor, seconds)
        except MpsdError as error:
            return _nothing(_stopped(supervisor) or f"no canary could be sent: {error.detail}")
        except TimeoutError:
            return _nothing("no canary could be sent: the ceiling was not opened for it in time")
        except OSError as error:
            return _nothing(f"no canary could be started: {error.strerror}")

    @staticmethod
    def _user(daemon: Daemon) -> int:
        """Return the user of the running server, or the user who may get one; a canary of another user would wait."""
        server = next((each for each in daemon.servers if not each.orphan), None)
        uid = proc.real_uid(server.pid) if server is not None else None
        if uid is not None:
            return uid
        users = daemon.cannot_start_for
        return next(iter(users)) if users is not None and len(users) == 1 else os.geteuid()

    async def _send_as(self, uid: int, supervisor: Supervisor, seconds: float) -> CanaryEnd:
        if uid == os.geteuid():  # this uid always has pipe access
            return await self._send(supervisor, uid, (), seconds)
        groups = await self._reader.ask(USER_DATABASE, foreign_files.groups_of, uid)
        # Where the user database does not have the user, or does not answer, any group will do.
        become = f"{uid}:{groups.value[0] if isinstance(groups, Known) and groups.value else uid}"
        with self._pipe_access.opened_for_canary(supervisor.name, supervisor.gpu.uuid) as group:
            return await self._send(supervisor, uid, ("--as", f"{become}:{group}"), seconds)

    async def _send(self, supervisor: Supervisor, uid: int, become: tuple[str, ...], seconds: float) -> CanaryEnd:
        if (hindrance := _hindrance(supervisor)) is not None:
            return _nothing(hindrance)
        daemon = supervisor.snapshot()
        alarm = min(math.ceil(max(seconds, _START)) + _SPARE, _LONGEST_ALARM)
        reads, writes = os.pipe()
        # The canary stays until its stdin ends, at the latest with mpsd.
        with os.fdopen(reads, "rb") as stdin, os.fdopen(writes, "wb") as holding, process.memory_file("canary") as sink:
            canary = process.spawn(
                [*self._program.argv, "--alarm", str(alarm), *become],
                env=self._environment(daemon),
                stdin=stdin.fileno(),
                stdout=sink,
                allowed=_BECOME_A_USER if become else frozenset(),
            )
            supervisor.observer.canaries.add(canary.pid)
            unlisted: str | None = "it ended before the control daemon was asked"

            def output() -> bytes:
                return os.pread(sink, _MOST_OUTPUT, 0)

            try:
                answered, hindrance = await _watched(
                    canary,
                    seconds,
                    start=_START,
                    lines=lambda: output().splitlines(),
                    hindrance=lambda: _stopped_canary(canary) or _hindrance(supervisor),
                )
                if answered and not canary.is_gone():
                    if _answer(output()).get("mps") is None:
                        unlisted = await _unlisted(supervisor, canary, seconds)
                    holding.close()
                    await canary.gone_within(_SPARE)
            finally:
                await self._end(supervisor, canary)
            if hindrance is not None:
                return _nothing(hindrance)
            if not answered:
                because = f"canary {canary.pid} (uid {uid}) did not initialise CUDA within {seconds:g} s"
                return CanaryEnd(Proof.SILENCE, because)
            return _judge(output(), f"canary {canary.pid} (uid {uid})", unlisted)

    @staticmethod
    async def _end(supervisor: Supervisor, canary: Process) -> None:
        """Kill a remaining canary, and release its pid once the kernel may reuse it."""
        canary.signal(signal.SIGKILL)
        try:
            await canary.wait()
        finally:
            canary.close()
            supervisor.observer.canaries.discard(canary.pid)

    def _environment(self, daemon: Daemon) -> dict[str, str]:
        limits = variables(wedge.LIMITS)
        if not daemon.has_mem_limit:
            del limits[PINNED_DEVICE_MEM_LIMIT.variable]
        where = {"CUDA_MPS_PIPE_DIRECTORY": daemon.pipe_directory, "CUDA_VISIBLE_DEVICES": daemon.gpu}
        extra = {**self._program.variables, **where, **limits}
        return process.environment(extra, libraries=self._control.libraries)


async def _watched(
    canary: Process,
    seconds: float,
    *,
    start: float,
    lines: Callable[[], list[bytes]],
    hindrance: Callable[[], str | None],
) -> tuple[bool, str | None]:
    """Wait for a canary to begin to initialise CUDA, for `start` seconds, and then for its answer, or its end.

    `lines` returns the lines that it has printed. Returns whether it has answered or ended, and otherwise what hindered
    it, if anything: then its silence proves nothing. A hindrance at any time counts, since its user can stop it or its
    server, and resume it just before the end. The checks for that therefore come at random moments.
    """
    end, begun, hindered = clock.monotonic() + start, False, None
    while (left := end - clock.monotonic()) > 0:
        # Users cannot see these random numbers.
        ended = await canary.gone_within(min(left, random.uniform(0.5, 1.5) * _CHECK))  # noqa: S311
        said = lines()
        if ended or any(map(_is_answer, said)):
            return True, None
        hindered = hindered or hindrance()
        if proc.is_stopped(canary.pid):
            break  # its user has done that, and may never continue it
        if not begun and BEGINS.encode() in said:
            begun, end = True, clock.monotonic() + seconds
    if hindered is None and not begun:
        hindered = f"canary {canary.pid} did not begin to initialise CUDA within {start:g} s"
    return False, hindered


def _is_answer(line: bytes) -> bool:
    """Tell whether a line is the result of a canary; libcuda may print others."""
    return line.startswith(b"{")


def _answer(output: bytes) -> dict[str, Any]:
    """Return the result of a canary; empty where it printed none."""
    try:
        return dict(json.loads([*filter(_is_answer, output.splitlines())][-1]))
    except (ValueError, IndexError):
        return {}


async def _unlisted(supervisor: Supervisor, canary: Process, seconds: float) -> str | None:
    """Return why a living canary is not known to be a client of MPS, after this time at most; None if it is one."""
    try:
        async with asyncio.timeout(seconds):
            servers = await supervisor.servers_now()
    except TimeoutError:
        servers = None
    if servers is None:
        return "the control daemon did not name its clients"
    is_client = any(canary.pid in each.canaries for each in servers)
    return None if is_client else "it used CUDA without MPS: the control daemon does not name it as a client"


def _hindrance(supervisor: Supervisor) -> str | None:
    """Return why a canary without an answer proves nothing about the server now; None where it does."""
    if (stopped := _stopped(supervisor)) is not None:
        return stopped
    if supervisor.state not in ANSWERED:
        return f"the control daemon is {supervisor.state}"
    return supervisor.pipe.waits_for or None


def _stopped(supervisor: Supervisor) -> str | None:
    """Return which process is stopped, the control daemon or, as its user can do, a server; None when none is."""
    daemon = supervisor.process
    if daemon is not None and proc.is_stopped(daemon.pid):
        return f"control daemon {daemon.pid} is stopped (SIGSTOP), so that it answers no client"
    return supervisor.stopped_servers.trouble or None


def _stopped_canary(canary: Process) -> str | None:
    return f"canary {canary.pid} was stopped (SIGSTOP)" if proc.is_stopped(canary.pid) else None


def _nothing(because: str) -> CanaryEnd:
    return CanaryEnd(Proof.NOTHING, because)


def _unable(because: str) -> CanaryEnd:
    return CanaryEnd(Proof.NOTHING, because, unable=True)


def _judge(output: bytes, who: str, unlisted: str | None) -> CanaryEnd:
    """Return the evidence of the canary's output, if it has any.

    `unlisted` is why it may not have been a client of MPS, where CUDA did not tell.
    """
    # 1. Without an answer, the canary was ended or broke: this says nothing about the server.
    # 2. With an answer but no code of CUDA's, it did not get as far as CUDA: likewise.
    # 3. CUDA's own word about MPS (drivers that have it) replaces the guess from the list of clients.
    # 4. With both, the proof is that of the code; `LEFTOVER` comes from an earlier client, so another canary decides.
    said = _answer(output)
    if "ok" not in said:
        text = [each for each in output.decode(errors="replace").strip().splitlines() if each != BEGINS]
        return _nothing(f"{who} ended without an answer{f': {text[-1]}' if text else ''}")
    made, code, mps = said["ok"], said.get("code"), said.get("mps")
    if not made and code is None:
        return _unable(f"{who} could not use CUDA: {said.get('error')}")
    if mps is not None:
        unlisted = None if mps else "it used CUDA without MPS, as CUDA says"
    proof = wedge.proof(made=made, code=code, inside=unlisted is None)
    if not made:
        call = f"{said['call']} returned " if said.get("call") else ""
        because = f"got an error of CUDA: {call}{said.get('error')} ({code})"
        if code == wedge.LEFTOVER:
            because += ", which a client killed in mid-kernel leaves to the next one: another canary shows more"
        elif proof is Proof.NOTHING:
            because += ", which does not show whether the server serves clients"
    elif unlisted is not None:
        because = f"made a context, but {unlisted}"
    else:
        because = "initialised CUDA and made a context"
    return CanaryEnd(proof, f"{who} {because}", code == wedge.NOT_READY, mps=mps)
