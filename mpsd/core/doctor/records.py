"""Checks of the history and the metrics: their stores and outputs, where these are configured."""

from collections.abc import Iterator
from typing import Final

from mpsd.core.doctor.finding import AS_ROOT, Check, Finding, Verdict, unknown
from mpsd.core.doctor.observed import Observed
from mpsd.core.doctor.observed_records import StoreSeen
from mpsd.core.model import Known, Unknown
from mpsd.core.units import MIB, format_size

_MODE: Final = 0o600
"""The mode of a store: the history tells what each user did."""

_PERIOD: Final = 60.0
"""Seconds within which mpsd stores at least one sample."""

_LATE: Final = 3 * _PERIOD
"""Seconds without a sample that are too many."""

_BESIDE: Final = 16 * MIB
"""Bytes of indexes, free pages and the write-ahead log that a store of any size may have."""

_STALE: Final = 120.0
"""Seconds after which the alert MpsdTextfileStale fires."""


def _store(seen: Observed) -> StoreSeen | None:
    return seen.records.store.value if isinstance(seen.records.store, Known) else None


def _history_store(seen: Observed) -> Iterator[Finding]:
    if isinstance(seen.records.store, Unknown):
        yield unknown(seen.records.store.reason, "run mpsctl doctor where mpsd runs")
        return
    store = seen.records.store.value
    evidence = {"path": str(store.path), "owner": store.owner, "mode": f"{store.mode:04o}"}
    mpsd = seen.service.process
    owner = mpsd.uid if mpsd is not None else store.directory_owner
    aside = "mpsd begins another one when it is restarted (clients are not affected)"
    if store.kind is None:
        if isinstance(seen.service.answers, Known):
            because = f"{store.path} does not exist, although mpsd runs: another program has removed it"
            yield Finding(Verdict.FAIL, because, {"path": str(store.path)}, "mpsd makes another one within a minute")
        return
    if store.kind != "file":
        because = f"{store.path} is a {store.kind}, not a file"
        yield Finding(Verdict.FAIL, because, evidence, f"move {store.path} away; {aside}")
        return
    if store.owner != owner:
        because = f"{store.path} belongs to uid {store.owner}, and mpsd runs as uid {owner}"
        yield Finding(Verdict.FAIL, because, {**evidence, "mpsd": owner}, f"chown {owner}: {store.path}")
    if store.mode & ~_MODE:
        because = f"{store.path} has mode {store.mode:04o}, so users other than mpsd's may read or write it"
        yield Finding(Verdict.WARN, because, evidence, f"chmod {_MODE:04o} {store.path}")
    if store.is_sqlite == Known(value=False):
        because = f"{store.path} does not begin as a file of SQLite: another program has written to it"
        yield Finding(Verdict.FAIL, because, evidence, f"inspect it; {aside}")
    elif isinstance(store.is_sqlite, Unknown) and not seen.host.uid:
        yield unknown(store.is_sqlite.reason, AS_ROOT)


def _history_samples(seen: Observed) -> Iterator[Finding]:
    trouble, store = seen.records.trouble, _store(seen)
    if isinstance(trouble, Unknown):
        yield unknown(trouble.reason)
        return
    age = store.age if store is not None and store.kind == "file" else 0.0
    evidence = {"because": trouble.value, "age": round(age)}
    if trouble.value:
        because = f"mpsd cannot store samples of the history: {trouble.value}"
        remedy = f"free space in {seen.settings.paths.state_dir}; mpsd tries again after each change, and every minute"
        yield Finding(Verdict.FAIL, because, evidence, remedy)
    elif age > _LATE:
        because = f"the last sample of the history was stored {age:.0f} s ago, and mpsd stores one every minute"
        yield Finding(Verdict.FAIL, because, evidence, "see check stopped, and journalctl -u mpsd -e")


def _history_size(seen: Observed) -> Iterator[Finding]:
    store, most = _store(seen), seen.settings.history.size
    if store is not None and store.kind == "file" and store.bytes > 2 * most + _BESIDE:
        size = format_size(store.bytes // 1024 * 1024)
        because = f"{store.path} takes {size}, and history.size is {format_size(most)}"
        evidence = {"path": str(store.path), "bytes": store.bytes, "size": most}
        remedy = "a file does not shrink: to begin an empty history, stop mpsd, move the file away, and start mpsd"
        yield Finding(Verdict.WARN, because, evidence, f"{remedy} (clients are not affected)")


def _metrics_listener(seen: Observed) -> Iterator[Finding]:
    listener = seen.records.listener
    if isinstance(listener, Unknown):
        yield unknown(listener.reason)
    elif listener.value is not None and listener.value.refused:
        configured = seen.settings.metrics.listen
        because = f"the metrics cannot be read from {listener.value.address}: {listener.value.refused}"
        remedy = "see the notes of mpsctl status; under systemd, mpsd.service needs the drop-in mpsd-tcp.conf"
        yield Finding(
            Verdict.FAIL, because, {"listen": configured, "address": listener.value.address}, remedy, "metrics.listen"
        )


def _metrics_textfile(seen: Observed) -> Iterator[Finding]:
    if isinstance(seen.records.textfile, Unknown):
        yield unknown(seen.records.textfile.reason)
        return
    file = seen.records.textfile.value
    if file is None:
        return
    evidence = {"path": str(file.path), "unit": file.unit, "timer": file.timer, "age": file.age and round(file.age)}
    if file.unfit:
        remedy = f"make the directory, or name that of node_exporter: systemctl edit --full {file.unit}"
        yield Finding(Verdict.FAIL, f"no file can be written to {file.path.parent}: {file.unfit}", evidence, remedy)
    elif file.timer != "active":
        timer = file.unit.replace(".service", ".timer")
        because = f"{timer} is {file.timer or 'not installed'}, so {file.path} is not written"
        yield Finding(Verdict.WARN, because, evidence, f"systemctl enable --now {timer}")
    elif file.age is None or file.age > _STALE:
        since = "does not exist" if file.age is None else f"was written {file.age:.0f} s ago"
        because = f"{file.path} {since}, and {file.unit} writes it every 15 s"
        yield Finding(Verdict.FAIL, because, evidence, f"journalctl -u {file.unit} -e")


CHECKS: Final = (
    Check(
        "history-store",
        "the file of the history is readable and private to mpsd",
        "mpsd refuses to start, sets the history aside, or shows it to other users.",
        _history_store,
    ),
    Check(
        "history-samples",
        "mpsd stores samples of the history",
        "The history has a gap, and a restart loses the usage of the last minutes for fairness.",
        _history_samples,
    ),
    Check(
        "history-size",
        "the file of the history is not much larger than history.size",
        "The file system may run out of space.",
        _history_size,
    ),
    Check(
        "metrics-listener",
        "the metrics can be read from the address in metrics.listen, if it is set",
        "Prometheus gets no metrics of this node.",
        _metrics_listener,
    ),
    Check(
        "metrics-textfile",
        "mpsd-textfile.service, if it is installed, writes its file for node_exporter",
        "Prometheus gets old metrics of this node, or none.",
        _metrics_textfile,
    ),
)
"""In the order of the report."""
