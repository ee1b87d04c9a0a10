"""The request for a lease: what the terminal shows of the wait, and the release where its user never sees it."""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from mpsd.cli.command import note
from mpsd.cli.options import given
from mpsd.cli.render import lack, numbers_of_gpus, plural, span
from mpsd.cli.terminal import Progress, raised_signals
from mpsd.cli.users import name_of
from mpsd.client import Client, waiting
from mpsd.client.connection import DEADLINE
from mpsd.core.errors import MpsdError

if TYPE_CHECKING:
    from mpsd.client import answer_types

_LONGEST_PAUSE: Final = 16.0
"""Maximum seconds between two queries of the queue. The longer the queue, the more each query costs mpsd."""

_LOOK: Final = 2.0
"""Seconds for one query, which may not delay the user."""


_LEFT: Final = {
    True: "the place in the queue is given up",
    False: "no lease was taken out",
    None: "mpsd does not answer now: it gives up the place when the caller is gone (admission.hang_up_grace)",
}
"""What became of the place of an interrupted wait, by whether there was one."""


def check_share(options: Mapping[str, object]) -> None:
    """Refuse a request that says no share. Raises InvalidRequestError."""
    missing = [each for each in ("threads", "memory") if options.get(each) is None]
    if missing and options.get("fraction") is None:
        from mpsd.cli.leases.meant import no_share

        raise no_share(missing)


def take(api: Client, options: Mapping[str, object], *, wait: float) -> "answer_types.Lease":
    """Return the requested lease once it is granted, within `wait` seconds (`inf`: without a limit).

    mpsd fills in the defaults of options that are None. A signal that ends mpsctl gives up the place, or a lease that
    was granted at that very moment. Raises InvalidRequestError for a request without a share, the errors of
    `waiting.take`, and SignalledError.
    """
    check_share(options)
    request = given(**options)
    if not wait:
        return api.admit(request)
    request_id = str(request.get("request_id") or waiting.new_request_id("mpsctl"))
    start = time.monotonic()
    queue = _Queue(api, request_id)
    with raised_signals():
        try:
            lease = waiting.take(api, {**request, "request_id": request_id}, wait=wait, progress=queue)
        finally:
            queue.progress.erase()
    if queue.has_waited:
        note(f"granted after {span(time.monotonic() - start)} on GPU {numbers_of_gpus(lease)}")
    return lease


class _Queue(waiting.Progress):
    """A request's place in mpsd's queue, as far as a caller can see it."""

    def __init__(self, api: Client, request_id: str) -> None:
        self.progress = Progress()
        self.has_waited = False
        """Whether the user was informed of the wait."""
        self._api = api
        self._request_id = request_id
        self._pause = 1.0
        self._next_look = 0.0
        self._stands = self._brief = "waiting"
        self._lost = False

    def look(self) -> float:
        """Show the progress, and return the seconds until the next call.

        On a terminal, the line is updated; elsewhere, such as in the log of a job, the wait is reported once.
        """
        self._lost = False
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + self._pause
            self._pause = min(self._pause * 2, _LONGEST_PAUSE)
            with contextlib.suppress(MpsdError, KeyError):  # the connection that waits will report the same error
                self._see()
        if self.progress.is_live or not self.has_waited:
            self.progress.show(self._stands, brief=self._brief)
        self.has_waited = True
        return self.progress.tick

    def _see(self) -> None:
        with self._api.another(deadline=_LOOK) as api:
            answer = api.leases()
        own = self._own(answer)
        if own is None or (wait := own["wait"]) is None:
            return
        place = f"waiting in place {wait['position']}{_ahead(answer, wait['position'])}{lack(wait['waits_for'])}"
        self._stands = f"{place}: {wait['because']}"
        self._brief = f"{place}: {wait['because'].rpartition(', but ')[2]}"

    def lose(self, error: MpsdError, *, answered: bool) -> None:
        """Inform the user, once, that mpsd is gone, and of the error that interrupted the wait."""
        if not self._lost:
            self._lost = True
            until = "until it is back, which keeps the place in the queue" if answered else f"for {waiting.BRIDGED:g} s"
            self.progress.say(f"mpsd is gone ({error.detail}); retrying {until}")

    def leave(self, *, had_place: bool | None) -> None:
        """Inform the user of what became of the place."""
        self.progress.say(f"interrupted; {_LEFT[had_place]}")

    def _own(self, answer: "answer_types.Leases") -> "answer_types.Lease | None":
        """Return the present lease of the request; None where there is none."""
        return next((each for each in answer["leases"] if each["request_id"] == self._request_id), None)


def _ahead(answer: "answer_types.Leases", position: int) -> str:
    """Describe the requests before this place: their users, and the number of those that this caller may not see."""
    waiting = [each for each in answer["leases"] if each["wait"] is not None]
    users = Counter(
        name_of(each["owner"]["uid"]) for each in waiting if each["wait"] and each["wait"]["position"] < position
    )
    hidden = position - 1 - users.total()
    listed = [name if count == 1 else f"{name} ({count})" for name, count in users.most_common()]
    if hidden > 0:
        listed.append(plural(hidden, "request") + " of other users")
    return f" behind {', '.join(listed)}" if listed else ""


# -- a lease that nobody sees ------------------------------------------------------------------------------------------

_PRINTED: Final = b"."
_GUARD_PAUSES: Final = (0.0, 0.1, 0.4, 1.5)
"""Seconds before each attempt to reach mpsd, which may be restarting."""


@contextlib.contextmanager
def released_unless_printed(api: Client, request_id: str) -> Iterator[None]:
    """Release the lease of a request if this process dies within the context, by any signal.

    A second process does that, the guard: the kernel reports the death to it, whereas no signal handler can run at
    SIGKILL. Where no process can be forked, there is no guard.

    A lease that another process holds, such as the calling shell, does not end with mpsctl, and nobody would know of
    this one. mpsd itself ends a lease whose caller is gone before its answer is sent; from then until mpsctl has
    printed its output, the guard watches.
    """
    reader, writer = os.pipe()
    try:
        guard = os.fork()
    except OSError:
        guard = None
    if guard == 0:
        try:
            os.close(writer)
            _release_unless_printed(api, request_id, reader)
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.write(writer, _PRINTED)
        os.close(writer)
        os.close(reader)  # not before: a write without a reader would end this process
        if guard is not None:
            with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored, as it was when mpsctl was started
                os.waitpid(guard, 0)


def _release_unless_printed(api: Client, request_id: str, reader: int) -> None:
    """Wait until the parent process has printed its output; if it is gone before, release its lease."""
    os.setsid()  # Ctrl-C and the hangup of a terminal must not reach the guard
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # a reader of mpsctl's output reads until all copies are closed
        os.dup2(nowhere, stream)
    api.close()  # mpsd notices the end of the caller when all copies are closed
    if os.read(reader, 1) == _PRINTED:
        return
    for pause in _GUARD_PAUSES:
        time.sleep(pause)
        with contextlib.suppress(MpsdError):
            waiting.give_up(api, request_id, deadline=DEADLINE)
            return  # a request that mpsd reads later has no caller, and gets no lease
