"""The parsers of foreign input, each as a function of bytes: it returns, or its test fails.

Each target feeds a parser, accepts only the error that the parser documents, and checks the result against mpsd's
promises. Hypothesis, the corpus and the coverage-guided fuzzer all use these functions.
"""

import asyncio
import json
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Final, TextIO

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from mpsd.cli.render import as_json
from mpsd.core import holders
from mpsd.core.admission.ledger import Ledger
from mpsd.core.admission.users import Usage
from mpsd.core.configuration import document
from mpsd.core.enforcement import drift, violations
from mpsd.core.enforcement.ceiling import by_commands, widened
from mpsd.core.errors import ConfigurationError, ControlError, ForeignDaemonError, InvalidRequestError
from mpsd.core.events import EventName
from mpsd.core.metrics import families
from mpsd.core.metrics.families import Samples
from mpsd.core.model import Client, DaemonProcess, Known, Lease, Limits, ProcessIdentity, ReadBack, Unknown
from mpsd.core.mps import commands, log_parser
from mpsd.core.mps.limits import ACTIVE_THREAD_PERCENTAGE as PERCENTAGE
from mpsd.core.mps.limits import EVERYTHING, NOTHING, Setting, parse_foreign_mem_limit
from mpsd.core.mps.limits import PINNED_DEVICE_MEM_LIMIT as MEM_LIMIT
from mpsd.core.mps.log_parser import ForeignCommand, Unaccounted, UnknownLine
from mpsd.core.quantities import ActiveThreadPercentage, Bounds, Opened, PinnedDeviceMemLimit
from mpsd.core.reload import LiveSettings
from mpsd.core.sanitize import harmless_json, plain, text
from mpsd.core.settings import Admission, ControlDaemon, LogFormat, Settings
from mpsd.core.supervision.drain import Intent
from mpsd.core.units import GIB, format_size, parse_duration, parse_size
from mpsd.daemon.api import bodies, lease_handlers
from mpsd.daemon.api.decoding import body_decoder, query_decoder
from mpsd.daemon.api.routes import ROUTES
from mpsd.daemon.control import control_log, drainer
from mpsd.daemon.control.pipe_access import LetInRecord
from mpsd.daemon.control.process import DaemonRecord, orphans
from mpsd.daemon.control.state import DeathTally, Ended
from mpsd.daemon.http.message import problem_answer
from mpsd.daemon.leases.completeness import Completeness
from mpsd.daemon.leases.lease_store import LEASES_SCHEMA, LeaseStore, UnrestoredLease
from mpsd.daemon.leases.quarantine import Quarantine
from mpsd.daemon.metrics.collector import OPENMETRICS, TEXT, negotiated
from mpsd.daemon.metrics.exposition import render
from mpsd.daemon.record.log import configure
from mpsd.daemon.record.record import Record
from mpsd.simulator.cuda import Pinned, pinned
from mpsd.system import clock
from mpsd.system.files import encoding
from mpsd.system.files.database import Database
from mpsd.system.files.encoding import NOT_UNDERSTOOD, to_json
from mpsd.system.files.rundir import RunDir
from mpsd.system.mps.control_pipe import Conversation
from mpsd.system.mps.log_file import LogFollower
from mpsd.system.processes import foreign_files
from mpsd.system.processes.foreign_reader import ForeignReader
from mpsd.system.retry import CollisionError
from tests.fuzz.conversing import conversation

KEY: Final = "4f9d2c"
"""The beginning of the nonces in mpsd's marks, which no other process knows."""
NONCE: Final = f"{KEY}77"
GPU: Final = "GPU-11111111-2222-3333-4444-555555555555"
NOW: Final = datetime(2026, 1, 1, tzinfo=UTC)
SERVER: Final = 7
WANTED: Final = Limits(ActiveThreadPercentage(250), PinnedDeviceMemLimit(2048))
UNLIMITED: Final = Limits(ActiveThreadPercentage(1000), None)

LARGEST: Final = 2**63 - 1


def text_of(data: bytes) -> str:
    """Return text as mpsd decodes foreign input."""
    return data.decode("utf-8", errors="replace")


def cut(data: bytes) -> Iterator[bytes]:
    """Cut the rest of an input into pieces, by its first byte."""
    step, rest = data[0] % 61 + 1 if data else 1, data[1:]
    for start, end in pairwise([*range(0, len(rest), step), len(rest)]):
        yield rest[start:end]


# -- the log -----------------------------------------------------------------------------------------------------------


def log(data: bytes) -> None:
    """A log is read alike whole and in pieces, and no foreign change in it is missed."""
    lines = text_of(data[1:]).split("\n")
    whole, pieces = log_parser.LogReader(KEY), log_parser.LogReader(KEY)
    events = whole.read(lines)
    step = data[0] % 7 + 1 if data else 1
    assert [each for at in range(0, len(lines), step) for each in pieces.read(lines[at : at + step])] == events
    assert (pieces.origin, pieces.unknown, pieces.latest) == (whole.origin, whole.unknown, whole.latest)
    known = [each for each in events if not isinstance(each, Unaccounted | UnknownLine)]
    assert len(known) + whole.unknown <= len(lines)
    assert len(whole.latest) <= 32
    assert all(len(each) <= 200 for each in whole.latest)
    foreign = tuple(each.text for each in events if isinstance(each, ForeignCommand))
    if f"mpsd-{KEY}" not in "".join(lines):
        said = [parsed.text.removeprefix("Cmd:") for parsed in map(log_parser.parse, lines) if parsed is not None
                and parsed.text.startswith("Cmd:")]  # fmt: skip
        assert [each for each in said if commands.changes_something(each)] == list(foreign)
    stranger(foreign)


def stranger(foreign: tuple[str, ...]) -> None:
    """Foreign commands open at least what they say, whatever other commands are among them."""
    before = Bounds(EVERYTHING, NOTHING)
    for count in range(1, len(foreign) + 1):
        opened = by_commands(foreign[:count], SERVER, fresh=True)
        assert widened(before, opened) == opened
        before = opened
    for each in drift.drift(WANTED, ReadBack(1000, None), (), foreign, NOW):
        assert each.command is None or each.command in foreign


def command(data: bytes) -> None:
    """A foreign command is seen, and judged, with any characters between its words and in its numbers."""
    text = text_of(data)
    stranger((text,))
    # The characters that C treats as space (tests/contract/test_alike.py has them from the daemons themselves).
    first = text.translate(dict.fromkeys(map(ord, "\t\v\f\r"), " ")).strip(" ").partition(" ")[0]
    row = commands.TABLE.get(first)
    assert commands.changes_something(text) == (row is not None and row.changes)


def follower(data: bytes) -> None:
    """A log that grows in pieces is read as the same lines as one that is complete at once."""
    descriptor = os.memfd_create("log")
    try:
        reader, seen, whole = LogFollower(Path(f"/proc/self/fd/{descriptor}")), list[str](), b""
        for piece in cut(data):
            os.write(descriptor, piece)
            whole += piece
            seen += reader.read()
        complete = whole[: whole.rfind(b"\n") + 1]
        assert seen == text_of(complete).split("\n")[:-1]
        assert reader.position.offset == len(complete)
    finally:
        os.close(descriptor)


# -- the control pipe --------------------------------------------------------------------------------------------------

_ASKED: Final[tuple[Callable[[Conversation], object], ...]] = (
    lambda talk: talk.ask(commands.get_server_list()),
    lambda talk: talk.ask(commands.get_server_status(SERVER)),
    lambda talk: talk.ask(commands.get_client_list(SERVER)),
    lambda talk: talk.ask(PERCENTAGE.ask_default()),
    lambda talk: talk.ask(MEM_LIMIT.ask_default()),
    lambda talk: talk.ask(PERCENTAGE.ask_server(SERVER)),
    lambda talk: talk.ask(MEM_LIMIT.ask_server(SERVER)),
    lambda talk: talk.ask(commands.terminate_client(SERVER, 9)),
    lambda talk: talk.ask(PERCENTAGE.set_on_server(SERVER, WANTED)),
    lambda talk: talk.ask(PERCENTAGE.default_setting(WANTED)),
    lambda talk: talk.ask(MEM_LIMIT.default_setting(WANTED)),
    lambda talk: talk.ask(MEM_LIMIT.default_setting(UNLIMITED)),
)


def answers(data: bytes) -> None:
    """No line is attributed to two queries, to none, or beyond its mark; each answer is the one of its command.

    The first three bytes choose the queries, a line `@N` stands for the echo of the mark N; the rest is the input.
    """
    talk = Conversation()
    for byte in data[:3]:
        _ASKED[byte % len(_ASKED)](talk)
    marks = {f"@{number}": commands.echo_of(commands.mark(NONCE, number)) for number in range(5)}
    output = [marks.get(line, line) for line in text_of(data[3:]).splitlines()]
    try:
        talk.distribute(NONCE, list(output))
    except (CollisionError, ControlError):
        return
    given: list[str] = [marks["@0"]]
    for number, segment in enumerate(talk._segments(), start=1):
        for pending in segment:
            given += pending._lines or []
        given.append(marks[f"@{number}"])
    assert given == output[: len(given)]
    for pending in talk.pending:
        try:
            answer = pending.answer
        except ControlError:
            continue
        if isinstance(pending.question, Setting):
            assert answer == pending.question.wanted
        for number in answer if isinstance(answer, tuple) else (answer,):
            assert not isinstance(number, int) or 0 <= number < 10**20 * GIB


# -- what users write --------------------------------------------------------------------------------------------------


def configuration(data: bytes) -> None:
    """A configuration is refused with a hint, or printed as one with the same settings."""
    try:
        asked = document.parse(text_of(data))
    except ConfigurationError as error:
        assert error.detail
        assert error.hint
        return
    asked = replace(asked, api=replace(asked.api, socket=asked.socket))
    printed = document.document(asked)
    assert document.parse(printed) == asked
    assert document.document(document.parse(printed)) == printed
    msgspec.json.encode(document.effective(asked))


_BODIES: Final = [body_decoder(kind) for kind in dict.fromkeys(each.body for each in ROUTES) if kind is not None]
_QUERIES: Final = [query_decoder(kind) for kind in dict.fromkeys(each.query for each in ROUTES) if kind is not None]


def connection(data: bytes) -> None:
    """A request is answered alike, however its bytes are cut, and nothing is answered after the last.

    Whether another one behind it is answered depends on the cuts: it must not come before the first answer.
    """
    whole, pieces = conversation(list(cut(data)))
    assert pieces[:1] == whole[:1]
    assert all(method.isalpha() or "-" in method or trouble for _, method, *_, trouble in whole)


def body(data: bytes) -> None:
    """A request's body is refused, or is within its bounds and unchanged when it is written and parsed again."""
    decode = _BODIES[data[0] % len(_BODIES) if data else 0]
    try:
        found = decode(data[1:])
    except InvalidRequestError as error:
        assert error.hint
        return
    assert decode(msgspec.json.encode(found)) == found
    if not isinstance(found, bodies.LeaseRequest):
        return
    try:
        request = lease_handlers._lease_request(found)
    except InvalidRequestError as error:
        assert error.hint
        return
    assert 1 <= request.gpus <= 64
    assert request.processes is None or 1 <= request.processes <= 1000
    assert len(request.labels) <= 32
    assert request.threads is None or 1 <= request.threads.tenths <= 1000
    assert request.memory is None or 0 < request.memory.bytes <= 2**50
    assert all(plain(each) == each for each in request.labels)


def query(data: bytes) -> None:
    """A query string is refused, or within the bounds of each parameter."""
    decode = _QUERIES[data[0] % len(_QUERIES) if data else 0]
    try:
        found = decode(text_of(data[1:]))
    except InvalidRequestError as error:
        assert error.hint
        return
    assert found is not None
    assert msgspec.convert(msgspec.to_builtins(found), type(found)) == found


def units(data: bytes) -> None:
    """A user's size, percentage or duration is refused, or bounded; when printed it never grows."""
    text = text_of(data)
    for parse in (_size, _percentage, _mem_limit, _duration):
        try:
            parse(text)
        except InvalidRequestError as error:
            assert error.hint


def _size(text: str) -> None:
    size = parse_size(text)
    assert 0 < size <= LARGEST
    printed = format_size(size)
    if not printed.startswith("0.00"):
        assert 0 < parse_size(printed) <= size


def _percentage(text: str) -> None:
    percentage = ActiveThreadPercentage.parse(text)
    assert 1 <= percentage.tenths <= 1000
    assert ActiveThreadPercentage.parse(str(percentage)) == percentage
    assert percentage.tenths <= float(text.strip().removesuffix("%")) * 10 * (1 + 1e-15)


def _mem_limit(text: str) -> None:
    limit = PinnedDeviceMemLimit.parse(text)
    assert 0 <= limit.bytes - parse_size(text) < 1 << 20
    assert parse_foreign_mem_limit(limit.grammar) == limit.bytes
    assert limit.as_reported <= limit


def _duration(text: str) -> None:
    assert 0 < parse_duration(text) < float("inf")


def environment(data: bytes) -> None:
    """For any environment of a client, mpsd assumes at least what MPS lets it use.

    MPS parses these numbers like C's library, which the simulator's clients imitate.
    """
    percentage, _, limits = text_of(data).partition("\n")
    own = {PERCENTAGE.variable: percentage, MEM_LIMIT.variable: limits}
    ceiling = ReadBack(500, 8 * GIB)
    opened = Opened(Bounds(ceiling, ceiling), Bounds(ceiling, ceiling))
    found = violations.can_use(Client(ProcessIdentity(9, 1), "gpu-0", GPU, SERVER, opened, Known(own), 0)).most
    assert 0 < found.active_thread_percentage_tenths <= 500
    if len(data) > 1000:
        return  # the simulator's own clients never have such numbers
    really = pinned([GPU], 50.0, {0: 8 * GIB}, own)
    assert isinstance(really, Pinned)
    assert found.active_thread_percentage_tenths >= really.percentage * 10 - 1e-9
    assert found.pinned_device_mem_limit is None or (
        really.memory is not None and found.pinned_device_mem_limit >= really.memory
    )


# -- what mpsd keeps, and what it prints -------------------------------------------------------------------------------


def intention(data: bytes) -> None:
    """A file with an operator's desired state is parsed and stored unchanged, or it holds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "intention"
        path.write_bytes(data)
        found = drainer.OperatorIntent(path)
        found.load()
        if isinstance(encoding.load(path, drainer._File), Unknown):
            assert found.desired.intent is Intent.HOLD
            return
        found.store(found.desired)
        again = drainer.OperatorIntent(path)
        again.load()
        assert (again.desired, again.ended) == (found.desired, found.ended)
        assert len(again.ended) <= 16


def record(data: bytes) -> None:
    """The files of one control daemon are parsed and stored unchanged, or reported as damaged, without other effects.

    The first byte decides on the boot of the files: this one, or the one in the input.
    """
    if data[:1] == b"b":
        data = data.replace(b"BOOT", clock.boot_id().encode())
    with tempfile.TemporaryDirectory() as folder:
        paths = RunDir(Settings().under(Path(folder)), -1).daemon("gpu0")
        for path in (paths.record, paths.death_tally, paths.let_in, paths.reading, paths.control_log):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data[1:])
        with tempfile.TemporaryFile("w+", encoding="utf-8") as stream:
            log = configure(LogFormat.JSON, stream=stream)
            found = DaemonRecord(paths, log)
            asyncio.run(found.find(ForeignReader()))
            orphans(found)
            found.note(DaemonProcess(ProcessIdentity(9, 1), "x", "y", NOW, many_users=False), {})
            let_in = LetInRecord(paths, list, log)
            let_in.resume(ProcessIdentity(9, 1))
            quarantine = Quarantine(Path(folder) / "quarantines", LiveSettings(Settings()), log)
            deaths = DeathTally(paths.death_tally, let_in, quarantine, log)
            deaths.count(Ended("it died", "SIGSEGV", listened=True), ControlDaemon())
            position = Record(paths.reading, control_log._Reading, log).load()
            if position is not None:
                LogFollower(paths.control_log, position.control).read()
                position.serving.cannot_start(NOW)
                position.serving.note_words({}, tuple(position.serving.faults), NOW)
                assert msgspec.json.decode(to_json(position), type=type(position)) == position
            assert all(json.loads(line) for line in written(stream).splitlines())


def written(stream: TextIO) -> bytes:
    """Return the file that a logger wrote."""
    stream.flush()
    return os.pread(stream.fileno(), 1 << 24, 0)


def stored_lease(data: bytes) -> None:
    """A stored lease is restored unchanged, or set aside; mpsd starts, and a lease that it rejected holds its GPU."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as stream,
        tempfile.TemporaryDirectory() as directory,
        closing(Database(Path(directory, "leases.db"), LEASES_SCHEMA)) as database,
    ):
        completeness = Completeness(LeaseStore(database), configure(LogFormat.JSON, stream=stream))
        ledger = Ledger(Admission(), Usage(60.0, {}))
        try:
            lease = msgspec.json.decode(text_of(data), type=Lease)
        except NOT_UNDERSTOOD as error:
            completeness.set_aside([UnrestoredLease.of_row(1, text_of(data), error)])
        else:
            completeness.attempt(lease, lambda each: ledger.restore(each, 1.0), lambda _: 1)
            assert msgspec.json.decode(to_json(lease), type=Lease) == lease
            for holder in holders.processes(lease):
                clock.at_ticks(holder.start_ticks)
        held = completeness.unrestored(GPU)
        assert all(plain(each).isprintable() for each in held)
        completeness.check_unrestored([GPU], [GPU])
        completeness.clear(GPU, "an operator resumed it")
        assert not completeness.unrestored(GPU)
        assert all(json.loads(line) for line in written(stream).splitlines())


def foreign(data: bytes) -> None:
    """A path, name, argument or variable that is not UTF-8 is logged, answered and stored as text."""
    decoded = data.decode("utf-8", errors="surrogateescape")
    for value in (data, decoded, f"\ud800{decoded}"):
        safe = text(value)
        assert text(safe.encode()) == text(safe) == safe
    assert text(data) == text(decoded)
    facts: dict[str, object] = {
        "path": Path(decoded),
        "words": [decoded, {"x": decoded}],
        "error": OSError(1, "x", decoded),
    }
    for form in (LogFormat.JSON, LogFormat.TEXT):
        with tempfile.TemporaryFile("w+", encoding="utf-8") as stream:
            configure(form, stream=stream).warning(EventName.SOCKET_REPLACED, **facts)
            assert harmless(written(stream))
    assert json.loads(to_json({decoded: facts}))
    answer = problem_answer(ForeignDaemonError(f"it is {decoded}", hint=decoded))
    assert json.loads(answer.body)
    variables = foreign_files.variables_in(b"A=1\0CUDA_" + data + b"\0")
    assert all(text(each) == each for pair in variables.items() for each in pair)
    with closing(sqlite3.connect(":memory:")) as store:
        assert store.execute("SELECT ?", (text(data),)).fetchone() == (text(data),)


def harmless(raw: bytes) -> bool:
    """Return whether one line was written, without characters that act on a terminal."""
    line = raw.decode()
    return line.endswith("\n") and line[:-1].replace("\n", "").isprintable()


def terminal(data: bytes) -> None:
    """Foreign text has no effect on a terminal, and JSON stays the same document."""
    text = data.decode("utf-8", errors="surrogateescape")
    safe = plain(text)
    assert safe.isprintable()
    assert plain(safe) == safe
    assert safe == text or not text.isprintable()
    for printed in (harmless_json(json.dumps(text, ensure_ascii=False)), as_json(text)):
        assert printed.isprintable()
        assert json.loads(printed) == text


def headers(data: bytes) -> None:
    """For any header, metrics have one of two formats; labels keep their text."""
    text = text_of(data)
    assert negotiated(text) in {TEXT, OPENMETRICS}
    samples = Samples({families.DAEMON_SERVERS: {(text,): 1}}, {})
    line = render(samples, TEXT).decode().split("\n", 2)[2]
    if "\r" not in text:  # the parser takes \r for the end of a line; no label of mpsd's can have it
        (family,) = text_string_to_metric_families(line)
        assert [sample.labels for sample in family.samples] == [{"daemon": text}]


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    each.__name__: each
    for each in (
        log,
        command,
        follower,
        answers,
        configuration,
        connection,
        body,
        query,
        units,
        environment,
        intention,
        record,
        stored_lease,
        foreign,
        terminal,
        headers,
    )
}
