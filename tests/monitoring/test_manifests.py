"""The files that configure scrapes, on a machine and a cluster, agree on port, names, labels and settings.

So do the commands of the page about the installation on a cluster.
"""

import configparser
import importlib.util
import json
import re
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from mpsd.core.configuration.document import parse
from mpsd.core.setting_parsers import address_of
from tests.cluster.rendering import rendered
from tests.container.manifests import KUBERNETES, documents
from tests.guides.blocks import blocks

ROOT: Final = Path(__file__).parents[2]
FILES: Final = ROOT / "monitoring/prometheus"
OVERLAY: Final = KUBERNETES / "overlays/metrics"
PAGE: Final = ROOT / "docs/kubernetes/install.md"


def fits(monitor: Any, template: Any, config: str) -> None:
    """Check that a PodMonitor selects the pods of a template, and the port on which mpsd listens in them."""
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "PodMonitor")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["path"] == "/metrics"
    (container,) = (each for each in template["spec"]["containers"] if each["name"] == "mpsd")
    (port,) = (each["containerPort"] for each in container["ports"] if each["name"] == endpoint["port"])
    metrics = parse(config).metrics
    assert address_of(metrics.listen) == ("0.0.0.0", port)  # noqa: S104 - of a pod
    assert not metrics.users
    job = {each["targetLabel"]: each for each in endpoint["relabelings"]}
    assert job["job"]["replacement"] == "mpsd", "the alerts ask for it"


def test_overlay() -> None:
    """The overlay's PodMonitor, port and configuration agree; the rest equals the overlay of the device plugin."""
    (recipe,) = documents(OVERLAY / "kustomization.yaml")
    assert recipe["resources"] == ["../device-plugin", "podmonitor.yaml"]
    (monitor,) = documents(OVERLAY / "podmonitor.yaml")
    (patch,) = documents(OVERLAY / "daemonset.yaml")
    (whole,) = documents(KUBERNETES / "overlays/daemonset/daemonset.yaml")
    template = {**whole["spec"]["template"], "spec": patch["spec"]["template"]["spec"]}
    config = (OVERLAY / "mpsd.toml").read_text()
    fits(monitor, template, config)
    base = parse((KUBERNETES / "base/mpsd.toml").read_text())
    assert parse(config).daemon == base.daemon


@pytest.mark.skipif(importlib.util.find_spec("helm_python") is None, reason="helm-python-sdk is not installed")
def test_chart() -> None:
    """The chart has neither port nor PodMonitor by default, and with metrics.enabled both, which fit."""
    by_default = {each["kind"] for each in rendered()}
    assert "PodMonitor" not in by_default
    objects = {each["kind"]: each for each in rendered(metrics={"enabled": True, "port": 9500})}
    config = objects["ConfigMap"]["data"]["mpsd.toml"]
    fits(objects["PodMonitor"], objects["DaemonSet"]["spec"]["template"], config)
    assert "PodMonitor" not in {
        each["kind"] for each in rendered(metrics={"enabled": True, "podMonitor": {"create": False}})
    }


@pytest.mark.skipif(importlib.util.find_spec("helm_python") is None, reason="helm-python-sdk is not installed")
def test_chart_with_rules_and_dashboard() -> None:
    """The chart has the alerts and the dashboard as they are, and labels by which Prometheus and Grafana find them."""
    ours = {"release": "kube-prometheus-stack"}
    drop = [{"sourceLabels": ["__name__"], "regex": "mpsd_canary_.*", "action": "drop"}]
    metrics = {
        "enabled": True,
        "podMonitor": {"labels": ours, "metricRelabelings": drop},
        "rules": {"create": True, "labels": ours},
        "dashboard": {"create": True, "annotations": {"grafana_folder": "GPUs"}},
    }
    objects = {(each["kind"], each["metadata"]["name"]): each for each in rendered(metrics=metrics)}
    monitor, rules = objects["PodMonitor", "mpsd"], objects["PrometheusRule", "mpsd"]
    assert all(each["metadata"]["labels"].items() >= ours.items() for each in (monitor, rules))
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["metricRelabelings"] == drop
    assert rules["spec"] == yaml.safe_load((FILES / "mpsd.rules.yml").read_text())
    dashboard = objects["ConfigMap", "mpsd-dashboard"]
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert dashboard["metadata"]["annotations"] == {"grafana_folder": "GPUs"}
    assert json.loads(dashboard["data"]["mpsd.json"]) == json.loads((ROOT / "monitoring/grafana/mpsd.json").read_text())


def test_scrape_job() -> None:
    """The job has the name in the alerts, and a target that mpsd accepts as its address."""
    (job,) = yaml.safe_load((FILES / "scrape.yml").read_text())["scrape_configs"]
    assert job["job_name"] == "mpsd"
    (target,) = job["static_configs"][0]["targets"]
    assert parse(f'[metrics]\nlisten = "{target}"').metrics.listen == target


def test_units() -> None:
    """The drop-in opens what mpsd.service closes, and the timer's service writes a file that node_exporter reads."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.read(FILES / "mpsd-tcp.conf")
    assert unit["Service"]["RestrictAddressFamilies"] == "AF_INET AF_INET6"
    text = (ROOT / "systemd/mpsd.service").read_text()
    assert "IPAddressDeny=any" in text
    assert "AF_INET" not in text
    service = configparser.ConfigParser(strict=False, interpolation=None)
    service.read(FILES / "mpsd-textfile.service")
    words = service["Service"]["ExecStart"].split()
    assert words[:3] == ["/usr/bin/mpsctl", "metrics", "--textfile"]
    assert words[3].endswith(".prom")


def test_page() -> None:
    """The page's commands name existing overlays and values of the chart, and enable the metrics by both."""
    text = "\n".join(each.text for each in blocks(PAGE))
    overlays = re.findall(r"kubectl apply -k (\S+)", text)
    assert all((ROOT / each / "kustomization.yaml").is_file() for each in overlays)
    assert str(OVERLAY.relative_to(ROOT)) in overlays
    values = yaml.safe_load((KUBERNETES / "chart/values.yaml").read_text())
    chosen = re.findall(r"--set ([a-zA-Z.]+)=(\S+)", text)
    assert ("metrics.enabled", "true") in chosen
    inline = re.findall(r"`(?:--set )?((?:[a-z][A-Za-z]*[.])+[A-Za-z]+)=", PAGE.read_text())
    for path in (*(path for path, _ in chosen), *inline):
        found = values
        for name in path.split("."):
            assert name in found, f"the chart has no value {path}"
            found = found[name]
    (port,) = re.findall(r"with the port (\d+)", PAGE.read_text())
    assert values["metrics"]["port"] == int(port)
