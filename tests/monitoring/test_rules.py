"""Each alert fires in its incident, none fires for a healthy node, and each links to its section of the guide."""

import re
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from mpsd.core.metrics.families import FAMILIES, Kind
from tests.metrics_story import key, metrics
from tests.node import Node
from tests.tools import needed

ROOT: Final = Path(__file__).parents[2]
RULES: Final = ROOT / "monitoring/prometheus/mpsd.rules.yml"

ALERTS: Final[dict[str, dict[str, Any]]] = {
    rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
}

NODE: Final = 'instance="node1",job="mpsd"'

NAMES: Final = {
    name
    for family in FAMILIES
    for name in (
        [f"{family.name}_{suffix}" for suffix in ("bucket", "sum", "count")]
        if family.kind is Kind.HISTOGRAM
        else [family.series]
    )
}
"""Every name that a query can contain."""


Case = tuple[dict[str, str], str, dict[str, str]]
"""The series of an incident, one value a minute; the time of evaluation; and the labels of the alert."""

OF_NODE: Final = {"instance": "node1", "job": "mpsd"}
OF_DAEMON: Final = {"instance": "node1", "daemon": "gpu0"}


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    """Return a series of the node by its name and labels, with its values."""
    return {key(name, {**labels, **OF_NODE}): values}


def state(word: str, values: str) -> dict[str, str]:
    return series("mpsd_daemon_state", values, daemon="gpu0", mpsd_daemon_state=word)


def reason(kind: str, at: str = "5m") -> Case:
    """Return the case of an alert about a reason why the node is not healthy."""
    return series("mpsd_node_reasons", "0 1x10", kind=kind), at, {**OF_NODE, "kind": kind}


def grants(values: str, bound: str) -> dict[str, str]:
    return series("mpsd_lease_grant_duration_seconds_bucket", values, le=bound)


CASES: Final[dict[str, Case]] = {
    "MpsdDown": (series("up", "1 0x10"), "5m", OF_NODE),
    "MpsdTextfileStale": (
        series("node_textfile_mtime_seconds", "0x10", file="/var/lib/mpsd.prom"),
        "10m",
        {**OF_NODE, "file": "/var/lib/mpsd.prom"},
    ),
    "MpsdNodeNotHealthy": (series("mpsd_node_healthy", "1 0x20"), "10m", OF_NODE),
    "MpsdDaemonNotReady": (state("cooling", "0 1x10") | state("ready", "1 0x10"), "5m", OF_DAEMON),
    "MpsdDaemonFailed": (state("failed", "0 1x10"), "5m", {**OF_NODE, "daemon": "gpu0", "mpsd_daemon_state": "failed"}),
    "MpsdDaemonRestarts": (
        series("mpsd_daemon_starts_total", "0 0 1 1 3x11", daemon="gpu0", cause="death"),
        "15m",
        OF_DAEMON,
    ),
    "MpsdDaemonHeld": (state("held", "1x70"), "65m", OF_DAEMON),
    "MpsdGpuNotOk": (
        series("mpsd_gpu_health", "0 1x10", gpu="GPU-0", mpsd_gpu_health="faulty"),
        "5m",
        {**OF_NODE, "gpu": "GPU-0", "mpsd_gpu_health": "faulty"},
    ),
    "MpsdServerFault": reason("server_fault"),
    "MpsdServerWedged": reason("wedged"),
    "MpsdServerStopped": reason("server_stopped"),
    "MpsdAnswerUnforeseen": reason("answer_unforeseen"),
    "MpsdServersCannotStart": reason("servers_cannot_start"),
    "MpsdLeasesLost": reason("unrestored"),
    "MpsdStoreNotWritable": reason("store"),
    "MpsdOrphanedServer": reason("orphan", at="8m"),
    "MpsdLimitDrift": (
        series("mpsd_limit_drift_found_total", "0 0 1x12", daemon="gpu0", limit="active_thread_percentage"),
        "14m",
        OF_DAEMON,
    ),
    "MpsdViolations": (
        series("mpsd_open_violations", "0 2x10", kind="memory"),
        "8m",
        {"instance": "node1", "kind": "memory"},
    ),
    "MpsdUidQuarantined": (series("mpsd_quarantined_uids", "0 1x10"), "5m", OF_NODE),
    "MpsdQueueStuck": (series("mpsd_waiting_oldest_seconds", "0+60x80"), "70m", OF_NODE),
    "MpsdGrantsSlow": (
        grants("0x30", "0.25") | grants("0+60x30", "1.0") | grants("0+60x30", "+Inf"),
        "25m",
        {"instance": "node1"},
    ),
    "MpsdControlPipeFails": (
        series("mpsd_control_conversation_failures_total", "0+1x20", daemon="gpu0", code="control_unresponsive"),
        "15m",
        OF_DAEMON,
    ),
    "MpsdLogLinesLost": (series("mpsd_log_lines_lost_total", "0 0 9x10"), "10m", OF_NODE),
    "MpsdFewDescriptors": (
        series("mpsd_process_open_fds", "900x10") | series("mpsd_process_max_fds", "1000x10"),
        "8m",
        OF_NODE,
    ),
}
"""By alert."""

VALUES: Final = {
    "MpsdTextfileStale": "10m 0s",
    "MpsdDaemonRestarts": "3",
    "MpsdViolations": "2",
    "MpsdUidQuarantined": "1",
    "MpsdQueueStuck": "1h 10m 0s",
    "MpsdGrantsSlow": "992.5ms",
    "MpsdControlPipeFails": "10",
    "MpsdFewDescriptors": "90%",
}
"""The number in the texts of an alert."""


@pytest.fixture(scope="module")
def promtool() -> str:
    return needed("promtool", "prometheus")


def run(promtool: str, tmp_path: Path, tests: list[dict[str, Any]]) -> str:
    """Run these tests of the rules; return the complaints of promtool."""
    file = tmp_path / "tests.yml"
    document = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    done = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def incident(alert: str, **of_alert: Any) -> dict[str, Any]:
    """Return a test in which an alert fires as expected, except for the given changes."""
    found, at, labels = CASES[alert]
    rule = ALERTS[alert]

    def filled_in(text: str) -> str:
        text = re.sub(r"{{ \$labels.(\w+) }}", lambda name: labels[name[1]], text)
        return re.sub(r"{{ \$value[^}]*}}", VALUES.get(alert, ""), text)

    annotations = {name: filled_in(text) for name, text in rule["annotations"].items()}
    fired = {"exp_labels": {**labels, **rule["labels"]}, "exp_annotations": annotations}
    expected = {"eval_time": at, "alertname": alert, "exp_alerts": [fired], **of_alert}
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in found.items()],
        "alert_rule_test": [expected],
    }


def test_every_alert_has_a_case() -> None:
    """Every alert has a test."""
    assert {*CASES} == {*ALERTS}


def test_each_fires(promtool: str, tmp_path: Path) -> None:
    """An alert fires in its incident with its labels and texts, and only after the time in the rule."""
    before = [incident(alert, eval_time="0m", exp_alerts=[]) for alert in CASES if "for" in ALERTS[alert]]
    assert run(promtool, tmp_path, [*before, *map(incident, CASES)]) == ""


def test_a_test_can_fail(promtool: str, tmp_path: Path) -> None:
    """Promtool reports a missing alert, so the tests above can fail."""
    assert "FAILED" in run(promtool, tmp_path, [incident("MpsdDown", exp_alerts=[])])


@pytest.mark.parametrize("rule", ALERTS.values(), ids=ALERTS)
def test_a_rule(rule: dict[str, Any]) -> None:
    """A rule uses existing metrics, and its runbook is a section of the guide with an anchor of its own."""
    assert {*re.findall(r"\bmpsd_\w+(?=[{\[) ]|$)", rule["expr"])} <= NAMES | {"mpsd_daemon_state", "mpsd_gpu_health"}
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert f'<a id="{anchor}"></a>' in (ROOT / page).read_text()
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}


def test_a_well_node_is_quiet(promtool: str, tmp_path: Path, node: Node) -> None:
    """The metrics of a healthy real node, repeated for two hours, fire no alert."""
    found = metrics(node)
    series = [
        {"series": name[:-1] + f",{NODE}}}" if name.endswith("}") else f"{name}{{{NODE}}}", "values": f"{value}x120"}
        for name, value in found.items()
    ]
    quiet: list[dict[str, Any]] = []
    for at in ("1m", "10m", "2h"):
        quiet += [{"eval_time": at, "alertname": alert, "exp_alerts": []} for alert in ALERTS]
    assert run(promtool, tmp_path, [{"interval": "1m", "input_series": series, "alert_rule_test": quiet}]) == ""
