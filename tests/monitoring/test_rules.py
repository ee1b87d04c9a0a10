"""Each alert fires in its incident, none fires for a healthy node, and each links to its section of the guide."""

import re
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from mpsd.core.metrics.families import FAMILIES, Kind
from tests.gate.documents.test_links import STABLE
from tests.metrics_story import metrics
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


def state(daemon: str, word: str) -> str:
    """Return the series of a control daemon's state."""
    return f'mpsd_daemon_state{{daemon="{daemon}",mpsd_daemon_state="{word}",{NODE}}}'


def reason(kind: str) -> str:
    return f'mpsd_node_reasons{{kind="{kind}",{NODE}}}'


OF_DAEMON: Final = {"instance": "node1", "daemon": "gpu0"}

CASES: Final[dict[str, tuple[dict[str, str], str, dict[str, str], str]]] = {
    "MpsdDown": ({f"up{{{NODE}}}": "1 0x10"}, "5m", {}, "mpsd on node1 does not answer"),
    "MpsdTextfileStale": (
        {f'node_textfile_mtime_seconds{{file="/var/lib/mpsd.prom",{NODE}}}': "0x10"},
        "10m",
        {"file": "/var/lib/mpsd.prom"},
        "The metrics of mpsd on node1 are 10m 0s old",
    ),
    "MpsdNodeNotHealthy": ({f"mpsd_node_healthy{{{NODE}}}": "1 0x20"}, "10m", {}, "The node node1 is not healthy"),
    "MpsdDaemonNotReady": (
        {state("gpu0", "cooling"): "0 1x10", state("gpu0", "ready"): "1 0x10"},
        "5m",
        OF_DAEMON,
        "Control daemon gpu0 on node1 is not ready",
    ),
    "MpsdDaemonFailed": (
        {state("gpu0", "failed"): "0 1x10"},
        "5m",
        {"daemon": "gpu0", "mpsd_daemon_state": "failed"},
        "Control daemon gpu0 on node1 has failed",
    ),
    "MpsdDaemonRestarts": (
        {f'mpsd_daemon_starts_total{{daemon="gpu0",cause="death",{NODE}}}': "0 0 1 1 3x11"},
        "15m",
        OF_DAEMON,
        "Control daemon gpu0 on node1 dies again and again",
    ),
    "MpsdDaemonHeld": (
        {state("gpu0", "held"): "1x70"},
        "65m",
        OF_DAEMON,
        "Control daemon gpu0 on node1 admits no request",
    ),
    "MpsdGpuNotOk": (
        {f'mpsd_gpu_health{{gpu="GPU-0",mpsd_gpu_health="faulty",{NODE}}}': "0 1x10"},
        "5m",
        {"gpu": "GPU-0", "mpsd_gpu_health": "faulty"},
        "GPU GPU-0 on node1 is faulty",
    ),
    "MpsdServerFault": (
        {reason("server_fault"): "0 1x10"},
        "5m",
        {"kind": "server_fault"},
        "A server on node1 handles a fatal GPU fault",
    ),
    "MpsdServerWedged": ({reason("wedged"): "0 1x10"}, "5m", {"kind": "wedged"}, "A server on node1 serves no client"),
    "MpsdServerStopped": (
        {reason("server_stopped"): "0 1x10"},
        "5m",
        {"kind": "server_stopped"},
        "A server on node1 is stopped by its user",
    ),
    "MpsdAnswerUnforeseen": (
        {reason("answer_unforeseen"): "0 1x10"},
        "5m",
        {"kind": "answer_unforeseen"},
        "A server on node1 answers in a form that mpsd does not know",
    ),
    "MpsdServersCannotStart": (
        {reason("servers_cannot_start"): "0 1x10"},
        "5m",
        {"kind": "servers_cannot_start"},
        "Servers on node1 cannot start",
    ),
    "MpsdLeasesLost": (
        {reason("unrestored"): "0 1x10"},
        "5m",
        {"kind": "unrestored"},
        "Leases on node1 were lost, or could not be restored",
    ),
    "MpsdStoreNotWritable": (
        {reason("store"): "0 1x10"},
        "5m",
        {"kind": "store"},
        "mpsd on node1 cannot store leases",
    ),
    "MpsdOrphanedServer": (
        {reason("orphan"): "0 1x10"},
        "8m",
        {"kind": "orphan"},
        "A server on node1 has outlived its control daemon",
    ),
    "MpsdLimitDrift": (
        {f'mpsd_limit_drift_found_total{{daemon="gpu0",limit="active_thread_percentage",{NODE}}}': "0 0 1x12"},
        "14m",
        OF_DAEMON,
        "Another program changes limits of gpu0 on node1",
    ),
    "MpsdViolations": (
        {f'mpsd_open_violations{{kind="memory",{NODE}}}': "0 2x10"},
        "8m",
        {"instance": "node1", "kind": "memory"},
        "2 violations (memory) on node1",
    ),
    "MpsdUidQuarantined": (
        {f"mpsd_quarantined_uids{{{NODE}}}": "0 1x10"},
        "5m",
        {},
        "1 uids are quarantined on node1",
    ),
    "MpsdQueueStuck": (
        {f"mpsd_waiting_oldest_seconds{{{NODE}}}": "0+60x80"},
        "70m",
        {},
        "A request has waited for 1h 10m 0s on node1",
    ),
    "MpsdGrantsSlow": (
        {
            f'mpsd_lease_grant_duration_seconds_bucket{{le="0.25",{NODE}}}': "0x30",
            f'mpsd_lease_grant_duration_seconds_bucket{{le="1.0",{NODE}}}': "0+60x30",
            f'mpsd_lease_grant_duration_seconds_bucket{{le="+Inf",{NODE}}}': "0+60x30",
        },
        "25m",
        {"instance": "node1"},
        "A grant on node1 takes 992.5ms (99th percentile)",
    ),
    "MpsdControlPipeFails": (
        {f'mpsd_control_conversation_failures_total{{daemon="gpu0",code="control_unresponsive",{NODE}}}': "0+1x20"},
        "15m",
        OF_DAEMON,
        "Control daemon gpu0 on node1 does not answer reliably",
    ),
    "MpsdLogLinesLost": (
        {f"mpsd_log_lines_lost_total{{{NODE}}}": "0 0 9x10"},
        "10m",
        {},
        "Lines of mpsd's log were lost on node1",
    ),
    "MpsdFewDescriptors": (
        {f"mpsd_process_open_fds{{{NODE}}}": "900x10", f"mpsd_process_max_fds{{{NODE}}}": "1000x10"},
        "8m",
        {},
        "mpsd on node1 has 90% of its file descriptors open",
    ),
}
"""For each alert: the series of an incident, one value a minute; the time of evaluation; its labels; its summary."""

DESCRIPTIONS: Final = {
    "MpsdDaemonRestarts": "mpsd started it 3 times after a death in 15 minutes. Its clients die with it.",
    "MpsdControlPipeFails": "10 conversations on its pipe failed in 10 minutes.",
}
"""The descriptions that contain a number, which Prometheus extrapolates to the whole range."""


@pytest.fixture(scope="module")
def promtool() -> str:
    """Return the path of promtool, from Debian's package prometheus."""
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
    series, at, own, summary = CASES[alert]
    rule = ALERTS[alert]
    labels = own if "instance" in own else {"instance": "node1", "job": "mpsd", **own}
    annotations = {
        **rule["annotations"],
        "summary": summary,
        "description": DESCRIPTIONS.get(alert, rule["annotations"]["description"]),
    }
    fired = {"exp_labels": {**labels, **rule["labels"]}, "exp_annotations": annotations}
    expected = {"eval_time": at, "alertname": alert, "exp_alerts": [fired], **of_alert}
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [expected],
    }


def test_every_alert_has_a_case() -> None:
    """Every alert has a test."""
    assert {*CASES} == {*ALERTS}


@pytest.mark.parametrize("alert", CASES)
def test_fires(promtool: str, tmp_path: Path, alert: str) -> None:
    """An alert fires in its incident with its labels and texts, and only after the time in the rule."""
    before = incident(alert, eval_time="0m", exp_alerts=[])
    assert run(promtool, tmp_path, [incident(alert)]) == ""
    assert run(promtool, tmp_path, [before] if "for" in ALERTS[alert] else []) == ""


def test_a_test_can_fail(promtool: str, tmp_path: Path) -> None:
    """Promtool reports a missing alert, so the tests above can fail."""
    assert "FAILED" in run(promtool, tmp_path, [incident("MpsdDown", exp_alerts=[])])


@pytest.mark.parametrize("rule", ALERTS.values(), ids=ALERTS)
def test_a_rule(rule: dict[str, Any]) -> None:
    """A rule uses existing metrics, and its runbook is an existing section of the guide with a stable anchor."""
    assert {*re.findall(r"\bmpsd_\w+(?=[{\[) ]|$)", rule["expr"])} <= NAMES | {"mpsd_daemon_state", "mpsd_gpu_health"}
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert page == "docs/guide/operator.md"
    assert anchor in STABLE
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
