"""A real Prometheus, which scrapes a node through an incident, answers every query of the dashboard and the rules."""

import contextlib
import json
import re
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.daemon.helpers import event, kill, next_ready, stopped, undone
from tests.harness import wait_until
from tests.metrics_story import differences, metrics
from tests.monitoring.test_rules import NAMES, ROOT, RULES
from tests.node import Node
from tests.simulated_clients import SimulatedClient
from tests.tools import needed

DASHBOARD: Final = json.loads((ROOT / "monitoring/grafana/mpsd.json").read_text())

VARIABLES: Final = {"$instance": ".*", "$__rate_interval": "20s"}
"""Variables of a query, with the values that Grafana substitutes."""

COMMAND: Final = "set_default_active_thread_percentage 10"


def queries() -> dict[str, str]:
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", ())
    }


class Prometheus:
    """A real Prometheus, by its API."""

    def __init__(self, port: int) -> None:
        self._port = port

    def ask(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer. Raises AssertionError for an error response."""
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            said = json.load(answer)
        assert said["status"] == "success", said
        return said["data"]

    def query(self, query: str) -> list[Any]:
        found: list[Any] = self.ask("query", query=query)["result"]
        return found


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def scraping(directory: Path, target: str) -> Iterator[Prometheus]:
    """Start a Prometheus that scrapes an address and evaluates mpsd's rules; yield it once it has scraped."""
    port, config = free_port(), directory / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 500ms, evaluation_interval: 1s}\n"
        f"rule_files: [{RULES}]\n"
        f"scrape_configs: [{{job_name: mpsd, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    options = {
        "config.file": config,
        "storage.tsdb.path": directory / "data",
        "web.listen-address": f"127.0.0.1:{port}",
    }
    command = [needed("prometheus", "prometheus"), *(f"--{name}={value}" for name, value in options.items())]
    log = directory / "prometheus.log"
    with log.open("wb") as out, subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out) as process:
        prometheus = Prometheus(port)
        try:
            wait_until(
                lambda: prometheus.query("mpsd_node_healthy == 1"),
                what=f"a first scrape; the log is {log}",
                deadline=30,
                not_yet=(OSError,),
            )
            yield prometheus
        finally:
            process.terminate()


def lease(node: Node, **asked: object) -> Any:
    return node.request("POST", "/v1/leases", {"threads": 25, "memory": "1GiB", "gpu": "0", **asked})


def incident(node: Node) -> None:
    first = node.daemons()["gpu0"]["pid"]
    kill(first)
    kill(next_ready(node, "gpu0", first)["pid"])
    node.wait_for_state("gpu0", "ready")
    with stopped(node.daemons()["gpu1"]["pid"]):
        node.wait_for_state("gpu1", "unresponsive")
    node.wait_for_state("gpu1", "ready")
    node.ask("gpu0", COMMAND)
    undone(node, "gpu0", "active_thread_percentage", command=COMMAND)
    assert lease(node, threads=90).status == 409
    assert lease(node, threads=90, wait=0.2).status == 409
    node.request("DELETE", f"/v1/leases/{lease(node, threads=1).json['id']}")


def substituted(query: str) -> str:
    """Return a query with the values that Grafana substitutes for its variables."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    assert "$" not in query
    return query


@pytest.mark.thorough
def test_through_an_incident(make_node: Callable[..., Node], short_tmp: Path) -> None:
    """After an incident, each query has a result, the rules fire, and Prometheus has the counters of mpsd."""
    address = f"127.0.0.1:{free_port()}"
    node = make_node(
        simulate=2,
        control=None,
        config=f'[metrics]\nlisten = "{address}"\nusers = true\n[daemon]\nprobe_interval = 1\nanswer_deadline = 1\n',
    ).start()
    directory = short_tmp / "prometheus"
    directory.mkdir()
    with scraping(directory, address) as prometheus:
        granted = lease(node).json
        env = {name: str(value) for name, value in granted["env"].items()}
        incident(node)
        with SimulatedClient(env) as client:
            client.alloc("256MiB")
            with SimulatedClient(env) as extra:
                event(node, "violation", pid=extra.hello["pid"])
                node.get(f"/v1/leases/{granted['id']}/verify")  # verify reads the GPUs
                left = dict(queries())

                def look() -> bool:
                    for place, query in queries().items():
                        if place in left and prometheus.query(substituted(query)):
                            del left[place]
                    return not left

                with contextlib.suppress(AssertionError):
                    wait_until(look, what="each query to find something", deadline=20)
        assert not left, "these queries found nothing"
        groups = prometheus.ask("rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert {rule["health"] for rule in rules} == {"ok"}, [rule.get("lastError") for rule in rules]
        wait_until(
            lambda: (
                {"MpsdDaemonRestarts", "MpsdLimitDrift"}
                <= {alert["labels"]["alertname"] for alert in prometheus.ask("alerts")["alerts"]}
            ),
            what="the alerts of this incident",
            deadline=20,
        )
        assert not differences(node)[0]
        deaths = 'mpsd_daemon_deaths_total{cause="SIGKILL",daemon="gpu0"}'
        (sample,) = prometheus.query(deaths)
        assert float(sample["value"][1]) == metrics(node)[deaths] == 2


def test_queries_ask_for_what_there_is() -> None:
    """Each name in a query is a metric of mpsd, each query selects the chosen node, and no two panels are equal."""
    for place, query in queries().items():
        assert {*re.findall(r"\bmpsd_\w+(?=[{])", query)} <= NAMES, place
        assert 'instance=~"$instance"' in query, place
    titles = [panel["title"] for panel in DASHBOARD["panels"]]
    assert len({*titles}) == len(titles)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(titles)
