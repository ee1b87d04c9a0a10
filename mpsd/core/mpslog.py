"""Lines of the control daemon's log, as values, and whose commands they show.

The log is where a stranger's hand can be seen: each conversation stands between `NEW UI` and `UI closed`, and the
daemon serves one at a time, so a conversation that opens with one of mpsd's marks is mpsd's and any other is somebody
else's.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from mpsd.core.commands import changes_something, is_mark

_LINE = re.compile(r"\[(?P<at>[0-9-]+ [0-9:.]+) +(?P<source>[A-Za-z ]+?) +(?P<pid>[0-9]+)\] (?P<text>.*)")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line: the daemon's local time, who wrote it (Control, Server, Other), its pid, the text."""

    at: str
    source: str
    pid: int
    text: str


def parse(line: str) -> LogLine | None:
    """Return the line as a value, or None when it has not the usual form."""
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    return LogLine(match["at"], match["source"], int(match["pid"]), match["text"])


class _Whose(StrEnum):
    NOBODYS = "nobody's"
    UNKNOWN = "unknown"
    OURS = "ours"
    FOREIGN = "foreign"


@dataclass(slots=True)
class ForeignHand:
    """Reads a log in pieces, and picks out the commands of others that can have changed something.

    Any local user can write to a control daemon, and so into its log, whatever mpsd writes. What it cannot write is the
    key, with which the nonces of mpsd's marks begin.
    """

    key: str = ""
    _whose: _Whose = _Whose.NOBODYS

    def seen(self, lines: Iterable[str]) -> tuple[str, ...]:
        """Return strangers' changing commands among these lines, which follow those seen before."""
        found = []
        for each in lines:
            line = parse(each)
            if line is None:
                continue
            if line.text == "NEW UI":
                self._whose = _Whose.UNKNOWN
            elif line.text == "UI closed":
                self._whose = _Whose.NOBODYS
            elif line.text.startswith("Cmd:"):
                command = line.text.removeprefix("Cmd:")
                if self._whose is _Whose.UNKNOWN:
                    self._whose = _Whose.OURS if is_mark(command, self.key) else _Whose.FOREIGN
                if self._whose is not _Whose.OURS and changes_something(command):
                    found.append(command)
        return tuple(found)
