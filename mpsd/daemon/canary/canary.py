"""Sends a canary to a control daemon: a client of mpsd's own, as the user whose server is there, within a deadline.

It has a place of its own among the clients of a GPU, and, for as long as it is out, its uid has pipe access: that uid
has had a lease there, or its server would not be there. One that an operator sends has limits of its own, which are
opened for it as for a lease. It launches no kernel, so one that does not come back is killed, and nobody is harmed by
that (mps-facts B4.3).
"""

import asyncio
import contextlib
import json
import os
import random
import signal
from collections.abc import Iterator
from typing import Any, Final

from mpsd.core.capabilities import Capability
from mpsd.core.errors import MpsdError
from mpsd.core.model import Daemon, Server
from mpsd.core.mps.limits import PINNED_DEVICE_MEM_LIMIT, variables
from mpsd.core.supervision import wedge
from mpsd.core.supervision.wedge import CanaryEnd, Proof
from mpsd.daemon.control.pipe_access import NodePipeAccess
from mpsd.daemon.control.supervisor import Supervisor
from mpsd.daemon.leases.limit_gates import LimitGates
from mpsd.system import capabilities, clock, credentials, proc, process, process_table
from mpsd.system.canary import CanaryProgram
from mpsd.system.control_pipe import ControlProgram
from mpsd.system.process import Process

_BECOME_A_USER: Final = frozenset({Capability.SETUID, Capability.SETGID})

_MOST_OUTPUT: Final = 65536

_LOOK: Final = 0.05
"""Seconds between two looks at whether a canary is stopped, about."""


class Canaries:
    """The canaries of a node; one at a time is out on each control daemon."""

    def __init__(
        self, program: CanaryProgram, control: ControlProgram, gates: LimitGates, pipe_access: NodePipeAccess
    ) -> None:
        self._program = program
        self._control = control
        self._gates = gates
        self._pipe_access = pipe_access

    async def send(self, supervisor: Supervisor, seconds: float, *, opened: bool) -> CanaryEnd:
        """Send one, and return what came of it, after so many seconds at the latest from when it can connect.

        `opened` has the ceiling opened for it.
        """
        daemon = supervisor.snapshot()
        server = next((each for each in daemon.servers if not each.orphan), None)
        if (stopped := _stopped_server(daemon)) is not None:
            return _nothing(stopped)
        uid = self._user(daemon, server)
        if uid != process_table.own_uid() and not capabilities.can_serve_users():
            return _nothing(f"mpsd cannot become uid {uid} to send a canary: it has no CAP_SETUID")
        try:
            async with self._gates.opened_for_canary(daemon.name) if opened else contextlib.nullcontext():
                with self._pipe_access.opened_for_canary(daemon.name, daemon.gpu, uid):
                    return await self._send(supervisor, daemon, uid, seconds)
        except MpsdError as error:
            stopped = _stopped_server(supervisor.snapshot())
            return _nothing(stopped or f"no canary could be sent: {error.detail}")
        except OSError as error:
            return _nothing(f"no canary could be started: {error.strerror}")

    @staticmethod
    def _user(daemon: Daemon, server: Server | None) -> int:
        """Return the user whose server is there, or who may have one: another's client would wait for it to go."""
        uid = proc.real_uid(server.pid) if server is not None else None
        if uid is not None:
            return uid
        users = daemon.cannot_start_for
        return next(iter(users)) if users is not None and len(users) == 1 else process_table.own_uid()

    async def _send(self, supervisor: Supervisor, daemon: Daemon, uid: int, seconds: float) -> CanaryEnd:
        become: tuple[str, ...] = ()
        if uid != process_table.own_uid():
            become = ("--as", f"{uid}:{await asyncio.to_thread(credentials.group_of, uid)}")
        with _output() as sink:
            canary = process.spawn(
                [*self._program.argv, *become],
                env=self._environment(daemon),
                stdout=sink,
                allowed=_BECOME_A_USER if become else frozenset(),
            )
            supervisor.canaries.add(canary.pid)
            try:
                answered, was_stopped = await _watched(canary, seconds)
                if was_stopped:
                    return _nothing(f"canary {canary.pid} was stopped (SIGSTOP)")
                if not answered and (stopped := _stopped_server(supervisor.snapshot())) is not None:
                    return _nothing(stopped)
            finally:
                await self._end(supervisor, canary)
            if not answered:
                because = f"canary {canary.pid} (uid {uid}) did not initialise CUDA within {seconds:g} s"
                return CanaryEnd(Proof.SILENCE, because)
            return _judge(os.pread(sink, _MOST_OUTPUT, 0), canary.pid, uid)

    @staticmethod
    async def _end(supervisor: Supervisor, canary: Process) -> None:
        """Kill a canary that is left, and count its pid as anybody's once it is the kernel's to give again."""
        canary.signal(signal.SIGKILL)
        try:
            await canary.wait()
        finally:
            canary.close()
            supervisor.canaries.discard(canary.pid)

    def _environment(self, daemon: Daemon) -> dict[str, str]:
        limits = variables(wedge.LIMITS)
        if not daemon.has_mem_limit:
            del limits[PINNED_DEVICE_MEM_LIMIT.variable]
        where = {"CUDA_MPS_PIPE_DIRECTORY": daemon.pipe_directory, "CUDA_VISIBLE_DEVICES": daemon.gpu}
        extra = {**self._program.variables, **where, **limits}
        return process.environment(extra, libraries=self._control.libraries)


async def _watched(canary: Process, seconds: float) -> tuple[bool, bool]:
    """Wait for the end of a canary for so long; return whether it came, and whether it was seen stopped before.

    It runs as a user who can stop it, and have it go on a moment before its time is over: so it is looked at again and
    again, at moments that nobody knows.
    """
    end, was_stopped = clock.monotonic() + seconds, False
    while (left := end - clock.monotonic()) > 0:
        if await canary.gone_within(min(left, random.uniform(0.5, 1.5) * _LOOK)):  # noqa: S311 - a user cannot see it
            return True, False
        was_stopped = was_stopped or proc.is_stopped(canary.pid)
    return False, was_stopped


@contextlib.contextmanager
def _output() -> Iterator[int]:
    """Make a file in memory for what a program prints."""
    sink = os.memfd_create("canary")
    try:
        yield sink
    finally:
        os.close(sink)


def _stopped_server(daemon: Daemon) -> str | None:
    """Say which server is stopped, as its user may do to it; None when none is."""
    for each in daemon.servers:
        if proc.is_stopped(each.pid):
            return f"server {each.pid} is stopped (SIGSTOP), so that it answers no client"
    return None


def _nothing(because: str) -> CanaryEnd:
    return CanaryEnd(Proof.NOTHING, because)


def _judge(output: bytes, pid: int, uid: int) -> CanaryEnd:
    """Return what the canary's own words prove, if it said anything."""
    who = f"canary {pid} (uid {uid})"
    try:
        said: dict[str, Any] = json.loads(output.decode().splitlines()[-1])
        made = said["ok"]
    except (ValueError, IndexError, KeyError, TypeError):
        text = output.decode(errors="replace").strip().splitlines()
        return _nothing(f"{who} ended without an answer{f': {text[-1]}' if text else ''}")
    if not made and said.get("code") is None:
        return _nothing(f"{who} could not use CUDA: {said.get('error')}")
    if not made:
        call = f"{said['call']} returned " if said.get("call") else ""
        return CanaryEnd(Proof.ERROR, f"{who}: {call}{said.get('error')} ({said['code']})")
    if said.get("mps") is False:
        return _nothing(f"{who} did not find the control daemon, and used CUDA without MPS")
    return CanaryEnd(Proof.CONTEXT, f"{who} initialised CUDA and made a context")
