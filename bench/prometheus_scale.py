"""The cost of the metrics of a thousand nodes for Prometheus: `python -m bench.prometheus_scale`.

One server answers for all nodes, with the metrics of a node with 8 GPUs and 4 pods on each. A real Prometheus scrapes
every node at the interval of the example in `monitoring/prometheus`. Each run measures its processor time, memory and
disk after the first interval, in which it makes the series.
"""

import argparse
import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

import psutil

from bench.metrics import full
from mpsd.core.metrics import snapshot
from mpsd.core.metrics.tally import Tally
from mpsd.daemon.metrics.collector import TEXT
from mpsd.daemon.metrics.exposition import render

_LEASES: Final = 32
_INTERVAL: Final = 15
_START: Final = 30.0
"""Seconds for Prometheus to make all series, before the measurement begins."""


def metrics(*, users: bool) -> bytes:
    """Return the metrics of a node; `users` adds the series of its leases and clients."""
    return render(snapshot.samples(full(_LEASES), Tally(datetime.now(UTC)), about_users=users), TEXT)


@contextlib.contextmanager
def _serving(answer: bytes) -> Iterator[int]:
    """Answer every GET request with these metrics, and yield the port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _configuration(port: int, nodes: int) -> str:
    """Return the configuration of a Prometheus that takes each path of one server for a node."""
    targets = "".join(
        f"  - {{targets: ['127.0.0.1:{port}'], labels: {{instance: node{node}, __metrics_path__: /{node}}}}}\n"
        for node in range(nodes)
    )
    return f"global: {{scrape_interval: {_INTERVAL}s}}\nscrape_configs:\n- job_name: mpsd\n  static_configs:\n{targets}"


def measure(program: str, nodes: int, seconds: float, *, users: bool) -> None:
    """Have Prometheus scrape these nodes for some time, and print its cost."""
    answer = metrics(users=users)
    series = sum(1 for line in answer.splitlines() if line and not line.startswith(b"#"))
    with tempfile.TemporaryDirectory(prefix="mb-") as name, _serving(answer) as port:
        directory = Path(name)
        config = directory / "prometheus.yml"
        config.write_text(_configuration(port, nodes))
        with (directory / "log").open("wb") as log:
            command = [program, f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}"]
            command.append(f"--web.listen-address=127.0.0.1:{_free_port()}")
            prometheus = psutil.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            time.sleep(_START)
            before = prometheus.cpu_times()
            time.sleep(seconds)
            after = prometheus.cpu_times()
            cpu = (after.user + after.system - before.user - before.system) / seconds
            resident = prometheus.memory_info().rss
        finally:
            prometheus.terminate()
            prometheus.wait(30)
    per_node = f"{len(answer) / 1024:.0f} KiB and {series} series a node, {series * nodes / 1e6:.2f} million in all"
    cost = f"{cpu:.2f} of a processor, {resident / 2**30:.2f} GiB resident"
    print(f"{nodes} nodes, {'with' if users else 'without'} users: {per_node}; {cost}", flush=True)


def main() -> None:
    """Measure with the series of leases and clients, and without them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", default=shutil.which("prometheus"), help="the program")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    if options.prometheus is None:
        sys.exit("name Prometheus' program with --prometheus (Debian's package is prometheus)")
    for users in (False, True):
        measure(options.prometheus, options.nodes, options.seconds, users=users)


if __name__ == "__main__":
    main()
