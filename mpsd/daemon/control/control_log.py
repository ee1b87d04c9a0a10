"""The log of one control daemon and of its servers: followed as it is written, parsed, reported, and kept small.

The daemon writes its log through a FIFO, to which its servers write as well. With one user at a time, these run as the
user: one byte that the user writes there ends the log for good, and nothing else about the daemon changes (measured,
470.256.02 to 555.58.02). `LogSilence` notices that.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from math import inf
from typing import Final, NamedTuple

import msgspec

from mpsd.core.enforcement.server_health import ServerHealth
from mpsd.core.events import EventName
from mpsd.core.model import ProcessIdentity, Server, UnknownLines
from mpsd.core.mps import log_parser
from mpsd.core.mps.commands import is_quit
from mpsd.core.mps.log_parser import CommandOrigin, LogReader, parse
from mpsd.core.signal import Signal
from mpsd.core.supervision.suspects import Quit, Sender
from mpsd.daemon.control.pipe_access import LetInRecord
from mpsd.daemon.record.bounded import BoundedLog
from mpsd.daemon.record.log import Logger
from mpsd.daemon.record.record import Record
from mpsd.system import clock
from mpsd.system.files.inotify import DirectoryWatch
from mpsd.system.files.rundir import DaemonPaths
from mpsd.system.mps import log_file
from mpsd.system.mps.log_file import LogFollower, Position
from mpsd.system.processes import proc, resources

_BREATH: Final = 0.002
"""Seconds between two readings when there is more than one reading takes, so that other tasks of mpsd get their
turn."""

_MOST_WORDS: Final = 200
"""Maximum characters of a last line in a sentence."""

_REPORT_SPACING: Final = 5.0
"""Seconds between two reports that the logs were shortened: any server can write without a pause."""

_MOST_COMMANDS: Final = 64
"""Foreign commands that are remembered until mpsd can ask for their effect; the latest count."""

_MOST_LOGGED: Final = 16
"""Log entries of one kind, in one reading of the log, that are reported one by one, so that no user can fill mpsd's own
log."""

_LATE: Final = 1.0
"""Seconds after which a conversation that does not show is missing: it shows within 3 ms (measured, all versions)."""

_PAUSE: Final = 0.05
"""Seconds between two checks of a FIFO that the daemon does not read."""

_OF_CONVERSATIONS: Final = (log_parser.ForeignCommand, log_parser.QuitRefused, log_parser.Unaccounted)


class Foreign(NamedTuple):
    """The number of commands of others in the log of a control daemon, and of lines that may stand for some."""

    commands: int = 0
    unaccounted: int = 0
    """The lines that may stand for any command."""


class _Reading(msgspec.Struct, forbid_unknown_fields=True):
    """The data with which the next mpsd continues the reading. The key in it is secret."""

    key: str
    origin: CommandOrigin
    control: Position | None
    """This, and the next one: the position in each of the logs; None where nothing was read yet."""
    server: Position | None
    serving: ServerHealth
    servers: dict[int, int] = {}
    """The servers whose entries are believed, each with its start time."""
    unexplained: tuple[str, ...] = ()
    """The foreign commands up to that position whose effect is unknown yet."""
    is_unaccounted: bool = False
    """Whether there may have been more of them."""
    quit: Quit | None = None


class ControlLog:
    """Reads the log within a moment after it is written, whatever else mpsd is doing."""

    def __init__(self, paths: DaemonPaths, size: int, log: Logger, bounded: BoundedLog, let_in: LetInRecord) -> None:
        """Take the parts; `bounded` is for entries that a user with pipe access can cause in a loop."""
        self.urgent = Signal[()]()
        """The log has an entry for which the daemon has to be queried at once."""
        self.doubted = Signal[()]()
        """The log has an entry after which a server may handle a fatal fault."""
        self.quit_given = Signal[()]()
        """`is_quit_open` may be true now."""
        self.changed = Signal[()]()
        """The health of the servers is another one, or whether the log shows anything."""
        self._record = Record(paths.reading, _Reading, log)
        found = self._record.load()
        self.is_continued = found is not None
        """Whether the reading began where an earlier mpsd ended it, so that it has the commands in between."""
        stored = found or _Reading(secrets.token_hex(8), CommandOrigin.NOBODYS, None, None, ServerHealth())
        self.size = size
        """Maximum bytes of each of the two files."""
        self.key = stored.key
        """The key that identifies mpsd's own conversations with this daemon in the log, including those of the previous
        mpsd."""
        self.silence = LogSilence(paths, let_in, log)
        self.silence.changed.connect(self.changed.send)
        self.unexplained = stored.unexplained
        """The foreign commands whose effect is unknown yet."""
        self.foreign = Foreign(len(self.unexplained), int(stored.is_unaccounted))
        """The commands of others so far."""
        self._explained = Foreign()
        """The commands of others whose effect is known."""
        self.quit = stored.quit
        """The last foreign `quit` to this daemon that was not refused, by its log, which any user may have forged."""
        self._daemon = 0
        """The pid of the running control daemon."""
        self._seen = stored.servers
        """The servers of this daemon that the kernel, or the daemon itself, has shown: each with its start time. Those
        of an earlier mpsd may have written entries that it has not read."""
        self._reaped: int | None = None
        """The kernel's counter for the daemon's dead children at the last reported end of one."""
        self._paths, self._log, self._bounded = paths, log, bounded
        self._watch = DirectoryWatch(paths.log_directory, self._read_by_itself)
        self._control = LogFollower(paths.control_log, stored.control)
        # It is unknown how a server opens its log, and a server that does not append to it must not have the log
        # shortened.
        self._server = LogFollower(paths.server_log, stored.server, collapses=False)
        self._reader = LogReader(self.key, stored.origin)
        self._server_reader = LogReader()
        self._again: asyncio.TimerHandle | None = None
        self._has_reason_to_ask = False
        """Whether the log had anything since the last check for which the daemon has to be queried."""
        self._last_line = ""
        self._complaints: dict[EventName, str] = {}
        self._freed, self._shortened_logged_at = 0, -inf
        """The bytes that were removed from the logs, and are not reported yet; and when bytes were last reported
        (monotonic clock)."""
        self.serving = stored.serving
        """Whether the servers serve."""

    # -- findings -----------------------------------------------------------------------------------------------------

    @property
    def unknown(self) -> UnknownLines:
        """The lines that mpsd did not recognise since its start: the daemon's, and then those of its servers."""
        readers = (self._reader, self._server_reader)
        latest = tuple(line for reader in readers for line in reader.latest)
        return UnknownLines(sum(reader.unknown for reader in readers), latest)

    def check(self, *, awake: bool) -> bool:
        """Read the log, and tell whether a foreign front-end, a server or a client did something since the last check.

        Also returns True where one may have. `awake` tells that the daemon is not stopped.
        """
        self.read()
        self._log_shortened()
        has_reason_to_ask, self._has_reason_to_ask = self._has_reason_to_ask, False
        return self.silence.check(awake=awake) or has_reason_to_ask

    def expect(self, nonce: str) -> None:
        """Note that a conversation of mpsd has ended: it shows in the log, or did before its front-end had ended."""
        self.silence.expect(nonce)
        self.silence.shown(self._reader.last_nonce)

    def begin(self) -> str:
        """Return a new key for a control daemon that is about to start: a stolen key of the previous one is useless."""
        self.key = secrets.token_hex(8)
        self._reader.add_key(self.key)
        self.serving.forget_failures()
        self.quit = None
        self.note_explained(self.foreign)  # they were given to the previous one
        self._last_line = ""
        self._store()
        return self.key

    def follow(self, daemon: ProcessIdentity) -> None:
        """Note the process of the control daemon from now on."""
        self._daemon, self._reaped = daemon.pid, proc.faults_of_children(daemon.pid)
        self.silence.forget()

    @property
    def descriptors_used_up(self) -> int | None:
        """How many descriptors the control daemon may have, if all of them are in use; None otherwise."""
        return resources.descriptors_used_up(self._daemon) if self._daemon else None

    def note_servers(self, servers: Mapping[ProcessIdentity, Server]) -> None:
        """Note the servers that the daemon itself has named, with their state words and clients.

        Log entries about any other server are not believed. One with a fault stays until it has ended, which its start
        time tells: another process may get its pid.
        """
        faulty = {*self.serving.faults, *self.serving.reported}
        seen = {pid: ticks for pid, ticks in self._seen.items() if pid in faulty and proc.start_ticks(pid) == ticks}
        seen |= {each.pid: each.start_ticks for each in servers}
        if seen != self._seen:
            self._seen = seen
            self._store()
        words = {each.pid: each.status for each in servers.values()}
        idle = {each.pid for each in servers.values() if not each.clients}
        before = self.serving.state
        self.serving.note_words(words, idle | (faulty - seen.keys()), clock.now())
        self._announce_change(before)

    def last_words(self) -> str:
        """Return the last line that the daemon wrote, or an empty text; for use right after its death."""
        # The words are only for display, and must not delay the handling of the death.
        with contextlib.suppress(OSError):
            self.read()
        line = parse(self._last_line)
        return (line.text if line is not None else self._last_line)[-_MOST_WORDS:]

    @property
    def shows_all_commands(self) -> bool:
        """Whether `unexplained` contains every command of others since the last query for their effect.

        It does not where the log is silent, has more than was read, or has lines that may stand for any command; and
        where there were more commands than mpsd remembers.
        """
        return not (self._may_have_missed_commands or self.silence.since or self._control.behind)

    @property
    def _may_have_missed_commands(self) -> bool:
        has_forgotten = self.foreign.commands - self._explained.commands > _MOST_COMMANDS
        return has_forgotten or self.foreign.unaccounted > self._explained.unaccounted

    def note_explained(self, foreign: Foreign) -> None:
        """Note that the effect of the commands up to these is known; later ones may have come too late."""
        if foreign == self._explained:
            return
        self._explained, late = foreign, self.foreign.commands - foreign.commands
        self.unexplained = self.unexplained[-late:] if late else ()
        self._store()

    @property
    def is_quit_open(self) -> bool:
        """Whether the foreign conversation that gave the `quit` lasts, and who holds it is not known."""
        return self._reader.is_quit_open and self.quit is not None and self.quit.sender is None

    def note_sender(self, sender: Sender) -> None:
        """Note who holds that conversation."""
        assert self.quit is not None  # noqa: S101 - `is_quit_open`
        self.quit = self.quit._replace(sender=sender)
        self._store()

    @property
    def ending(self) -> str:
        """Why the daemon accepts no client any more, by a `quit` whose sender the kernel showed; empty if it does."""
        if self.quit is None or self.quit.sender is None:
            return ""
        command, sender = self.quit
        return f"it got the command {command!r} of {sender}: it accepts no client, and ends after its last one"

    def forget(self) -> None:
        """Forget the process of a daemon that is gone."""
        self._daemon = 0
        self.silence.forget()

    def _announce_change(self, before: tuple[object, ...]) -> None:
        if self.serving.state != before:
            self.changed.send()

    # -- reading ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop watching; the next mpsd continues from here."""
        self._watch.close()
        self.silence.close()
        if self._again is not None:
            self._again.cancel()

    def read(self) -> None:
        """Read the added lines, report them, store the position, and remove the oldest lines beyond the size.

        It may be called at any moment and never waits: it takes some system calls, and none of the daemon's time. Lines
        are marked as read after they are reported: an mpsd that is killed between the two reports them again, and none
        leaves them out. Raises OSError when the machine has no descriptor left to read the log by.
        """
        try:
            self._watch.renew()
        except OSError as error:  # where the kernel cannot report the next lines, they are read at the next check
            self._complain(EventName.LOG_NOT_WATCHED, error)
        else:
            self._complaints.pop(EventName.LOG_NOT_WATCHED, None)
        self._read_lines()

    def read_news(self) -> None:
        """Read the added lines as `read` does, if the kernel has reported a write since. Raises OSError likewise."""
        if self._watch.has_news():
            self._read_lines()

    def _read_lines(self) -> None:
        lines, servers = self._control.read(), self._server.read()
        if lines or servers:
            self._last_line = next((line for line in reversed(lines) if line.strip()), self._last_line)
            # A server's log has no commands: an entry there that looks like one is not.
            said = self._server_reader.read(servers)
            said = [log_parser.UnknownLine() if isinstance(each, _OF_CONVERSATIONS) else each for each in said]
            self._note_events([*self._reader.read(lines), *said])
            self.silence.shown(self._reader.last_nonce)
            self._store()
            if self._again is None and (self._control.behind or self._server.behind):
                self._again = asyncio.get_running_loop().call_later(_BREATH, self._read_by_itself)
            self._shorten()

    def _read_by_itself(self) -> None:
        """Read on the kernel's report; an error waits for the next caller, which can report its consequences.

        Only this sends `urgent`, and no caller is woken by entries that it read itself: otherwise a storm of lines
        would leave it no pause.
        """
        if self._again is not None:
            self._again.cancel()
            self._again = None
        with contextlib.suppress(OSError):
            self.read()
        if self._has_reason_to_ask:
            self.urgent.send()

    def _note_events(self, events: Sequence[log_parser.LogEvent]) -> None:
        believed = [*self._believed(events)]  # first: the kernel may have counted more once all is reported
        self._note_quits(events)
        foreign = [event.text for event in events if isinstance(event, log_parser.ForeignCommand)]
        unaccounted = sum(isinstance(event, log_parser.Unaccounted) for event in events)
        self.foreign = Foreign(self.foreign.commands + len(foreign), self.foreign.unaccounted + unaccounted)
        self.unexplained = (*self.unexplained, *foreign)[-_MOST_COMMANDS:]
        self._log_events(EventName.FOREIGN_COMMAND, [{"command": command} for command in foreign])
        exits = [event for event in events if isinstance(event, log_parser.ServerExited) and event.status]
        self._log_events(EventName.SERVER_EXITED, [{"server": each.server, "status": each.status} for each in exits])
        failed = [event for event in events if isinstance(event, log_parser.ServerFailed)]
        self._log_events(EventName.SERVER_FAILED, [{"server": each.server, "words": each.words} for each in failed])
        faults = dict.fromkeys(event.server for event in events if isinstance(event, log_parser.ServerFaulted))
        self._log_events(EventName.SERVER_FAULTED, [{"server": server} for server in faults])
        before = self.serving.state
        self.serving.note(believed, clock.now())
        self._announce_change(before)
        self._has_reason_to_ask = self._has_reason_to_ask or any(
            isinstance(each, log_parser.REASONS_TO_ASK) for each in events
        )
        if any(isinstance(each, log_parser.REASONS_TO_DOUBT) for each in events):
            self.doubted.send()

    def _note_quits(self, events: Sequence[log_parser.LogEvent]) -> None:
        """Note the last `quit` that was not refused: the refusal follows the command."""
        before = self.quit
        for event in events:
            match event:
                case log_parser.ForeignCommand(text=text) if is_quit(text):
                    before, self.quit = self.quit, Quit(text[:_MOST_WORDS])
                case log_parser.QuitRefused():
                    self.quit = before
        if events and self.is_quit_open:
            self.quit_given.send()

    def _believed(self, events: Sequence[log_parser.LogEvent]) -> Iterator[log_parser.LogEvent]:
        """Yield the log entries about servers that the kernel or the daemon itself has shown to be the daemon's.

        A process that may write to the FIFO can put anything into the log. A server that could not start may be gone
        before mpsd looks: its end is believed where the kernel has counted a child that ended since the last report.
        """
        reaped = proc.faults_of_children(self._daemon)
        has_ended = reaped is not None and reaped != self._reaped
        if any(isinstance(each, log_parser.ServerExited) for each in events):
            self._reaped = reaped
        # 1. A start names a server. The kernel says whether it is a child of the daemon, and only then is it known.
        # 2. The end of an unknown server may be that of one that was gone before mpsd looked: the count of ended
        #    children decides.
        # 3. The end of a known server is believed once the kernel shows it: a zombie, no such process, or another one.
        # 4. Anything else is believed about known servers alone.
        for event in events:
            match event:
                case log_parser.ServerStarting(server=server):
                    self._see_child(server)
                case log_parser.ServerExited(server=server) if server not in self._seen:
                    if has_ended:
                        yield event
                case log_parser.ServerExited(server=server):
                    stat = proc.stat_of(server)
                    if stat is None or stat.is_zombie or stat.start_ticks != self._seen[server]:
                        del self._seen[server]
                        yield event
                case _ if getattr(event, "server", None) in self._seen:
                    yield event

    def _see_child(self, server: int) -> None:
        ticks = proc.start_ticks(server)
        if ticks is not None and proc.parent(server) == self._daemon:
            self._seen[server] = ticks

    def _log_events(self, event: EventName, each: Sequence[dict[str, object]]) -> None:
        for facts in each[:_MOST_LOGGED]:
            self._bounded.warning(event, **facts)
        if len(each) > _MOST_LOGGED:
            self._bounded.warning(event, **each[-1], left_out=len(each) - _MOST_LOGGED - 1)

    # -- storing ------------------------------------------------------------------------------------------------------

    def _store(self) -> None:
        """Store the position in the log, and the facts from the entries, which are never read again."""
        read = self._reader.origin, self._control.position, self._server.position, self.serving
        missed = self._may_have_missed_commands
        self._record.store(_Reading(self.key, *read, self._seen, self.unexplained, missed, self.quit))

    def _shorten(self) -> None:
        """Keep both files within their size; unread lines are never removed."""
        try:
            given_up = self._control.keep_within(self.size) + self._server.keep_within(self.size)
        except OSError as error:
            self._complain(EventName.LOG_NOT_SHORTENED, error)
            return
        self._complaints.pop(EventName.LOG_NOT_SHORTENED, None)
        if given_up:
            self._store()
            self._freed += given_up
            self._log_shortened()

    def _log_shortened(self) -> None:
        now = clock.monotonic()
        if self._freed and now - self._shortened_logged_at >= _REPORT_SPACING:
            self._log.info(EventName.LOG_SHORTENED, bytes=self._freed)
            self._freed, self._shortened_logged_at = 0, now

    def _complain(self, event: EventName, error: OSError) -> None:
        """Log a failure once, because it is retried all the time."""
        because = str(error)
        if self._complaints.get(event) != because:
            self._complaints[event] = because
            self._log.warning(event, because=because)


class LogSilence:
    """Whether the log of one control daemon shows the conversations that it must: it shows those of others as well.

    There are two signs: a conversation of mpsd does not show, and the daemon's output stays in the FIFO, until the FIFO
    is full and the daemon waits for itself. mpsd then moves that output into the log, again and again.
    """

    def __init__(self, paths: DaemonPaths, let_in: LetInRecord, log: Logger) -> None:
        self.changed = Signal[()]()
        """The log has fallen silent, or shows something again."""
        self.since: datetime | None = None
        """Since when it is known to be silent; None where it is not."""
        self._paths = paths
        self._let_in = let_in
        self._log = log
        self._nonce = ""
        self._missing_since: float | None = None
        """When the first conversation ended that has not shown yet."""
        self._unread_since: tuple[float, int] | None = None
        """Since when the FIFO has held something while the log did not grow, and the size of the log then."""
        self._moving: asyncio.TimerHandle | None = None
        """The next check of a FIFO that the daemon does not read."""

    def forget(self) -> None:
        """Forget the present daemon: another one follows, or none."""
        self._nonce, self._missing_since, self._unread_since, self.since = "", None, None, None
        self.close()

    def close(self) -> None:
        """Stop the periodic checks."""
        if self._moving is not None:
            self._moving.cancel()
        self._moving = None

    def expect(self, nonce: str) -> None:
        """Note that a conversation with this nonce has ended, and must show."""
        self._nonce = nonce
        if self._missing_since is None:
            self._missing_since = clock.monotonic()

    def shown(self, nonce: str) -> None:
        """Note the last conversation of mpsd in the log; lines that mpsd itself moved into the log do not count."""
        if self._nonce != nonce or self._moving is not None:
            return
        self._missing_since = None
        if self.since is not None:
            self._log.info(EventName.LOG_RESUMED, because="the log shows the conversations of mpsd again")
            self.since = None
            self.changed.send()

    def check(self, *, awake: bool) -> bool:
        """Check whether the log shows mpsd's conversations, and tell whether there is a reason to query the daemon.

        `awake` tells that the daemon is not stopped: a stopped one reads its FIFO when it continues. Raises OSError.
        """
        if self._missing_since is not None and clock.monotonic() > self._missing_since + _LATE:
            self._note(
                "the log does not show the conversations of mpsd, so that it may not show those of others either"
            )
        if self._moving is not None:
            return True
        held = self._unread(awake=awake)
        if held and self._unread_since is not None and clock.monotonic() > self._unread_since[0] + _LATE:
            self._note("the control daemon does not read its FIFO any more; mpsd moves what comes there into the log")
            self._moving = asyncio.get_running_loop().call_later(_PAUSE, self._move)
        return held or self.since is not None

    def _note(self, because: str) -> None:
        if self.since is None:
            self.since, suspects = clock.now(), self._let_in.so_far
            if suspects.anybody:
                because += f"; {suspects} had pipe access"
            self._log.warning(EventName.LOG_SILENT, because=because, suspects=list(suspects.uids))
            self.changed.send()

    def _unread(self, *, awake: bool) -> bool:
        """Tell whether unread data is in the FIFO, and note since when it has not been read."""
        try:
            held = log_file.unread(self._paths.log_fifo)
            size = self._paths.control_log.stat().st_size if held and awake else None
        except FileNotFoundError:
            return False
        if size is None:
            self._unread_since = None
        elif self._unread_since is None or self._unread_since[1] != size:
            self._unread_since = clock.monotonic(), size
        return bool(held)

    def _move(self) -> None:
        """Move the data of the FIFO, unless the log has grown since the last check: then the daemon does read it."""
        self._moving = asyncio.get_running_loop().call_later(_PAUSE, self._move)
        with contextlib.suppress(OSError):  # the next caller can report its consequences
            before = self._unread_since
            if self._unread(awake=True) and self._unread_since == before:
                log_file.move(self._paths.log_fifo, self._paths.control_log)
