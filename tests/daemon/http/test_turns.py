"""Requests whose cost grows with what others have: they are answered in slices, and others meanwhile."""

import contextlib
import select
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import pytest

from tests.daemon.api.conftest import MakeLine
from tests.daemon.caller import needs_root
from tests.daemon.conftest import Start
from tests.daemon.http.test_load import LABELS, SMALL, too_many
from tests.daemon.leases.line import Line, Talk, message
from tests.node import Answer

pytestmark = pytest.mark.thorough

ANN, BOB = 2501, 2502
LEASES: Final = 40

Connect: TypeAlias = Callable[..., Talk]


@pytest.fixture
def line(make_node: Start, make_line: MakeLine) -> Line:
    """Return a line in front of a node where each lease in an answer is a slice, with a long pause after it."""
    durations = {"mpsd.daemon.api.turns._SLICE": 0.0, "mpsd.daemon.api.turns._REST": 500.0}
    return make_line(make_node(simulate=1, durations=durations).start())


@pytest.fixture
def connect(line: Line) -> Iterator[Connect]:
    """Return a function that connects as some user."""
    with contextlib.ExitStack() as stack:
        yield lambda uid=None: stack.enter_context(Talk(line.node.socket, uid=uid))


def is_answered(talk: Talk) -> bool:
    return bool(select.select([talk], [], [], 0)[0])


def asking(connect: Connect, target: str, uid: int | None = None) -> Talk:
    """Return a connection on which this was requested."""
    talk = connect(uid)
    talk.send(message("GET", target))
    return talk


class TestSlices:
    @pytest.mark.parametrize("target", ["/v1/leases", "/v1/history?by=lease&totals=true"])
    def test_others_meanwhile(self, line: Line, connect: Connect, target: str) -> None:
        """A later request of the same user, and a new lease, come before a long answer, which is whole nevertheless."""
        for _ in range(LEASES):
            line.granted(**SMALL)
        long, other = asking(connect, target), connect()
        assert other.ask("GET", "/v1/status").status == 200
        assert other.ask("POST", "/v1/leases", SMALL).status == 201
        assert not is_answered(long)
        answer = long.answer().json
        assert len(answer["leases" if "leases" in answer else "history"]) == LEASES

    def test_a_lease_that_ends_meanwhile(self, line: Line, connect: Connect) -> None:
        """A lease that is released while the list is made is listed as it was, not as one without its holder."""
        leases = [line.granted(**SMALL) for _ in range(LEASES)]
        long = asking(connect, "/v1/leases")
        line.release(leases[-1])
        assert not is_answered(long)
        (listed,) = [each for each in long.answer().json["leases"] if each["id"] == leases[-1]["id"]]
        assert (listed["state"], "gone" in listed["holders"][0], listed["keepers"]) == ("granted", False, [])

    @needs_root
    def test_one_of_a_user(self, line: Line, connect: Connect) -> None:
        """A user's second long request begins after the first; another user's short one waits for neither."""
        for _ in range(LEASES):
            line.granted(uid=ANN, **SMALL)
        first, second = asking(connect, "/v1/leases", ANN), asking(connect, "/v1/leases", ANN)
        assert connect(BOB).ask("GET", "/v1/clients").json["clients"] == []
        assert not is_answered(first)
        assert len(first.answer().json["leases"]) == LEASES
        assert not is_answered(second)
        second.close()  # the next one does not wait for a caller that has left
        assert asking(connect, "/v1/leases", ANN).answer().status == 200


def test_unread_answers(make_node: Start, make_line: MakeLine) -> None:
    """A user that does not read large answers gets no further one; it gets them again when it has read."""
    durations = {"mpsd.daemon.api.dispatcher._MOST_UNREAD": 500_000}
    line = make_line(make_node(simulate=1, durations=durations).start())
    for _ in range(LEASES):
        line.granted(**SMALL, labels=LABELS)

    def whole(answer: Answer) -> Any:
        return len(answer.json["leases"]) == LEASES

    with Talk(line.node.socket) as deaf, Talk(line.node.socket) as other:
        deaf.send(message("GET", "/v1/leases"))
        assert select.select([deaf], [], [], 20)[0]
        too_many(other.ask("GET", "/v1/leases"), "unread")
        assert other.ask("GET", "/v1/status").status == 200
        assert whole(deaf.answer())
        assert whole(other.ask("GET", "/v1/leases"))
