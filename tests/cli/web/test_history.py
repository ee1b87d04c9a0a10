"""The last day on the page agrees with `GET /v1/history` and with `mpsctl usage`, by every key."""

import os
from collections.abc import Callable
from typing import Any, Final

import pytest

from mpsd.cli.render import percent, plural, size
from mpsd.cli.users import name_of
from tests.browser import Browser, Page
from tests.cli.web.conftest import ANNOUNCED, Web
from tests.daemon.caller import NOBODY
from tests.harness import wait_until
from tests.node import Node

pytestmark = pytest.mark.browser

HOSTILE: Final = "<img src=x onerror=\"document.title='owned'\">"
"""A name that would act as HTML if the page took it for HTML."""

CARDS: Final = """[...document.querySelectorAll('#history-list > article')].map(card => ({
    name: card.querySelector('h3').innerText,
    texts: [...card.querySelectorAll('p')].map(each => each.innerText),
    granted: [...card.querySelectorAll('svg .granted')].map(each => each.getAttribute('d')),
    held: card.querySelector('svg .held').getAttribute('d'),
    labels: [...card.querySelectorAll('svg')].map(each => each.getAttribute('aria-label')),
    headings: [...card.querySelectorAll('th')].map(each => each.textContent),
    rows: [...card.querySelectorAll('tbody tr')].map(row => [...row.cells].map(each => each.textContent)),
}))"""

TOTALS: Final = """({
    caption: document.querySelector('#history-totals caption').textContent,
    headings: [...document.querySelectorAll('#history-totals th')].map(each => each.textContent),
    rows: [...document.querySelectorAll('#history-totals tbody tr')].map(
        row => [...row.cells].map(each => each.innerText)),
})"""

CHOICES: Final = ("gpu", "user", "name", "lease", "label:team")

HEADINGS: Final = ["Leases", "GPU hours", "GiB hours", "Held GiB hours", "Held", "Client hours"]


@pytest.fixture
def used(make_node: Callable[..., Node]) -> Node:
    """Start a node on which leases of two users, with names and labels, were granted and released."""
    node = make_node().start()
    ours = [
        {"threads": 50, "memory": "8GiB", "gpu": "0", "name": "training", "labels": {"team": "vision"}},
        {"threads": 30, "memory": "4GiB", "gpu": "1", "name": "training", "labels": {"team": "speech"}},
        {"threads": 20, "memory": "2GiB", "gpu": "1", "name": HOSTILE},
    ]
    node.root.parent.chmod(0o711)  # the other user must reach its pipe directory
    theirs = (
        [{"threads": 10, "memory": "1GiB", "gpu": "0", "owner": {"uid": NOBODY, "gid": NOBODY}}]
        if os.geteuid() == 0
        else []
    )
    for wanted in (ours, theirs):
        answers = [node.request("POST", "/v1/leases", {**each, "pid": os.getpid()}) for each in wanted]
        assert [each.status for each in answers] == [201] * len(wanted), answers
        wait_until(lambda: is_counted(node), what="something in the history of each lease")
        for each in answers:
            node.request("DELETE", f"/v1/leases/{each.json['id']}")
    return node


def is_counted(node: Node) -> bool:
    """Tell whether the history has something of every lease."""
    leases = {each["id"] for each in node.get("/v1/leases?ended=true").json["leases"]}
    return leases == {each["key"] for each in answer_of(node, "lease") if each["total"]["threads_granted"] > 5}


def answer_of(node: Node, by: str) -> list[dict[str, Any]]:
    """Return the history of the last day by a key, in the order of `mpsctl usage`."""
    found: list[dict[str, Any]] = node.get(f"/v1/history?by={by}&since=86400&step=3600").json["history"]
    return sorted(found, key=lambda each: float(each["total"]["threads_granted"]), reverse=True)


def choose(page: Page, by: str) -> None:
    """Choose a grouping in the list, and a label in its field."""
    kind, mark, label = by.partition(":")
    page.do(f"""{{ const list = document.getElementById('history-by');
        list.value = '{kind + mark}'; list.dispatchEvent(new Event('change')); }}""")
    if mark:
        page.wait("document.getElementById('history-label').checkVisibility()", "the field for a label")
        page.do(f"""{{ const field = document.getElementById('history-label');
            field.value = '{label}'; field.dispatchEvent(new Event('change')); }}""")
    heading = {"gpu": "GPU"}.get(by, label or kind.capitalize())
    page.wait(
        f"document.querySelector('#history-totals caption').textContent === 'Totals of the last day by {heading}'",
        f"the last day by {by}",
    )


@pytest.mark.parametrize("by", CHOICES)
def test_totals(used: Node, open_page: Callable[..., Page], by: str) -> None:
    """The totals by each key are those of the API, in the units, the order and the figures of `mpsctl usage`."""
    page = open_page(used)
    page.wait("document.querySelectorAll('#history-list > article').length === 2", "the last day by GPU")
    choose(page, by)
    shown = page.do(TOTALS)
    answer = answer_of(used, by)
    assert shown["headings"][1:] == HEADINGS
    assert [row[1] for row in shown["rows"]] == [f"{each['total']['leases']}" for each in answer]
    _, *printed = used.mpsctl("usage", "--by", by, "--since", "24h", "-o", "wide").stdout.splitlines()
    index = {each["uuid"]: f"GPU {each['index']}" for each in used.get("/v1/gpus").json["gpus"]}
    for row, line, series in zip(shown["rows"], printed, answer, strict=True):
        total, key = series["total"], series["key"]
        if by == "gpu":
            assert row[0] == index[key]
        elif by == "user":
            assert row[0] == name_of(int(key))
        else:
            assert row[0] == ("other leases" if key is None else key)
        assert row[2] == hours(total["threads_granted"] / 100)
        assert row[3] == hours(total["memory_granted"] / 1024**3)
        if by != "gpu":  # the memory in use on a GPU is read all the time
            assert line.split()[-6:] == row[1:]
    assert page.do("location.hash") == ("#/" if by == "gpu" else f"#/?by={by.replace(':', '%3A')}")
    assert page.do("document.title.includes('owned')") is False
    assert page.text("document.getElementById('history-note')") == ""
    assert not page.complaints()


@pytest.mark.parametrize("by", CHOICES)
def test_charts(used: Node, open_page: Callable[..., Page], by: str) -> None:
    """Each key has two charts with accessible names, a sample of the API each, and a table of hours."""
    page = open_page(used)
    page.wait("document.querySelectorAll('#history-list > article').length === 2", "the last day by GPU")
    choose(page, by)
    step = "" if by == "gpu" else "&step=3600"
    answer = used.get(f"/v1/history?by={by}&since=86400{step}").json["history"]
    cards = page.do(CARDS)
    names = [row[0] for row in page.do(TOTALS)["rows"]]
    assert sorted(each["name"] for each in cards) == sorted(names)
    by_threads = {each["name"]: each for each in cards}
    for series, name in zip(answer_of(used, by), names, strict=True):
        samples = next(each["samples"] for each in answer if each["key"] == series["key"])
        card = by_threads[name]
        assert card["labels"] == [
            f"{name}: threads granted; the numbers follow",
            f"{name}: memory granted and in use; the numbers follow",
        ]
        assert card["headings"] == ["Hour", "Threads", "Memory", "In use"]
        assert 1 <= len(card["rows"]) <= 2
        assert all(each.count("M") in {len(samples), len(samples) - 1} for each in card["granted"])
        means = [sum(each["threads_granted"] * each["seconds"] for each in samples) / 3600]
        if len(card["rows"]) == 1:
            assert card["rows"][0][1] == percent(round(means[0], 1))
    memory = max(each["memory_total"] for each in used.get("/v1/gpus").json["gpus"])
    assert cards[0]["texts"][0] == "Threads granted; the full height is 100%"
    if by == "gpu":
        assert cards[0]["texts"][1].endswith(f"the full height is {size(memory)}")
    assert not page.complaints()


def test_many(make_node: Callable[..., Node], open_page: Callable[..., Page]) -> None:
    """Of many keys, all have a row, and the first twelve of them have charts."""
    node = make_node().start()
    for number in range(14):
        request = {"threads": 5, "memory": "1GiB", "name": f"sweep {number}", "pid": os.getpid()}
        assert node.request("POST", "/v1/leases", request).status == 201
    page = open_page(node)
    choose(page, "name")
    assert len(page.do(TOTALS)["rows"]) == 14
    assert len(page.do(CARDS)) == 12
    assert page.text("document.getElementById('history-note')") == "the first 12 have charts"
    assert not page.complaints()


@pytest.mark.root("run the page as another user")
def test_another_user(used: Node, browser: Browser, make_web: Callable[..., Web]) -> None:
    """A user who is no administrator sees who had how much, and of labels its own leases alone, as mpsd answers."""
    page = browser.page(make_web(used.socket, uid=NOBODY).link)
    page.wait("document.querySelectorAll('#history-list > article').length === 2", "the last day by GPU")
    assert sorted(row[1] for row in page.do(TOTALS)["rows"]) == ["2", "2"]
    choose(page, "user")
    assert [row[:2] for row in page.do(TOTALS)["rows"]] == [[name_of(os.geteuid()), "3"], [name_of(NOBODY), "1"]]
    choose(page, "label:team")
    assert [row[:2] for row in page.do(TOTALS)["rows"]] == [["other leases", "1"]]
    page.close()


def test_address(used: Node, open_page: Callable[..., Page]) -> None:
    """The grouping is in the address: it survives a reload, and Back from a story."""
    page = open_page(used)
    choose(page, "label:team")
    page.reload()
    page.wait(
        "document.querySelector('#history-totals caption').textContent === 'Totals of the last day by team'",
        "the grouping of the address",
    )
    assert page.do("document.getElementById('history-label').value") == "team"
    page.do("location.hash = '#/story/gpu0'")
    page.wait("document.querySelectorAll('#story .events li').length > 0", "the story")
    page.do("history.back()")
    page.wait("document.getElementById('history-totals').checkVisibility()", "the node again")
    assert {row[0] for row in page.do(TOTALS)["rows"]} == {"vision", "speech", "other leases"}
    page.do("location.hash = '#/history'")
    page.wait("document.querySelector('#history-totals th').textContent === 'GPU'", "the view without a grouping")
    assert page.do("document.getElementById('history-by').value") == "gpu"


def test_label(used: Node, open_page: Callable[..., Page]) -> None:
    """The page asks for the key of a label, offers those of the leases, and shows why mpsd refuses one."""
    lease = {"threads": 5, "memory": "1GiB", "pid": os.getpid(), "labels": {"project": "x", "team": "vision"}}
    assert used.request("POST", "/v1/leases", lease).status == 201
    page = open_page(used)
    page.do("""{ const list = document.getElementById('history-by');
        list.value = 'label:'; list.dispatchEvent(new Event('change')); }""")
    note = "document.getElementById('history-note')"
    page.wait(f"{note}.innerText === 'enter the key of a label, such as team'", "the note")
    assert page.do("document.getElementById('history-totals').checkVisibility()") is False
    offered = page.do("[...document.querySelectorAll('#history-labels option')].map(each => each.value)")
    assert offered == ["project", "team"]
    page.do("document.getElementById('history-label').focus()")
    page.type("no key: é")
    page.press("Enter")
    page.wait(f"{note}.innerText.includes('is not gpu, user, name, lease or label:KEY')", "the refusal")
    assert page.do("document.querySelectorAll('#history-list > article').length") == 0
    page.wait(f"{ANNOUNCED}.some(each => each.startsWith('by='))", "the refusal to be announced")


def test_without_a_mouse(used: Node, open_page: Callable[..., Page]) -> None:
    """The controls have names, a choice by the keyboard is announced, and a new reading keeps the focus."""
    page = open_page(used)
    page.wait("document.querySelectorAll('#history-list > article').length === 2", "the last day by GPU")
    page.do("document.getElementById('history-by').focus()")
    page.press("ArrowDown")
    page.wait("document.querySelector('#history-totals th').textContent === 'User'", "the last day by user")
    said = f"the last day by User: {plural(len(answer_of(used, 'user')), 'row')}"
    page.wait(f"{ANNOUNCED}.includes('{said}')", "the announcement")
    assert page.do("document.activeElement.id") == "history-by"
    choose(page, "label:team")
    found = [(each["role"], each["name"]) for each in page.accessible()]
    assert {("combobox", "Group by"), ("combobox", "Key of the label")} <= {*found}
    assert ("table", "Totals of the last day by team") in found
    assert ("columnheader", "GPU hours") in found
    page.do("document.querySelector('#history-list summary').focus()")
    page.press("Enter")
    page.wait("document.querySelector('#history-list details').open", "the numbers")
    page.do("{ const field = document.getElementById('history-label'); field.dispatchEvent(new Event('change')); }")
    page.wait(
        "performance.getEntriesByType('resource').filter(each => each.name.includes('label')).length === 2", "a reading"
    )
    assert page.do("document.querySelector('#history-list details').open")
    assert page.do("document.activeElement.tagName") == "SUMMARY"


@pytest.mark.parametrize("width", [320, 1160])
def test_width(used: Node, open_page: Callable[..., Page], width: int) -> None:
    """The totals and the charts by name fit the width of the screen."""
    page = open_page(used, width=width)
    page.wait("document.querySelectorAll('#history-list > article').length === 2", "the last day by GPU")
    for by in ("gpu", "name", "label:team"):
        choose(page, by)
        assert page.do("document.documentElement.scrollWidth") <= width


def hours(seconds: float) -> str:
    """Format an amount times seconds in hours, as `mpsctl usage` does."""
    found = seconds / 3600
    return f"{found:.2f}" if found >= 1 or not found else f"{found:.4f}"
