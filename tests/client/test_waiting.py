"""A request for a lease is repeated until it is answered, gets one lease, and leaves none when it is given up."""

import json
import re
from collections import Counter
from math import inf
from pathlib import Path

import pytest

from mpsd.client import Client, waiting
from mpsd.core.errors import DoesNotFitError, MpsdError, UnreachableError
from tests.cli.answering import Answering, answering, http
from tests.node import Node

SMALL = {"threads": 1, "memory": "1MiB"}


def bodies(server: Answering) -> list[dict[str, object]]:
    return [json.loads(request.partition(b"\r\n\r\n")[2]) for request in server.requests]


@pytest.mark.parametrize("wait", [0, 60, inf])
def test_a_lost_answer(short_tmp: Path, wait: float) -> None:
    """A request whose answer is lost is sent again with its id, even if it may not wait: it may have got a lease."""
    away = http({"code": "stopping", "detail": "why", "hint": "what to do"}, "503 Service Unavailable")
    with answering(short_tmp / "s", [Answering.hang_up], away, http({"id": "lease-1"})) as server:
        with Client(str(short_tmp / "s")) as client:
            assert waiting.take(client, SMALL, wait=wait)["id"] == "lease-1"
        first, *others = bodies(server)
    assert re.fullmatch(r"python-\w{24}", str(first["request_id"]))
    assert [each["request_id"] for each in others] == [first["request_id"]] * 2
    assert all(
        each["wait"] is None if wait == inf else 0 <= float(str(each["wait"])) <= wait for each in [first, *others]
    )


def test_an_id_of_the_callers_own(short_tmp: Path) -> None:
    """A request with an id keeps it."""
    with answering(short_tmp / "s", http({"id": "lease-1"})) as server, Client(str(short_tmp / "s")) as client:
        waiting.take(client, {**SMALL, "request_id": "mine"}, wait=1)
        assert [each["request_id"] for each in bodies(server)] == ["mine"]


def test_no_mpsd(short_tmp: Path) -> None:
    """An mpsd that never answered is not waited for by a request that may not wait; a refusal is not repeated."""
    with pytest.raises(UnreachableError, match="there is no socket"):
        waiting.take(Client(f"{short_tmp}/s"), SMALL, wait=0)
    refusal = http({"code": "does_not_fit", "detail": "why", "hint": "what to do"}, "409 Conflict")
    with answering(short_tmp / "s", refusal) as server, Client(str(short_tmp / "s")) as client:
        with pytest.raises(DoesNotFitError):
            waiting.take(client, SMALL, wait=60)
        assert len(server.requests) == 1


class Interrupting(waiting.Progress):
    """Interrupts the wait at its first look."""

    def __init__(self) -> None:
        self.left: list[bool | None] = []

    def look(self) -> float:
        raise KeyboardInterrupt

    def leave(self, *, had_place: bool | None) -> None:
        self.left.append(had_place)


def test_an_interrupted_wait(node: Node) -> None:
    """An interrupted caller gives up its place at once, and mpsd has no lease of its request."""
    with Client(str(node.socket)) as client:
        full = [client.admit({"threads": 100, "memory": "1MiB", "gpu": gpu["uuid"]}) for gpu in client.gpus()["gpus"]]
        progress = Interrupting()
        with pytest.raises(KeyboardInterrupt):
            waiting.take(client, SMALL, wait=inf, progress=progress)
        assert progress.left == [True]
        assert Counter(each["id"] for each in client.leases()["leases"]) == Counter(each["id"] for each in full)


def test_giving_up_without_mpsd(short_tmp: Path) -> None:
    """Where mpsd does not say whether there was a place, the exception of the caller is raised all the same."""
    progress = Interrupting()
    with (
        answering(short_tmp / "s", None, None),
        Client(str(short_tmp / "s")) as client,
        pytest.raises(KeyboardInterrupt),
    ):
        waiting.take(client, SMALL, wait=inf, progress=progress)
    assert progress.left == [None]


def test_through_a_restart(short_tmp: Path) -> None:
    """A request that may be repeated is repeated until mpsd is back, and an error that stays is raised."""
    answers = ([Answering.hang_up], http(None, "204 No Content"))
    with answering(short_tmp / "s", *answers) as server, Client(str(short_tmp / "s")) as client:
        waiting.through_a_restart(lambda: client.release("lease-1"))
        assert len(server.requests) == 2
    stranger = [b"SSH-2.0-OpenSSH_9.2\r\n"]
    no_answer = pytest.raises(MpsdError, match="does not answer as mpsd does")
    with answering(short_tmp / "t", stranger), Client(str(short_tmp / "t")) as client, no_answer:
        waiting.through_a_restart(client.status)
