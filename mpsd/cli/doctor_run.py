"""The work of `mpsctl doctor` on the machine: it observes, runs the checks, and applies fixes.

This is the only module of mpsd/cli that imports rooms other than core; `mpsctl doctor` imports it when it runs.
"""

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from mpsd import __version__
from mpsd.core.configuration.document import from_mapping
from mpsd.core.doctor.finding import (
    Answers,
    Check,
    ClientSeen,
    Finding,
    Mend,
    Observed,
    ProcessSeen,
    Result,
    ServiceSeen,
    SocketSeen,
    Verdict,
    examine,
    fail,
    warn,
)
from mpsd.core.errors import MpsdError, UnreachableError, UntrustedSocketError
from mpsd.core.health import Kind
from mpsd.core.model import Known, Reading, Unknown
from mpsd.core.sanitize import plain
from mpsd.core.settings import Settings
from mpsd.system.doctor import claims, disk, fixes, gpus, machine, proc, service
from mpsd.system.processes import foreign_files, namespaces
from mpsd.system.processes.foreign_reader import ForeignReader, owner_of

if TYPE_CHECKING:
    from mpsd.client import Client, answer_types

_VARIABLES: Final = ("CUDA_", "MPSD_", "NVIDIA_VISIBLE_DEVICES")
"""Prefixes of the environment variables that MPS or mpsd uses."""


_OWN: Final = frozenset({0, os.geteuid()})
"""The uids whose mpsd may name files that the caller changes."""


async def run(
    api: "Client", config: Path | None, root: Path | None, checks: Collection[Check], *, fix: bool
) -> tuple[list[Result], list[str]]:
    """Run these checks on the node of an mpsd; with `fix`, apply the safe fixes first.

    `config` and `root` are the arguments that this mpsd was started with, where the caller knows them. Returns the
    results and the applied fixes.
    """
    observed = await _observe(api, config, root)
    listener = observed.service.socket.listener
    if fix and listener is not None and listener[1] in api.trusted - _OWN:
        raise UntrustedSocketError(
            f"--fix relies on mpsd's answer about its settings, and uid {listener[1]} listens on {api.path}",
            hint=f"run mpsctl doctor --fix as uid {listener[1]}",
        )
    results = examine(checks, observed)
    wanted = [(each, each.finding.mend) for each in results if each.finding.mend is not None]
    if not fix or not wanted:
        return results, []
    done, failed = await _mend(observed.settings, wanted)
    again = examine(checks, await _observe(api, config, root))
    return [failed.get((each.check.id, each.finding.subject), each) for each in again], done


async def _mend(
    settings: Settings, wanted: Iterable[tuple[Result, Mend]]
) -> tuple[list[str], dict[tuple[str, str], Result]]:
    """Apply the possible fixes; return their descriptions, and the failed ones by check and subject with the reason."""
    done: list[str] = []
    failed: dict[tuple[str, str], Result] = {}
    for result, mend in wanted:
        finding = result.finding
        try:
            done += await fixes.mend(settings, result.check.id, mend)
            continue
        except MpsdError as error:
            why, hint = error.detail, error.hint
        except OSError as error:
            why, hint = f"{error.filename}: {error.strerror}", "as root: mpsctl doctor --fix"
        because = f"{finding.because}; it could not be fixed: {why}"
        verdict = Verdict.FAIL if finding.verdict is Verdict.OK else finding.verdict
        failed[result.check.id, finding.subject] = Result(
            result.check, replace(finding, verdict=verdict, because=because, remedy=hint)
        )
    return done, failed


async def _observe(api: "Client", config: Path | None, root: Path | None) -> Observed:
    async with ForeignReader() as reader:
        return await _observe_with(reader, api, config, root)


async def _observe_with(reader: ForeignReader, api: "Client", config: Path | None, root: Path | None) -> Observed:
    path = Path(api.path)
    units = await service.units()  # before the first connection: it starts an mpsd whose socket systemd listens on
    socket = service.look_at_socket(path)
    answers, remedy = _ask(api)
    believed = socket.listener is not None and socket.listener[1] in {*_OWN, *api.trusted}
    listens = socket.listener[0] if believed and socket.listener else 0
    process = await proc.process(listens, reader) if listens else None
    if process is not None and not claims.is_mpsd(process.arguments):
        process = None  # a service manager listens, and passes the socket on
    arguments_of = (
        service.ServiceArguments() if process is None else service.arguments_of(process.pid, process.arguments, path)
    )
    root = root or arguments_of.root
    configuration = service.configuration(config or arguments_of.config, root)
    settings = _to_judge_by(answers, configuration.settings)
    holder = service.lock_holder(settings.paths.runtime_dir)
    control = arguments_of.control or settings.daemon.control
    processes = await proc.processes((control,), settings.paths.runtime_dir, reader)
    process = process or _holder(holder, processes)
    simulated = isinstance(answers, Known) and answers.value.simulated
    return Observed(
        settings=settings,
        configuration=configuration,
        service=ServiceSeen(
            version=__version__,
            socket=socket,
            answers=answers,
            remedy=remedy,
            process=process.pid if process is not None else None,
            lock_holder=holder,
            units=units,
        ),
        files=disk.look(settings, private=root is not None, apart=await _apart(settings, socket, process, reader)),
        processes=processes,
        gpus=await gpus.look(settings, arguments_of.control, simulated=simulated),
        clients=await _clients(api, reader) if isinstance(answers, Known) else Unknown(answers.reason),
        host=machine.look({name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}),
    )


def _to_judge_by(answers: Reading[Answers], file: Reading[Settings]) -> Settings:
    """Return the settings to judge by: mpsd's own if known, else the file's, else the defaults."""
    for each in (answers.value.settings if isinstance(answers, Known) else answers, file):
        if isinstance(each, Known):
            return each.value
    return Settings()


async def _apart(
    settings: Settings, socket: SocketSeen, mpsd: ProcessSeen | None, reader: ForeignReader
) -> tuple[Path, ...]:
    """Return those of mpsd's directories whose paths lead elsewhere here; all of them, if mpsd is not visible."""
    directories = (settings.paths.runtime_dir, settings.paths.state_dir, settings.paths.log_dir)
    if socket.listener is not None and socket.listener[0] == 0:
        return directories
    if mpsd is None or namespaces.sees_alike(mpsd.pid) != Known(value=False):
        return ()
    found = await reader.ask(owner_of(mpsd.pid), foreign_files.hidden, mpsd.pid, [*directories])
    return tuple(found.value) if isinstance(found, Known) else ()


def _holder(lock: Reading[int | None], processes: Reading[tuple[ProcessSeen, ...]]) -> ProcessSeen | None:
    """Return the mpsd that holds the lock; it is not the listener where a service manager passed the socket."""
    if not isinstance(lock, Known) or not isinstance(processes, Known):
        return None
    return next((each for each in processes.value if each.pid == lock.value and each.part == "mpsd"), None)


def _ask(api: "Client") -> tuple[Reading[Answers], str]:
    """Return mpsd's answers about the node, and a remedy where it does not answer."""
    try:
        status, config = api.status(), api.config()
    except (UnreachableError, UntrustedSocketError) as error:
        return Unknown(error.detail), error.hint
    except MpsdError as error:
        return Unknown(f"it refused this caller: {error.detail}"), error.hint
    try:
        daemons = status["daemons"]
        answers = Answers(
            version=status["version"],
            simulated=status["simulated"],
            settings=_settings(config),
            reports=tuple(_reports(status)),
            daemons=frozenset(each["pid"] for each in daemons if each["pid"] is not None),
            servers=frozenset(server["pid"] for each in daemons for server in each["servers"]),
        )
    except KeyError as strange:
        because = f"mpsd's answer has no {strange}, so mpsd and mpsctl are of different versions"
        return Unknown(because), "restart mpsd so that both have the same version (clients are not affected)"
    return Known(answers), ""


def _reports(status: "answer_types.Status") -> Iterator[Finding]:
    """Yield all that mpsd says about the node, the gravest first."""
    for reason in status["reasons"]:
        grave = warn if reason["kind"] == Kind.HOLD else fail  # an operator chose that
        yield grave(reason["because"], reason["hint"], reason["subject"])
    for warning in status["warnings"]:
        yield warn(warning["because"], warning["hint"], warning["subject"])
    for violation in status["violations"]:
        yield warn(violation["because"], violation["hint"], f"pid {violation['pid']}")
    for daemon in status["daemons"]:
        if daemon["unknown_lines"]:
            latest = next(reversed(daemon["latest_unknown_lines"]), "")
            because = f"mpsd does not know {daemon['unknown_lines']} lines in the logs of {daemon['name']}: {latest!r}"
            hint = "a newer mpsd may know the words of this driver; for the latest of them: mpsctl daemons -o json"
            yield warn(because, hint, daemon["name"])
    yield from (Finding(Verdict.NOTE, note) for note in status["notes"])


async def _clients(api: "Client", reader: ForeignReader) -> Reading[tuple[ClientSeen, ...]]:
    """Inspect the processes of the leases that the caller may see."""
    try:
        shares = [
            (
                int(pid),
                lease["id"],
                share["gpu"],
                int(share["pinned_device_mem_limit"]) // (lease["processes"] or 1),
                share["env"],
            )
            for lease in api.leases()["leases"]
            for share in lease["shares"]
            for pid in dict.fromkeys((lease["owner"]["pid"], *lease["clients"]))
            if pid and share["env"]  # another user's lease is shown without it
        ]
    except MpsdError as error:
        return Unknown(f"the leases are unknown: {error.detail}")
    except (KeyError, TypeError, ValueError) as strange:  # the answer of an mpsd of another version, or a forged one
        return Unknown(f"the leases are unknown: mpsd's answer has other fields than this mpsctl knows ({strange})")
    return Known(await proc.look(shares, reader))


def _settings(config: "answer_types.Config") -> Reading[Settings]:
    """Return mpsd's settings, parsed from its answer in the notation of the configuration."""
    document: dict[str, dict[str, object]] = {}
    for section, values in config["config"].items():
        there: dict[str, object] = {name: value for name, value in values.items() if value is not None}
        if section.startswith("quota."):
            document.setdefault("quota", {})[section.removeprefix("quota.")] = there
        else:
            document[section] = there
    try:
        return Known(from_mapping(cast("dict[str, object]", document)))
    except MpsdError as error:
        return Unknown(f"its answer is of another version: {error.detail}")


def as_json(results: Iterable[Result], done: list[str]) -> dict[str, object]:
    """Return the results in types of JSON."""
    checks = [
        {
            "id": each.check.id,
            "subject": each.finding.subject,
            "verdict": each.finding.verdict,
            "because": plain(each.finding.because),
            "evidence": plain(dict(each.finding.evidence)),
            "remedy": plain(each.finding.remedy),
            "fixable": each.finding.mend is not None,
        }
        for each in results
    ]
    return {"ok": all(each["verdict"] != Verdict.FAIL for each in checks), "checks": checks, "fixed": done}
