"""One rank of a job, or the command around its launcher: probes MPS, waits for the others, and runs its program.

mpsctl remains the parent of the program, so that the job can end it. The program ends with mpsctl, however that ends.
"""

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Final

from mpsd.cli.command import note
from mpsd.cli.job.channel import Channel, Message
from mpsd.cli.job.descendants import end_descendants
from mpsd.core.errors import JobFailedError, MpsdError, error_named
from mpsd.system.processes import foreground, parentage

_PARENT_ENDED: Final = signal.SIGRTMAX
"""The signal by which the kernel reports the end of the launcher: one that nobody else sends."""

_GRACE: Final = 10.0
"""Seconds from SIGTERM to SIGKILL."""

_STOPPED: Final = 60.0
"""Seconds for the end of the job's mpsd, for which its last rank waits."""


class LostError(Exception):
    """The keeper had ended before it heard of this rank; another one may be started."""


def run(
    channel: Channel, request: Message, command: Sequence[str], variables: Mapping[str, str], *, outer: bool
) -> int:
    """Join the job with this request, run the command once all ranks are ready, and return its exit status.

    `outer`: it is the command around the launcher. Raises LostError, the MpsdError that all ranks get, and OSError
    where the command cannot be started.
    """
    parentage.adopt_orphans()
    launcher = os.getppid()
    if not outer:
        signal.signal(_PARENT_ENDED, lambda *_: _end_with(launcher))
        parentage.tell_of_parents_end(_PARENT_ENDED)
        _end_with(launcher)
    channel.tell(**request)
    try:
        return _run(channel, _await(channel, first=True), command, variables, launcher=launcher, outer=outer)
    except MpsdError as error:
        channel.tell(ended=error.exit_code)
        _await_end(channel)
        raise


def _run(
    channel: Channel,
    offer: Message,
    command: Sequence[str],
    variables: Mapping[str, str],
    *,
    launcher: int,
    outer: bool,
) -> int:
    environment = {name: value for name, value in variables.items() if name not in offer["unset"]}
    environment |= offer["environment"]
    if offer["probe"]:
        _probe(channel, offer["probe"], environment)
    channel.tell(ready=True)
    _await(channel)
    overseer = _Overseer(channel, launcher, outer=outer)
    number = signal.SIGTERM if outer else signal.SIGKILL
    try:
        status = foreground.run_overseen(
            command, environment, overseer, bind=parentage.bound(number), heeded=frozenset({_PARENT_ENDED})
        )
    finally:
        end_descendants(_GRACE if overseer.failed is None else overseer.left)
    if overseer.failed is not None:
        raise overseer.failed
    channel.tell(ended=status)
    _await_end(channel)
    return status


def _end_with(launcher: int) -> None:
    """End where the launcher has ended; the thread that started mpsctl may have ended alone."""
    if os.getppid() != launcher:
        os._exit(128 + signal.SIGTERM)


def failure(message: Message) -> MpsdError:
    """Return the error that the keeper reports."""
    return error_named(message["code"], message["fail"], hint=message["hint"])


def _await(channel: Channel, *, first: bool = False) -> Message:
    """Return the next message that is more than a note. Raises MpsdError, and LostError before the first one."""
    while True:
        channel.wait()
        if (message := channel.hear()) is not None:
            if "fail" in message:
                raise failure(message)
            if "say" not in message:
                return message
            note(message["say"])
            first = False
        elif channel.is_over:
            if first:
                raise LostError
            raise _gone()


def _gone() -> JobFailedError:
    return JobFailedError(
        "the keeper of the job has ended, and its mpsd with it, so the job cannot use its GPUs any longer",
        hint="find out what killed it (dmesg shows what the kernel ended for lack of memory), and start the job again",
    )


def _await_end(channel: Channel) -> None:
    """Wait until the keeper has taken note; the last rank waits until nothing of the job is left on this node."""
    end = time.monotonic() + _STOPPED
    while not channel.is_over and (left := end - time.monotonic()) > 0:
        channel.wait(seconds=left)
        channel.hear()


# -- the probe ---------------------------------------------------------------------------------------------------------


def _probe(channel: Channel, probe: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a client of MPS, tell the keeper what CUDA says to it, and keep it until the keeper has verified it."""
    with foreground.beside(probe, environment) as printed:
        channel.tell(probe=_result(channel, printed.fileno()))
        _await(channel)


def _result(channel: Channel, printed: int) -> Message:
    """Return the result that a probe prints. Raises MpsdError where the keeper reports one first."""
    text = b""
    while not text.endswith(b"}\n"):
        if printed not in channel.wait(printed):
            if (message := channel.hear()) is not None and "fail" in message:
                raise failure(message)
            if channel.is_over:
                raise _gone()
        elif more := os.read(printed, 4096):
            text += more
        else:
            return {"ok": False, "error": "it ended without a result", "call": None}
    found: Message = json.loads(text.splitlines()[-1])
    return found


class _Overseer:
    """Hears the keeper while the program runs."""

    def __init__(self, channel: Channel, launcher: int, *, outer: bool) -> None:
        self.failed: MpsdError | None = None
        """Why the program is ended."""
        self._channel = channel
        self._launcher = launcher
        self._outer = outer
        self._kill_at: float | None = None

    @property
    def left(self) -> float:
        """Seconds that what remains of the program has until SIGKILL."""
        return _GRACE if self._kill_at is None else max(self._kill_at - time.monotonic(), 0.0)

    def fileno(self) -> int:
        return self._channel.fileno()

    def seconds(self) -> float | None:
        return None if self._kill_at is None else self.left

    def heed(self, number: int | None) -> signal.Signals | None:
        """Hear what the keeper says, and end the program where it says so, or where the launcher has ended."""
        if number == _PARENT_ENDED and not self._outer and os.getppid() != self._launcher:
            return self._fail(
                JobFailedError(
                    "the launcher of the job has ended", hint="find out what ended it, and start the job again"
                )
            )
        while not self._channel.is_over and (message := self._channel.hear()) is not None:
            if "fail" in message:
                return self._fail(failure(message))
            if "say" in message:
                note(message["say"])
        if self._channel.is_over and self.failed is None:
            return self._fail(_gone())
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            return signal.SIGKILL
        return None

    def _fail(self, error: MpsdError) -> signal.Signals | None:
        if self.failed is not None:
            return None
        self.failed, self._kill_at = error, time.monotonic() + _GRACE
        return signal.SIGTERM
