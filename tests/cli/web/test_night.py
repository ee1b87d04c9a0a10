"""The bad night of tests/cli/test_night.py, found and ended on the page alone."""

import signal
from collections.abc import Callable

import pytest

from tests.browser import Page
from tests.cli.test_night import FAILED, FAULTED, night, node
from tests.cli.web.test_page import rows
from tests.node import Node

pytestmark = [
    pytest.mark.browser,
    pytest.mark.root("start programs of other users"),
    pytest.mark.timeout(120),
]

__all__ = ("node",)  # a fixture


def test_page(node: Node, open_page: Callable[..., Page]) -> None:
    """The problems stand first, and the buttons of their clients and of the control daemon end them, and no others."""
    with night(node, reaches=True) as found:
        page = open_page(node)
        bad = [found.rogue, *found.faulted]
        page.wait(f"document.getElementById('reasons').innerText.includes('process {bad[-1].pid} ')", "all of it")
        first = page.text("document.getElementById('reasons')").splitlines()[:3]
        subjects = (f"gpu{FAILED} ", f"gpu{FAULTED}:", f"process {found.rogue.pid} ")
        assert all(line.startswith(subject) for line, subject in zip(first, subjects, strict=True))
        states = (
            "[...document.querySelectorAll('#gpu-list article')].map(each => each.querySelector('p span').className)"
        )
        assert [number for number, each in enumerate(page.do(states)) if each != "state-good"] == [FAULTED, FAILED]
        (lost,) = (row["Clients"] for row in rows(page, "lease") if "lost" in row["Clients"])
        assert lost == "0 of 1, 1 lost"
        for client in bad:
            button = f"document.querySelector('[aria-label=\"End process {client.pid}\"]')"
            page.click(button)
            page.click("document.querySelector('#question button[type=submit]')")
            assert client.process.wait(20) == -signal.SIGTERM
            page.wait(f"!{button}", "the row to go")
        page.click(f"document.querySelector('[aria-label=\"Reset gpu{FAILED}\"]')")
        page.click("document.querySelector('#question button[type=submit]')")
        page.wait("document.getElementById('headline').className === 'good'", "the node to be healthy")
        page.wait(f"{states}.every(each => each === 'state-good')", "every GPU to be well")
        found.check_nobody_else_was_harmed()
        assert not page.complaints()
