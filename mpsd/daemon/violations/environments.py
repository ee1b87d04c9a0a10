"""The variables that clients were started with: read once for each client, beside the loop."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Final

from mpsd.core.enforcement import violations
from mpsd.core.enforcement.attribution import LEASE, TOKEN
from mpsd.core.model import Known, ProcessIdentity, Reading, Unknown
from mpsd.core.mps_facts import MAX_CONNECTIONS
from mpsd.core.signal import Signal
from mpsd.system import clock
from mpsd.system.processes import foreign_files, proc
from mpsd.system.processes.foreign_reader import ForeignReader, owner_of

_VARIABLES: Final = [*violations.VARIABLES, MAX_CONNECTIONS, LEASE, TOKEN]
"""The variables that are read from a client's environment."""

_AGAIN: Final = 10.0
"""Seconds until an environment is read again that did not come in time."""

_UNREAD: Final = Unknown("its environment is being read")


class Environments:
    """The environments of the present clients."""

    def __init__(self, reader: ForeignReader, ancestors_of: Callable[[ProcessIdentity], list[int]]) -> None:
        """Take a function that returns the ancestors whose environments tell about that of a process."""
        self.arrived = Signal[()]()
        """Another environment is known, or known to be unknown."""
        self._reader = reader
        self._ancestors_of = ancestors_of
        self._found: dict[ProcessIdentity, Reading[Mapping[str, str]] | None] = {}
        self._inherited: dict[ProcessIdentity, Mapping[str, str]] = {}
        """Of a process that shows no environment, that of its nearest ancestor that shows one."""
        self._again: dict[ProcessIdentity, float] = {}
        """When those are read again that did not come in time (monotonic clock)."""
        self._reading: dict[ProcessIdentity, asyncio.Task[None]] = {}

    def of(self, identity: ProcessIdentity) -> Reading[Mapping[str, str]] | None:
        """Return the environment of a client, as far as it is known by now; None for one that has ended."""
        due = self._again.get(identity)
        if identity not in self._reading and (identity not in self._found or (due and clock.monotonic() >= due)):
            self._reading[identity] = asyncio.get_running_loop().create_task(self._read(identity))
        return self._found.get(identity, _UNREAD)

    def inherited(self, identity: ProcessIdentity) -> Mapping[str, str]:
        """Return the environment of the nearest ancestor that shows one, where that of a client is unknown."""
        return self._inherited.get(identity, {})

    def is_unread(self, identity: ProcessIdentity) -> bool:
        """Tell whether the environment of a client is read for the first time: nothing is said of such a client yet."""
        return identity in self._reading and identity not in self._found

    def forget_all_but(self, clients: Collection[ProcessIdentity]) -> None:
        self._found = {each: found for each, found in self._found.items() if each in clients}
        self._inherited = {each: found for each, found in self._inherited.items() if each in clients}
        self._again = {each: due for each, due in self._again.items() if each in clients}

    async def finish(self, uid: int) -> bool:
        """Wait for the environments of a user's clients that are being read; tell whether there were any."""
        reading = [task for each, task in self._reading.items() if proc.real_uid(each.pid) == uid]
        if reading:
            await asyncio.wait(reading)
        return bool(reading)

    def close(self) -> None:
        """Read no more."""
        for each in self._reading.values():
            each.cancel()

    async def _read(self, identity: ProcessIdentity) -> None:
        try:
            owner = owner_of(identity.pid)
            answer = await self._reader.ask(owner, foreign_files.environment, identity.pid, _VARIABLES)
            if isinstance(answer, Known) and isinstance(answer.value, str):
                ancestors = self._ancestors_of(identity)
                near = await self._reader.ask(owner, foreign_files.first_environment, ancestors, _VARIABLES)
                self._inherited[identity] = near.value if isinstance(near, Known) else {}
        except OSError as error:
            answer = Unknown(f"/proc/{identity.pid}/environ cannot be read: {error.strerror}")
        finally:
            del self._reading[identity]
        self._again.pop(identity, None)
        if isinstance(answer, Unknown):
            self._again[identity] = clock.monotonic() + _AGAIN
            answer = Unknown(f"/proc/{identity.pid}/environ cannot be read: {answer.reason}")
        # The check of the start time comes last: then what was read by this pid was that of the client.
        found = foreign_files.known_of(answer)
        self._found[identity] = found if proc.may_live(identity) else None
        self.arrived.send()
