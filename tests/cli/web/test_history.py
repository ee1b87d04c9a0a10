"""The last day on the page agrees with `GET /v1/history`."""

import os
from collections.abc import Callable

import pytest

from tests.browser import Page
from tests.harness import wait_until
from tests.node import Node

pytestmark = pytest.mark.browser

READ = """[...document.querySelectorAll('#history-list > article')].map(card => ({
    name: card.querySelector('h3').innerText,
    facts: [...card.querySelectorAll('.legend li')].map(each => each.innerText),
    granted: [...card.querySelectorAll('svg .granted')].map(each => each.getAttribute('d')),
    labels: [...card.querySelectorAll('svg')].map(each => each.getAttribute('aria-label')),
    headings: [...card.querySelectorAll('th')].map(each => each.textContent),
    rows: [...card.querySelectorAll('tbody tr')].map(row => [...row.cells].map(each => each.textContent)),
}))"""


def hours(seconds: float) -> str:
    """Format an amount times seconds in hours, as `mpsctl usage` does."""
    found = seconds / 3600
    return f"{found:.2f}" if found >= 1 or not found else f"{found:.4f}"


def test_history(make_node: Callable[..., Node], open_page: Callable[..., Page]) -> None:
    """Each GPU has its totals, two charts with accessible names, and a table of hours."""
    node = make_node().start()
    lease = node.request("POST", "/v1/leases", {"threads": 50, "memory": "8GiB", "gpu": "0", "pid": os.getpid()}).json
    path = "/v1/history?by=gpu&since=86400"
    wait_until(lambda: node.get(path).json["history"][0]["total"]["threads_granted"] > 50, what="something to be kept")
    node.request("DELETE", f"/v1/leases/{lease['id']}")
    page = open_page(node)
    page.wait("document.querySelectorAll('#history-list > article').length === 2", "the last day")
    answer = node.get(path).json["history"]
    for number, (series, card) in enumerate(zip(answer, page.do(READ), strict=True)):
        total = series["total"]
        assert card["name"] == f"GPU {number}"
        assert card["facts"][0] == f"{hours(total['threads_granted'] / 100)} GPU hours granted"
        assert card["facts"][1] == f"{hours(total['memory_granted'] / 1024**3)} GiB hours granted"
        assert card["facts"][3] == f"{total['leases']} lease{'' if total['leases'] == 1 else 's'}"
        assert card["labels"] == [
            f"GPU {number}: threads granted; the numbers follow",
            f"GPU {number}: memory granted and in use; the numbers follow",
        ]
        assert card["headings"] == ["Hour", "Threads", "Memory", "In use"]
        assert 1 <= len(card["rows"]) <= 2
        assert all(each.count("M") == len(series["samples"]) for each in card["granted"])
    assert page.text("document.getElementById('history-note')") == ""
    assert not page.complaints()
