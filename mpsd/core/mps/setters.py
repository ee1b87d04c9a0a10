"""How limits are set at a control daemon: the command that sets each, the one that reads it back, what must come back.

Setting is not enough: a control daemon takes wrong values without a word, so a limit holds once it was read back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from mpsd.core.mps.commands import (
    TABLE,
    Command,
    Lines,
    command,
    get_default_active_thread_percentage,
    get_default_device_pinned_mem_limit,
    ordinal,
    refusal,
)
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setting(Generic[T]):
    """A value to be set: the command that sets it, the one that reads it back, and what must come back."""

    limit: str
    wanted: T
    setter: str
    getter: Command[T]

    @property
    def script(self) -> tuple[str, ...]:
        """What goes down the pipe."""
        return self.setter, self.getter.line

    @property
    def expects(self) -> int | None:
        """How many lines come back whatever becomes of it, or None when that is not certain before.

        A memory limit that the daemon ignored, or never knew of, reads back as silence, or as complaints of any length.
        """
        return 2 if self._setter_lines and self.getter.row.lines is Lines.ONE else None

    @property
    def _setter_lines(self) -> int:
        """A setter echoes the value now in force, or says nothing at all."""
        return 1 if TABLE[self.setter.split(" ", 1)[0]].lines is Lines.ONE else 0

    def read_back(self, lines: Sequence[str]) -> T:
        """Return what the getter said: the last line, after whatever the setter had to say."""
        refused = refusal(self.setter, lines)
        if refused is not None:
            raise refused
        return self.getter.parse(lines[self._setter_lines :])


def default_active_thread_percentage(wanted: ActiveThreadPercentage) -> Setting[int]:
    """Give the next server this percentage."""
    return Setting(
        "active_thread_percentage",
        wanted.tenths,
        f"set_default_active_thread_percentage {wanted}",
        get_default_active_thread_percentage(),
    )


def default_device_pinned_mem_limit(device: int, wanted: PinnedDeviceMemLimit | None) -> Setting[int | None]:
    """Give the next server this memory limit on the device with this ordinal; `None` takes a limit away."""
    value = "0" if wanted is None else wanted.grammar
    return Setting(
        "pinned_device_mem_limit",
        None if wanted is None else wanted.as_reported.bytes,
        f"set_default_device_pinned_mem_limit {ordinal(device)} {value}",
        get_default_device_pinned_mem_limit(device),
    )


# -- the limits of a server --------------------------------------------------------------------------------------------


def _parse_anything(command: str, lines: Sequence[str]) -> None:
    """Take whatever a setter for a server has to say: no server could be asked without a GPU what that is."""
    refused = refusal(command, lines)
    if refused is not None:
        raise refused


def set_active_thread_percentage(server: int, wanted: ActiveThreadPercentage) -> Command[None]:
    """Give the next clients of a server this percentage; what came of it, only `get_active_thread_percentage` says.

    Clients that are connected keep what they have (V2 in the fact sheet).
    """
    return command("set_active_thread_percentage", (server, str(wanted)), _parse_anything)


def set_device_pinned_mem_limit(server: int, device: int, wanted: PinnedDeviceMemLimit | None) -> Command[None]:
    """Give the next clients of a server this memory limit; what came of it, `get_device_pinned_mem_limit` says.

    It may be higher than the default (V2).
    """
    value = "0" if wanted is None else wanted.grammar
    return command("set_device_pinned_mem_limit", (server, ordinal(device), value), _parse_anything)
