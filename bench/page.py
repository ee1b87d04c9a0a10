"""`python -m bench.page`: the load time of the page of `mpsctl web`, its size, and its memory.

Each measurement opens a new tab of Debian's Chromium, with a simulated node of 8 GPUs and a lease on each. With `--soak
SECONDS`, one tab stays open for that time while leases begin and end: its memory is measured at the same state of the
node at the start, ten times in between, and at the end, each time after a garbage collection. The objects that the heap
has more of at the end than after the first tenth are printed by what they are.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from mpsd.client import Client
from mpsd.core.errors import NeverFitsError
from tests.browser import Browser, Page
from tests.node import Node

_LOOKS: Final = 9
_PAINT: Final = "performance.getEntriesByType('paint').find(each => each.name === 'first-contentful-paint')?.startTime"
_SHOWN: Final = """new Promise(done => { const look = () => document.getElementById('overview').hidden
    ? requestAnimationFrame(look) : done(performance.now()); look(); })"""
_WEIGHT: Final = """performance.getEntriesByType('resource').concat(performance.getEntriesByType('navigation'))
    .filter(each => !each.name.includes('/page/') && !each.name.includes('/v1/'))
    .reduce((sum, each) => sum + each.encodedBodySize, 0)"""

_FILL: Final = 260
"""Leases before the first measurement of a soak: more than the ended ones that mpsd keeps and the events of a page."""
_CHANGE: Final = 5.0
"""Seconds between two changes of the leases."""
_READINGS: Final = 10
_KINDS: Final = 20
"""Kinds of objects whose growth is printed."""
_VIEWS: Final = ("#/?by=user", "#/story/gpu0", "#/?by=label:team&filter=soak", "#/?by=name&ended=", "#/")
"""The views that the tab shows in turn."""


def main() -> None:
    """Run the measurements, and print their medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="keep one tab open for that long")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mb-") as directory:
        node = Node(root=Path(directory) / "node", simulate=8)
        node.root.mkdir()
        try:
            node.start()
            for gpu in range(8):
                request = {"threads": 25, "memory": "8GiB", "gpu": f"{gpu}", "pid": os.getpid()}
                assert node.request("POST", "/v1/leases", request).status == 201
            with Browser(Path(directory) / "chromium") as browser:
                if options.soak:
                    _soak(browser, node, options.soak)
                else:
                    _measure(browser, node)
        finally:
            node.clean_up()


def _measure(browser: Browser, node: Node) -> None:
    looks = [_look(browser, node) for _ in range(_LOOKS)]
    for name, unit, values in zip(
        ("first contentful paint", "the node is shown", "files of the page", "heap of JavaScript"),
        ("ms", "ms", "KiB", "KiB"),
        zip(*looks, strict=True),
        strict=True,
    ):
        print(f"{name}: {statistics.median(values):.0f} {unit} (median of {len(values)}; worst {max(values):.0f})")


@contextmanager
def _opened(browser: Browser, node: Node) -> Iterator[tuple[Page, int]]:
    """Open the page in a new tab; yield it and the pid of its server."""
    command = [sys.executable, "-m", "mpsd.cli.main", "--socket", str(node.socket), "web"]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as web:
        assert web.stdout is not None
        page = browser.page(web.stdout.readline().strip())
        page.wait("document.readyState === 'complete'", "the page")
        yield page, web.pid
        page.close()
        web.terminate()


def _look(browser: Browser, node: Node) -> tuple[float, float, float, float]:
    """Return the times of the first paint and of the node (ms), the size and the heap (KiB) of a new tab."""
    with _opened(browser, node) as (page, _):
        shown = float(page.do(_SHOWN))
        page.wait(_PAINT, "the first paint")
        return float(page.do(_PAINT)), shown, float(page.do(_WEIGHT)) / 1024, page.heap() / 1024


# -- an hour ----------------------------------------------------------------------------------------------------------


class _Reading(NamedTuple):
    at: float
    heap: int
    nodes: int
    listeners: int
    browser: float
    """Seconds of processor time of Chromium, with all of its processes."""
    server: float
    """Seconds of processor time of `mpsctl web`."""

    def __str__(self) -> str:
        return f"heap {self.heap / 1024:.0f} KiB, {self.nodes} nodes, {self.listeners} listeners"


def _soak(browser: Browser, node: Node, seconds: float) -> None:
    """Keep one tab open, and print what it takes at the start, in between and at the end."""
    with _opened(browser, node) as (page, server), Client(str(node.socket)) as api:
        for domain in ("Network", "Accessibility", "DOM"):
            page.call(f"{domain}.disable")  # they keep objects for the protocol, which no user's browser has
        page.do(_SHOWN)
        for number in range(_FILL):
            api.release(_admit(api, number))
        for view in (*_VIEWS, *_VIEWS):  # the first visit of a view compiles its code
            page.do(f"void (location.hash = '{view}')")
            time.sleep(1)
        start = time.monotonic()
        changes, views, lease = 0, cycle(_VIEWS), ""
        readings = [_read(browser, page, server, start)]
        print(f"start, after {_FILL} leases: {readings[0]}", flush=True)
        early = Counter[str]()
        while (now := time.monotonic() - start) < seconds:
            if now >= seconds * len(readings) / _READINGS:
                if lease:
                    api.release(lease)
                    lease = ""
                readings.append(_read(browser, page, server, start))
                print(f"{readings[-1].at:.0f} s: {readings[-1]}", flush=True)
                early = early or _objects(page)  # the caches are full by now
                page.do(f"void (location.hash = '{next(views)}')")
            if lease:
                api.release(lease)
                lease = ""
            else:
                lease = _admit(api, changes)
            changes += 1
            time.sleep(_CHANGE)
        if lease:
            api.release(lease)
        readings.append(_read(browser, page, server, start))
        complaints = page.complaints()
        growth = _objects(page)
        growth.subtract(early)
    _report(readings, growth)
    print(f"{changes} changes; errors and warnings of the browser: {len(complaints)}")


def _report(readings: Sequence[_Reading], growth: Counter[str]) -> None:
    """Print how the last reading differs from the first, and how the heap has grown since the second."""
    first, last = readings[0], readings[-1]
    passed = last.at - first.at
    print(f"end, after {passed:.0f} s: {last}")
    print(f"heap: {100 * (last.heap / first.heap - 1):+.1f} %, nodes: {last.nodes - first.nodes:+d}", end=", ")
    print(f"listeners: {last.listeners - first.listeners:+d}")
    shares = [100 * (last[place] - first[place]) / passed for place in (-2, -1)]
    print(f"processor time: {shares[0]:.1f} % of a core for Chromium, {shares[1]:.1f} % for mpsctl web")
    print(f"since {readings[1].at:.0f} s, the heap has more of, in KiB:")
    for what, size in growth.most_common(_KINDS):
        print(f"{size / 1024:8.1f} {what}")


def _admit(api: Client, number: int) -> str:
    """Take out a lease, after a request that is refused."""
    request = {"threads": 5, "memory": "1GiB", "name": f"soak {number % 7}", "labels": {"team": f"{number % 3}"}}
    try:
        api.admit({"threads": 5, "memory": "1TiB"})
    except NeverFitsError:
        return api.admit({**request, "pid": os.getpid()})["id"]
    raise AssertionError("1 TiB was granted")


def _read(browser: Browser, page: Page, server: int, start: float) -> _Reading:
    """Measure a tab at its first view, once it shows that all leases but the eight have ended."""
    page.do("void (location.hash = '#/')")
    page.wait("document.querySelectorAll('#lease-table tbody tr').length === 8", "the eight leases", deadline=60)
    page.wait("document.getElementById('history-list').children.length === 8", "the history by GPU", deadline=60)
    page.wait("document.querySelectorAll('#event-list li').length === 200", "the events", deadline=60)
    found = page.counters()
    family = [psutil.Process(browser.pid), *psutil.Process(browser.pid).children(recursive=True)]
    used = [sum(each.cpu_times()[:2]) for each in family]
    own = sum(psutil.Process(server).cpu_times()[:2])
    at = time.monotonic() - start
    return _Reading(at, page.heap(), found["nodes"], found["jsEventListeners"], sum(used), own)


def _objects(page: Page) -> Counter[str]:
    """Return the bytes of the objects in the heap, by their kind and name.

    See `v8::HeapProfiler` for the snapshot: nodes are a flat list of numbers, whose fields and texts the head names.
    """
    chunk = "HeapProfiler.addHeapSnapshotChunk"
    earlier = len(page.events(chunk))
    page.call("HeapProfiler.takeHeapSnapshot", reportProgress=False)
    snapshot = json.loads("".join(each["chunk"] for each in page.events(chunk)[earlier:]))
    meta, nodes, texts = snapshot["snapshot"]["meta"], snapshot["nodes"], snapshot["strings"]
    fields, kinds = meta["node_fields"], meta["node_types"][0]
    sizes = Counter[str]()
    for at in range(0, len(nodes), len(fields)):
        node = dict(zip(fields, nodes[at : at + len(fields)], strict=True))
        kind = kinds[node["type"]]
        # The texts of strings and numbers are content, not names.
        name = "" if kind in {"string", "concatenated string", "sliced string", "number"} else texts[node["name"]][:60]
        sizes[f"{kind} {name}"] += node["self_size"]
    return sizes


if __name__ == "__main__":
    main()
