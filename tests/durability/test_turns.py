"""What is decided at the same time is stored together, and what is decided alone at once."""

import contextlib
import json
import os
import signal
import sqlite3
from contextlib import closing
from itertools import chain
from typing import Final

from tests.admission.asking import Talk, message
from tests.durability.conftest import Start
from tests.node import Node

_MANY: Final = 40
"""Fewer than the clients that one GPU can have."""


def commits(node: Node) -> list[int]:
    """Return of how many leases each commit told, after mpsd was killed."""
    with closing(sqlite3.connect(node.root / "run" / "leases.db")) as database:
        said = chain.from_iterable(json.loads(row) for (row,) in database.execute("SELECT news FROM leases"))
        return [len(news) for _, news in said]


def ask(node: Node, *, together: bool) -> None:
    """Have many callers ask for a lease each, all in the same moment or one after the other, and kill mpsd."""
    request = message("POST", "/v1/leases", {"threads": 1, "memory": "1MiB"})
    with contextlib.ExitStack() as stack:
        callers = [stack.enter_context(Talk(node.socket)) for _ in range(_MANY)]
        assert {each.ask("GET", "/healthz").status for each in callers} == {200}
        if together:
            os.kill(node.pid, signal.SIGSTOP)
        for each in callers:
            each.send(request)
            if not together:
                assert each.answer().status == 201
        if together:
            os.kill(node.pid, signal.SIGCONT)
            assert {each.answer().status for each in callers} == {201}
        node.end(signal.SIGKILL)


def test_together(make_node: Start) -> None:
    """Grants of many callers in the same moment share a few commits."""
    node = make_node().start()
    ask(node, together=True)
    found = commits(node)
    assert sum(found) == _MANY
    assert len(found) <= 4


def test_one_by_one(make_node: Start) -> None:
    """Each grant that was asked for alone is stored alone, before its caller hears of it."""
    node = make_node().start()
    ask(node, together=False)
    assert commits(node) == [1] * _MANY
