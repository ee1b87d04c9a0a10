"""The page in a real Chromium with a running node: it shows the API's answers, and its buttons have their effects."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import pairwise
from typing import Final

import pytest

from mpsd.cli.render import age, as_here, percent, plural, size
from mpsd.cli.users import name_of
from tests.browser import Browser, Page
from tests.cli.conftest import end, start_mpsctl
from tests.cli.web.conftest import ANNOUNCED, Web
from tests.daemon.caller import NOBODY, needs_root
from tests.daemon.ends.clients import lease_of, target, unharmed
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, variables

pytestmark = pytest.mark.browser

Open = Callable[..., Page]

HOSTILE: Final = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
"""A name that would act as HTML if the page took it for HTML."""

ROWS: Final = """[...document.querySelectorAll('#{}-table tbody tr')].map(row =>
    Object.fromEntries([...row.cells].map(cell => [cell.dataset.heading, cell.innerText.trim()])))"""


ASKED: Final = "performance.getEntriesByType('resource').filter(each => each.name.endsWith('/page/node')).length"
"""The number of answers of /page/node that the page has received."""


def rows(page: Page, table: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = page.do(ROWS.format(table))
    return found


@pytest.fixture
def leases(node: Node) -> Iterator[list[str]]:
    """Start a node with three leases and one that waits; the last one has a hostile name."""
    wanted = [
        {"threads": 50, "memory": "8GiB", "gpu": "0", "name": "training"},
        {"threads": 12.5, "memory": "1536MiB", "gpu": "1", "name": "notebook", "ttl": 3600},
        {"threads": 20, "memory": "1GiB", "gpu": "1", "name": HOSTILE},
    ]
    ids = [node.request("POST", "/v1/leases", {**each, "pid": os.getpid()}).json["id"] for each in wanted]
    waiter = start_mpsctl(
        node.socket, "admit", "--threads", "90", "--memory", "1GiB", "--gpu", "0", "--wait", "1h", "--name", "sweep"
    )
    wait_until(lambda: node.get("/v1/status").json["waiting"] == 1, what="a request to wait")
    yield ids
    end(waiter)


class TestContent:
    def test_node(self, node: Node, open_page: Open) -> None:
        """The first line, the problems and the counts agree with `mpsctl status`."""
        page = open_page(node)
        status = node.get("/v1/status").json
        said = node.mpsctl("status").stdout
        headline = page.text("document.getElementById('headline')")
        assert headline == status["headline"] == said.splitlines()[0]
        reasons = page.do("[...document.querySelectorAll('#reasons li')].map(each => each.innerText)")
        assert len(reasons) == len(status["reasons"] + status["warnings"] + status["violations"])
        assert all(
            each["hint"] in shown for each, shown in zip(status["reasons"] + status["warnings"], reasons, strict=True)
        )
        counts = page.text("document.getElementById('counts')")
        assert counts.startswith(
            f"{plural(status['leases'], 'lease')}, {status['waiting']} waiting, {plural(status['clients'], 'client')}; "
        )
        assert status["version"] in counts

    def test_gpus(self, node: Node, leases: list[str], open_page: Open) -> None:
        """Each GPU has its figures, and a slice for each lease in proportion to its share."""
        page = open_page(node)
        shown = page.do("""[...document.querySelectorAll('#gpu-list > article')].map(card => ({
            heading: card.querySelector('h3').innerText,
            figures: [...card.querySelectorAll('.figure')].map(each => each.innerText),
            bars: [...card.querySelectorAll('.bar')].map(bar => [...bar.querySelectorAll('.slice:not(.reserved)')].map(
                slice => slice.getBoundingClientRect().width / bar.getBoundingClientRect().width)),
            labels: [...card.querySelectorAll('.bar')].map(each => each.getAttribute('aria-label')),
            legend: [...card.querySelectorAll('.legend li')].map(each => each.innerText.replaceAll('\\n', ' ')),
        }))""")
        answer = node.get("/v1/gpus").json["gpus"]
        found = {each["id"]: each for each in node.leases()}
        assert [each["heading"] for each in shown] == [f"GPU {gpu['index']} {gpu['name']}" for gpu in answer]
        for gpu, card in zip(answer, shown, strict=True):
            assert card["figures"][0] == f"{percent(gpu['threads_granted'])} of {percent(gpu['threads_total'])} granted"
            assert card["figures"][1].startswith(
                f"{size(gpu['memory_granted'])} of {size(gpu['memory_total'])} granted"
            )
            here = [found[each] for each in leases if gpu["uuid"] in found[each]["gpus"]]
            threads = sorted(each["active_thread_percentage"] / 100 for each in here)
            memory = sorted(each["pinned_device_mem_limit"] / gpu["memory_total"] for each in here)
            assert sorted(card["bars"][0]) == pytest.approx(threads, abs=0.01)
            assert sorted(card["bars"][1]) == pytest.approx(memory, abs=0.01)
            for each in here:
                entry = f"{percent(each['active_thread_percentage'])}, {size(each['pinned_device_mem_limit'])}"
                assert any(each["name"] in line and entry in line for line in card["legend"])
                assert each["name"] in card["labels"][0]

    def test_leases(self, node: Node, leases: list[str], open_page: Open) -> None:
        """Each lease has a row with the words and figures of `mpsctl leases`."""
        page = open_page(node)
        shown = {each["Lease"]: each for each in rows(page, "lease") if each["Name"] != "sweep"}
        answer = {each["id"]: each for each in node.leases()}
        assert set(shown) == set(leases)
        printed = {line.split()[0]: line for line in node.mpsctl("leases", "-o", "wide").stdout.splitlines()}
        for lease, row in shown.items():
            found = answer[lease]
            assert row["State"] == found["state"]
            assert row["Threads"] == percent(found["active_thread_percentage"])
            assert row["Memory"] == size(found["pinned_device_mem_limit"])
            assert row["Name"] == found["name"]
            assert row["Clients"] == f"{len(found['clients'])} of {found['processes'] or 'any'}"
            for word in ("State", "GPU", "Threads", "Memory", "User", "Name"):
                assert f" {row[word]} " in f"{printed[lease]} "

    def test_queue(self, node: Node, leases: list[str], open_page: Open) -> None:
        """A waiting request has a place and a reason until it is granted."""
        page = open_page(node)
        (row,) = rows(page, "queue")
        waiting = next(each for each in node.leases() if each["state"] == "waiting")
        assert row["Lease"] == waiting["id"]
        assert row["Place"] == f"{waiting['wait']['position']}"
        assert row["Waits for"] == waiting["wait"]["waits_for"]
        assert row["Because"] == waiting["wait"]["because"]
        assert row["Name"] == "sweep"
        node.request("DELETE", f"/v1/leases/{leases[0]}")
        page.wait(
            "document.querySelector('#queue-table tbody').innerText === 'no lease waits'", "the queue to be empty"
        )
        page.wait(
            f"!document.querySelector('#lease-table tbody').innerText.includes('{leases[0]}')", "the row to be gone"
        )

    def test_events(self, node: Node, open_page: Open) -> None:
        """Events are the sentences of `mpsctl events`, the latest first, and new ones appear without a reload."""
        page = open_page(node)
        lease = node.request("POST", "/v1/leases", {"threads": 5, "memory": "1GiB", "pid": os.getpid()}).json["id"]
        page.wait(f"document.getElementById('event-list').innerText.includes('{lease}: granted')", "the event")
        node.request("DELETE", f"/v1/leases/{lease}")
        page.wait(f"document.getElementById('event-list').innerText.includes('{lease}: ended')", "the next event")

        def shown() -> list[str]:
            found: list[str] = page.do("""[...document.querySelectorAll('#event-list li')].reverse().map(each =>
                `${each.querySelector('time').innerText} ${each.querySelector('.said').innerText}`)""")
            return found

        def printed() -> list[str]:
            lines = node.mpsctl("events", "-n", "200").stdout.splitlines()
            return [f"{line[:19]} {line[23:]}" for line in lines]

        wait_until(lambda: shown() == printed(), what="the same events")

    def test_story(self, node: Node, leases: list[str], open_page: Open) -> None:
        """A lease's story agrees with `mpsctl explain`; it has an address of its own, and Back returns to the node."""
        page = open_page(node)
        page.click(f"[...document.querySelectorAll('#lease-table a')].find(each => each.innerText === '{leases[0]}')")
        page.wait("document.querySelectorAll('#story .events li').length > 0", "the story")
        said = json.loads(node.mpsctl("explain", leases[0], "-o", "json").stdout)
        assert page.do("location.hash") == f"#/story/{leases[0]}"
        assert page.text("document.getElementById('headline')") == said["about"]
        assert page.do("document.activeElement.id") == "headline"
        sentences = page.do("[...document.querySelectorAll('#story .events .said')].map(each => each.innerText)")
        assert len(sentences) == len(said["events"])
        assert any(": granted to " in each for each in sentences)
        lists = page.do(
            "[...document.querySelectorAll('#story > ul')].map(list => [...list.children].map(each => each.innerText))"
        )
        words = [[re.sub(r"\d+[smhd]\b", "", each) for each in texts] for texts in (*lists, said["now"], said["next"])]
        assert words[0] == words[2]
        assert words[1] == words[3]
        page.do("history.back()")
        page.wait("!document.getElementById('overview').hidden", "the node again")
        assert not page.complaints()

    def test_texts_of_others(self, node: Node, leases: list[str], open_page: Open) -> None:
        """The page shows a name with HTML as text everywhere, and without any violation of its policy."""
        page = open_page(node)
        page.open(f"{page.do('location.origin')}/#/story/{leases[2]}")
        page.wait("document.querySelectorAll('#story .events li').length > 0", "the story")
        page.do("history.back()")
        page.wait("!document.getElementById('overview').hidden", "the node again")
        row = f"[...document.querySelectorAll('#lease-table tr')].find(each => each.innerText.includes('{leases[2]}'))"
        page.click(f"{row}.querySelector('button')")
        assert HOSTILE in page.text("document.getElementById('question')")
        assert HOSTILE in page.text("document.getElementById('lease-table')")
        assert HOSTILE in page.text("document.getElementById('gpu-list')")
        assert page.do("document.querySelectorAll('img, main script').length") == 0
        assert "owned" not in page.do("document.title")
        assert not page.complaints()

    @pytest.mark.usefixtures("leases")
    def test_filter_and_order(self, node: Node, open_page: Open) -> None:
        """The filter and the order are in the address, so that the address shows the same view again."""
        page = open_page(node)
        page.click(
            "[...document.querySelectorAll('#lease-table th button')].find(each => each.innerText === 'Threads')"
        )
        assert [each["Threads"] for each in rows(page, "lease")] == ["12.5%", "20%", "50%", "90%"]
        assert page.do("document.querySelector('#lease-table th[aria-sort=ascending]').innerText").startswith("Threads")
        page.click(
            "[...document.querySelectorAll('#lease-table th button')].find(each => each.innerText === 'Threads')"
        )
        assert [each["Threads"] for each in rows(page, "lease")] == ["90%", "50%", "20%", "12.5%"]
        page.do("document.getElementById('filter').focus()")
        page.type("ning")
        assert [each["Name"] for each in rows(page, "lease")] == ["training"]
        assert page.do("location.hash") == "#/?filter=ning&sort=Threads&down="
        page.reload()
        page.wait("document.querySelectorAll('#lease-table tbody a').length === 1", "the same view")
        assert page.do("document.getElementById('filter').value") == "ning"

    def test_mpsd_is_gone(self, make_node: Callable[..., Node], open_page: Open) -> None:
        """While no mpsd answers, the page says so, and that its content is old; it recovers by itself."""
        node = make_node()
        page = open_page(node.start())
        node.end()
        page.wait(
            "document.getElementById('connection').innerText.includes('mpsd does not answer')", "the page to say so"
        )
        assert "systemctl start mpsd" in page.text("document.getElementById('connection')")
        assert "this is how the node was at" in page.text("document.getElementById('connection')")
        node.start()
        page.wait("document.getElementById('connection').innerText === ''", "the page to recover", deadline=20)
        page.wait("document.getElementById('event-list').innerText.split('mpsd started').length > 2", "the new events")


class TestSession:
    """The page lives as long as its `mpsctl web`, and only in the tab that opened it."""

    def test_end(self, node: Node, browser: Browser, make_web: Callable[..., Web]) -> None:
        """When `mpsctl web` ends, the page says so, forgets its session, and sends no more requests."""
        web = make_web(node.socket)
        page = browser.page(web.link)
        page.wait("!document.getElementById('overview').hidden", "the node")
        assert page.do("sessionStorage.length") == 1
        assert page.do("localStorage.length + document.cookie.length") == 0
        web.end()
        page.wait("document.getElementById('connection').innerText.includes('has ended')", "the page to say so")
        assert page.do("sessionStorage.length") == 0
        page.do("window.setTimeout = () => { window.asks = true; }")
        page.do("document.dispatchEvent(new Event('visibilitychange'))")
        assert not page.do("window.asks")
        page.close()

    def test_killed(self, node: Node, browser: Browser, make_web: Callable[..., Web]) -> None:
        """After SIGKILL of `mpsctl web`, the page says that it is gone, and keeps its last content."""
        web = make_web(node.socket)
        page = browser.page(web.link)
        page.wait("!document.getElementById('overview').hidden", "the node")
        web.end(signal.SIGKILL)
        page.wait("document.getElementById('connection').innerText.includes('does not answer')", "the page to say so")
        assert page.do("document.body.classList.contains('stale')")
        page.close()

    def test_used_link(self, node: Node, browser: Browser, make_web: Callable[..., Web]) -> None:
        """A page with a used link, or without one, shows nothing of the node, and says how to get a link."""
        web = make_web(node.socket)
        assert web.session
        for link, said in (
            (web.link, "this link was used before"),
            (web.address, "open the link that mpsctl web printed"),
        ):
            page = browser.page(link)
            page.wait(f"document.getElementById('connection').innerText.includes('{said}')", "the page to say so")
            assert page.text("document.getElementById('headline')") == "This page is closed"
            assert page.do("document.getElementById('overview').hidden")
            page.close()

    def test_pause(self, node: Node, open_page: Open) -> None:
        """A paused page does not change until it is resumed."""
        page = open_page(node)
        page.click("document.getElementById('pause')")
        asked = page.do(ASKED)
        lease = node.request("POST", "/v1/leases", {"threads": 5, "memory": "1GiB", "pid": os.getpid()}).json["id"]
        page.wait(f"{ASKED} > {asked} + 1", "the page to ask again, twice")
        page.do("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert lease not in page.text("document.getElementById('overview')")
        page.click("document.getElementById('pause')")
        page.wait(f"document.getElementById('lease-table').innerText.includes('{lease}')", "the lease")


class TestClients:
    """Clients are listed, and ended by an administrator."""

    @pytest.fixture
    def simulated(self, make_node: Callable[..., Node]) -> Node:
        config = f'[enforcement]\ngrace = 0.3\nunadmitted = "defaults"\n[roles]\nusers = ["{NOBODY}"]\n'
        return make_node(simulate=1, control=None, config=config).start()

    def test_end(self, simulated: Node, open_page: Open) -> None:
        """The row has memory, user and lease; the button asks, and the process ends, and no other."""
        with target(simulated) as neighbour, SimulatedClient(variables(simulated)) as rogue:
            assert rogue.alloc("1GiB")["ok"]
            neighbour.loop(0.005)
            page = open_page(simulated)
            button = f"document.querySelector('[aria-label=\"End process {rogue.pid}\"]')"
            page.wait(button, "the rogue to be listed")
            found = {row["PID"]: row for row in rows(page, "client")}
            assert {each: found[f"{rogue.pid}"][each] for each in ("User", "GPU", "Lease")} == {
                "User": name_of(os.geteuid()),
                "GPU": "0",
                "Lease": "none",
            }
            assert found[f"{neighbour.pid}"]["Lease"] == lease_of(simulated, neighbour)
            page.click(button)
            assert "no other client is harmed" in page.text("document.getElementById('question')")
            page.click("document.querySelector('#question button[type=submit]')")
            assert rogue.process.wait(20) == -signal.SIGTERM
            page.wait(f"!{button}", "the row to go")
            unharmed(neighbour)
            neighbour.end()
            assert not page.complaints()

    @needs_root
    def test_no_administrator(self, simulated: Node, make_web: Callable[..., Web], browser: Browser) -> None:
        """A user who may not end clients has no button, and its request is refused."""
        with SimulatedClient(variables(simulated)) as client:
            pid = client.hello["pid"]
            page = browser.page(make_web(simulated.socket, uid=NOBODY).link)
            page.wait(f"document.getElementById('client-table').innerText.includes('{pid}')", "it to be listed")
            assert page.do("document.querySelectorAll('#client-table button').length") == 0
            page.close()
            assert make_web(simulated.socket, uid=NOBODY).ask("POST", f"/v1/clients/{pid}/end", {}).status == 403
            assert client.sync()["ok"]

    def test_fault(self, simulated: Node, open_page: Open) -> None:
        """A GPU whose server handles a fault is not shown as well."""
        with target(simulated) as client:
            page = open_page(simulated)
            states = "[...document.querySelectorAll('#gpu-list article p')[0].children].map(each => each.className)"
            assert page.do(states)[:2] == ["state-good", "state-good"]
            client.fault()
            page.wait(f"({states})[0] === 'state-bad'", "the page to show the fault")
            assert page.do(states)[1] == "state-bad"
            page.wait("document.getElementById('reasons').innerText.includes('mpsctl end ')", "the command")


def test_colours(node: Node, open_page: Open) -> None:
    """Neighbouring slices have different colours, of many leases and of the use without one."""
    for number in range(20):
        assert node.request(
            "POST", "/v1/leases", {"threads": 2, "memory": "1MiB", "gpu": "0", "name": f"{number}"}
        ).json
    page = open_page(node)
    colours = page.do(
        "[...document.querySelector('.bar').children].map(each => getComputedStyle(each).backgroundColor)"
    )
    assert len(colours) == 20
    assert all(one != other for one, other in pairwise(colours))
    assert len({*colours[:8]}) >= 7


class TestActions:
    """Each button asks first, describes its effect, and has it; a user without the right has no button."""

    def test_hold_and_resume(self, node: Node, open_page: Open) -> None:
        """A hold with its reason, and the resume after it."""
        page = open_page(node)
        page.click("document.querySelector('[aria-label=\"Hold gpu1\"]')")
        assert page.text("document.getElementById('question-heading')") == "Hold gpu1?"
        assert "Running clients continue, and nothing is stopped." in page.text("document.getElementById('question')")
        assert node.daemons()["gpu1"]["state"] == "ready"
        page.type("for a test")
        page.press("Enter")
        assert "for a test" in node.wait_for_state("gpu1", "held")["because"]
        page.wait("document.querySelector('[aria-label=\"Resume gpu1\"]')", "the button that resumes")
        held = as_here(node.daemons()["gpu1"]["because"])  # with the user's name, as mpsctl prints it
        assert held in page.text("document.getElementById('gpu-list')")
        page.click("document.querySelector('[aria-label=\"Resume gpu1\"]')")
        page.click("document.querySelector('#question button[type=submit]')")
        node.wait_for_state("gpu1", "ready")
        page.wait("document.querySelector('[aria-label=\"Hold gpu1\"]')", "the button that holds")
        assert not page.complaints()

    def test_cancel(self, node: Node, open_page: Open) -> None:
        """Cancel and Escape do nothing, and the focus returns to the button."""
        page = open_page(node)
        for by_key in (True, False):
            page.click("document.querySelector('[aria-label=\"Drain gpu0\"]')")
            page.wait("document.getElementById('question').open", "the question")
            if by_key:
                page.press("Escape")
            else:
                page.click("document.querySelector('#question button[type=button]')")
            page.wait("!document.getElementById('question').open", "it to be closed")
            assert page.do("document.activeElement.getAttribute('aria-label')") == "Drain gpu0"
        assert node.daemons()["gpu0"]["state"] == "ready"

    def test_drain_and_restart(self, make_node: Callable[..., Node], open_page: Open) -> None:
        """A drain waits for clients, and a restart replaces the control daemon."""
        node = make_node()
        page = open_page(node.start())
        page.click("document.querySelector('[aria-label=\"Drain gpu0\"]')")
        page.click("document.querySelector('#question button[type=submit]')")
        node.wait_for_state("gpu0", "draining")
        page.wait(f"{ANNOUNCED}.length >= 2", "the page to announce the drain, and the node's new first line")
        assert any(each.startswith("gpu0: drain ") for each in page.do(ANNOUNCED))
        page.wait("document.querySelector('[aria-label=\"Restart gpu0\"]')", "the button")
        before = node.daemons()["gpu0"]["pid"]
        page.click("document.querySelector('[aria-label=\"Restart gpu0\"]')")
        page.click("document.querySelector('#question button[type=submit]')")
        wait_until(
            lambda: node.daemons()["gpu0"]["pid"] not in {None, before}, what="another control daemon", deadline=20
        )

    def test_release_and_renew(self, node: Node, leases: list[str], open_page: Open) -> None:
        """A renewal gives a lease more time, and a release ends it."""
        page = open_page(node)
        button = f"document.querySelector('[aria-label=\"{{}} {leases[1]} (notebook)\"]')"
        page.click(button.format("Renew"))
        page.do("document.querySelector('#question input').select()")
        page.type("7200")
        page.press("Enter")
        page.wait("!document.getElementById('question').open", "the answer")
        lease = node.get(f"/v1/leases/{leases[1]}").json
        assert age(lease["created"], datetime.fromisoformat(lease["expires"])) == "2h"
        page.click(button.format("Release"))
        assert "Its clients continue to run, without a lease." in page.text("document.getElementById('question')")
        page.click("document.querySelector('#question button[type=submit]')")
        wait_until(lambda: node.get(f"/v1/leases/{leases[1]}").json["state"] == "ended", what="the lease to end")

    def test_refusal(self, node: Node, leases: list[str], open_page: Open) -> None:
        """The dialog shows mpsd's refusal with its remedy, and nothing changes."""
        page = open_page(node)
        page.click(f"document.querySelector('[aria-label=\"Renew {leases[1]} (notebook)\"]')")
        page.do("document.querySelector('#question input').select()")
        page.type("soon")
        page.press("Enter")
        assert "a number is needed" in page.text("document.querySelector('.refusal')")
        before = node.get(f"/v1/leases/{leases[1]}").json["expires"]
        page.do("document.querySelector('#question input').select()")
        page.type("0")
        page.press("Enter")
        page.wait("document.querySelector('.refusal').innerText.includes('ttl')", "mpsd's refusal")
        assert node.get(f"/v1/leases/{leases[1]}").json["expires"][:19] == before[:19]

    @pytest.mark.root("run the page as another user")
    @pytest.mark.parametrize("opened", ["false", "true"])
    def test_another_user(
        self, make_node: Callable[..., Node], browser: Browser, make_web: Callable[..., Web], opened: str
    ) -> None:
        """A user who is no administrator has buttons for its own leases only, and sees of others what mpsd shows."""
        is_open = opened == "true"
        node = make_node(config=f"[api]\nopen = {opened}\n").start()
        node.root.parent.chmod(0o711)
        lease = node.request("POST", "/v1/leases", {"threads": 50, "memory": "1GiB", "pid": os.getpid()}).json["id"]
        page = browser.page(make_web(node.socket, uid=NOBODY).link)
        page.wait("!document.getElementById('overview').hidden", "the node")
        assert [each["Lease"] for each in rows(page, "lease") if "Lease" in each] == ([lease] if is_open else [])
        assert page.do("[...document.querySelectorAll('.actions button')].length") == 0
        others = "" if is_open else "and 1 lease of other users, of 50% and 1GiB in all"
        assert page.text("document.getElementById('others')") == others
        assert page.text("document.getElementById('who')") == "nobody, user"
        page.close()
