"""What `mpsctl doctor` looks at, one check each, by what mpsd says of the node. Nothing here asks anything."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from mpsd.cli.render import plural

if TYPE_CHECKING:
    from mpsd.cli import shapes

_DAEMONS: Final = {"ready": "ok", "held": "warn", "draining": "warn"}
"""What to think of a control daemon's state; every other fails."""

_GPUS: Final = {"ok": "ok", "unsupported": "warn"}


class Verdict(StrEnum):
    """What a check came to."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at, what it came to, and what to do about it where it is not well."""

    name: str
    verdict: Verdict
    because: str
    remedy: str | None = None


def of_node(
    status: "shapes.Status", gpus: "shapes.Gpus", daemons: "shapes.Daemons", config: "shapes.Config"
) -> Iterator[Check]:
    """Check what a running mpsd knows."""
    healthy = Verdict.OK if status["healthy"] else Verdict.FAIL
    yield Check(
        "node", healthy, status["because"], None if status["healthy"] else "see the checks below, and mpsctl status"
    )
    for gpu in gpus["gpus"]:
        verdict = Verdict(_GPUS.get(gpu["health"], "fail"))
        if verdict is Verdict.OK and gpu["hint"]:
            verdict = Verdict.FAIL  # it works, and was not given back what mpsd changed about it
        yield Check(f"GPU {gpu['index']}", verdict, f"{gpu['health']}: {gpu['because']}", gpu["hint"])
    for daemon in daemons["daemons"]:
        verdict = Verdict(_DAEMONS.get(daemon["state"], "fail"))
        yield Check(daemon["name"], verdict, f"{daemon['state']}: {daemon['because']}", daemon["hint"])
        yield from _of_daemon(daemon)
    yield _fails_open(gpus, config)


def _of_daemon(daemon: "shapes.Daemon") -> Iterator[Check]:
    """Check what may be wrong with a control daemon that is ready."""
    for drift in daemon["drift"]:
        culprit = f", by {drift['command']!r}" if drift["command"] else ""
        yield Check(
            f"{daemon['name']} limits",
            Verdict.FAIL,
            f"{drift['limit']} is {drift['found']}, not {drift['wanted']}{culprit}, and could not be put back",
            "see who has the control daemon's front-end, and mpsctl daemons",
        )
    for server in daemon["servers"]:
        if server["orphan"]:
            yield Check(
                f"{daemon['name']} server",
                Verdict.FAIL,
                f"server {server['pid']} is an orphan: its control daemon is dead, and nobody limits it any more",
                f"when its clients are done: kill {server['pid']}",
            )


def _fails_open(gpus: "shapes.Gpus", config: "shapes.Config") -> Check:
    default = [f"GPU {gpu['index']}" for gpu in gpus["gpus"] if gpu["compute_mode"] == "default"]
    if default and config["config"]["daemon"]["compute_mode"] == "leave":
        return Check(
            "compute mode",
            Verdict.WARN,
            f"a process that misses MPS runs without limits on {', '.join(default)}, whose compute mode is default",
            'set daemon.compute_mode = "exclusive-process", and reload: systemctl reload mpsd, or SIGHUP',
        )
    return Check("compute mode", Verdict.OK, "as daemon.compute_mode asks, or not open to processes that miss MPS")


def report(checks: Sequence[Check]) -> str:
    """Say what each check came to, what to do about it, and how many of them are not well."""
    lines: list[str] = []
    for check in checks:
        lines.append(f"{check.verdict:<4}  {check.name}: {check.because}")
        if check.remedy and check.verdict is not Verdict.OK:
            lines.append(f"      remedy: {check.remedy}")
    failed, warned = (sum(check.verdict is each for check in checks) for each in (Verdict.FAIL, Verdict.WARN))
    return "\n".join([*lines, "", f"{plural(len(checks), 'check')}: {failed} failed, {plural(warned, 'warning')}"])
