"""`python -m bench.page`: the load time of the page of `mpsctl web`, its size, and its memory.

Each measurement opens a new tab of Debian's Chromium, with a simulated node of 8 GPUs and a lease on each.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.browser import Browser
from tests.node import Node

_LOOKS: Final = 9
_PAINT: Final = "performance.getEntriesByType('paint').find(each => each.name === 'first-contentful-paint')?.startTime"
_SHOWN: Final = """new Promise(done => { const look = () => document.getElementById('overview').hidden
    ? requestAnimationFrame(look) : done(performance.now()); look(); })"""
_WEIGHT: Final = """performance.getEntriesByType('resource').concat(performance.getEntriesByType('navigation'))
    .filter(each => !each.name.includes('/page/') && !each.name.includes('/v1/'))
    .reduce((sum, each) => sum + each.encodedBodySize, 0)"""


def main() -> None:
    """Run the measurements, and print their medians."""
    with tempfile.TemporaryDirectory(prefix="mb-") as directory:
        node = Node(root=Path(directory) / "node", simulate=8)
        node.root.mkdir()
        try:
            node.start()
            for gpu in range(8):
                request = {"threads": 25, "memory": "8GiB", "gpu": f"{gpu}", "pid": os.getpid()}
                assert node.request("POST", "/v1/leases", request).status == 201
            with Browser(Path(directory) / "chromium") as browser:
                looks = [_look(browser, node) for _ in range(_LOOKS)]
        finally:
            node.clean_up()
    for name, unit, values in zip(
        ("first contentful paint", "the node is shown", "files of the page", "heap of JavaScript"),
        ("ms", "ms", "KiB", "KiB"),
        zip(*looks, strict=True),
        strict=True,
    ):
        print(f"{name}: {statistics.median(values):.0f} {unit} (median of {len(values)}; worst {max(values):.0f})")


def _look(browser: Browser, node: Node) -> tuple[float, float, float, float]:
    """Open the page in a new tab; return the times of the first paint and of the node (ms), the size and heap (KiB)."""
    command = [sys.executable, "-m", "mpsd.cli.main", "--socket", str(node.socket), "web"]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as web:
        assert web.stdout is not None
        page = browser.page(web.stdout.readline().strip())
        page.wait("document.readyState === 'complete'", "the page")
        shown = float(page.do(_SHOWN))
        page.wait(_PAINT, "the first paint")
        found = float(page.do(_PAINT)), shown, float(page.do(_WEIGHT)) / 1024, page.heap() / 1024
        page.close()
        web.terminate()
    return found


if __name__ == "__main__":
    main()
