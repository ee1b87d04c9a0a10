"""What doctor makes of what mpsd says: each thing that is wrong is a check that fails, with its remedy."""

from typing import Any

import pytest

from mpsd.cli.checks import Check, Verdict, of_node, report
from tests.cli.test_views import daemon, drift, gpu, node

LEAVE: Any = {"config": {"daemon": {"compute_mode": "leave"}}}
EXCLUSIVE: Any = {"config": {"daemon": {"compute_mode": "exclusive-process"}}}


def checks(gpus: Any = None, daemons: Any = None, *, config: Any = EXCLUSIVE, **status: Any) -> dict[str, Check]:
    """Return what is wrong, by name, and see that each has a remedy."""
    of_gpus: Any = {"gpus": [gpu(compute_mode="exclusive-process")] if gpus is None else gpus}
    found = list(of_node(node(**status), of_gpus, {"daemons": daemons or [daemon()]}, config))
    wrong = {each.name: each for each in found if each.verdict is not Verdict.OK}
    assert len({each.name for each in found}) == len(found) >= 4
    assert all(each.because for each in found)
    assert all(each.remedy for each in wrong.values())
    return wrong


def test_a_healthy_node() -> None:
    """Nothing is wrong with it."""
    assert checks() == {}


@pytest.mark.parametrize(
    ("health", "verdict"),
    [("unknown", "fail"), ("faulty", "fail"), ("misconfigured", "fail"), ("unsupported", "warn"), ("novel", "fail")],
)
def test_gpus(health: str, verdict: str) -> None:
    """A GPU that cannot be given out fails, unless it cannot run MPS at all."""
    wrong = checks([gpu(compute_mode=None, health=health, because="so", hint="do it")])
    assert wrong == {"GPU 0": Check("GPU 0", Verdict(verdict), f"{health}: so", "do it")}


def test_gpu_that_was_left_behind() -> None:
    """A GPU that works, with something left to do, is one that mpsd could not give its mode back."""
    wrong = checks([gpu(compute_mode="exclusive-process", because="it cannot be set to default", hint="as root")])
    assert wrong["GPU 0"].verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("state", "verdict"),
    [("held", "warn"), ("draining", "warn"), ("down", "fail"), ("failed", "fail"), ("unresponsive", "fail")],
)
def test_daemons(state: str, verdict: str) -> None:
    """A control daemon that an operator keeps closed is a warning, every other that is not ready fails."""
    wrong = checks(daemons=[daemon(state=state, because="so", hint="do it")])
    assert wrong == {"gpu0": Check("gpu0", Verdict(verdict), f"{state}: so", "do it")}


def test_drift_and_orphans() -> None:
    """What others changed and mpsd could not put back fails, and so does a server without its control daemon."""
    servers = [
        {"pid": 7, "status": "ACTIVE", "clients": [], "orphan": False},
        {"pid": 8, "status": None, "clients": [9], "orphan": True},
    ]
    wrong = checks(daemons=[daemon(drift=[drift(command="set it")], undone=[drift()], servers=servers)])
    assert wrong.keys() == {"gpu0 limits", "gpu0 server"}
    assert "by 'set it'" in wrong["gpu0 limits"].because
    assert wrong["gpu0 server"].remedy == "when its clients are done: kill 8"


def test_failing_open() -> None:
    """Where MPS fails open, and nobody asked for anything else, that is a warning that names the GPUs."""
    two = [gpu(compute_mode="default"), gpu(index=1, compute_mode="exclusive-process")]
    wrong = checks(two, config=LEAVE)
    assert wrong["compute mode"].verdict is Verdict.WARN
    assert "GPU 0, whose" in wrong["compute mode"].because
    assert "exclusive-process" in (wrong["compute mode"].remedy or "")
    assert checks(two, config=EXCLUSIVE) == {}


def test_what_only_the_summary_knows() -> None:
    """A reason that no part shows fails as well."""
    wrong = checks(healthy=False, because="no lease can be granted: the disk is full")
    assert wrong["node"].because == "no lease can be granted: the disk is full"


def test_report() -> None:
    """Each check is a line, with its remedy where it is not well, and the sum at the end."""
    assert report([
        Check("mpsd", Verdict.OK, "it answers", "never shown"),
        Check("GPU 0", Verdict.WARN, "so", "do this"),
        Check("gpu0", Verdict.FAIL, "so", "do that"),
    ]).splitlines() == [
        "ok    mpsd: it answers",
        "warn  GPU 0: so",
        "      remedy: do this",
        "fail  gpu0: so",
        "      remedy: do that",
        "",
        "3 checks: 1 failed, 1 warning",
    ]  # fmt: skip
