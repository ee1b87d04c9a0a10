"""The API's document, as a running mpsd serves it: allowed requests are answered by it, forbidden ones are refused.

schemathesis makes the requests, and requests sends them over the unix socket, so that callers are real ones here too.
MPSD_API_EXAMPLES is the number of requests of each kind.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import requests
import schemathesis
import urllib3
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from requests.adapters import HTTPAdapter
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from mpsd.daemon.api.openapi import document
from mpsd.daemon.api.routes import ROUTES
from tests.daemon.conftest import Start
from tests.daemon.leases.line import OWN_UID, connect
from tests.node import Node

pytestmark = [pytest.mark.real_daemon(535), pytest.mark.thorough]

USER: Final = 2401

ROWS: Final = {f"{route.method} {route.path}": route for route in ROUTES}
TAKING: Final = [label for label, route in ROWS.items() if route.body is not None or route.query is not None]
"""Operations with parameters or a body, which can be wrong."""

CONFORMANCE: Final = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
]

EXAMPLES: Final = int(os.environ.get("MPSD_API_EXAMPLES", "10"))


class _Pool(urllib3.connectionpool.HTTPConnectionPool):
    """Connections to one unix socket, all as one user."""

    def __init__(self, path: Path, uid: int | None) -> None:
        super().__init__("mpsd")
        self._path = path
        self._uid = uid

    def _new_conn(self) -> urllib3.connection.HTTPConnection:
        connection = urllib3.connection.HTTPConnection("mpsd")
        connection.sock = connect(self._path, uid=self._uid)
        return connection


class _Adapter(HTTPAdapter):
    """Sends requests for http://mpsd to the socket, whatever the rest of the URL is."""

    def __init__(self, path: Path, uid: int | None) -> None:
        super().__init__()
        self._pool = _Pool(path, uid)

    def get_connection_with_tls_context(self, *_: object, **__: object) -> _Pool:
        """Return the connections to the socket."""
        return self._pool

    def close(self) -> None:
        """Close them."""
        self._pool.close()
        super().close()


@pytest.fixture(scope="module")
def node(node_for_all: Start) -> Iterator[Node]:
    """Start the node that the tests of this module share; none of them may meet a defect."""
    node = node_for_all(config=f'[roles]\nusers = ["{USER}"]\n').start()
    yield node
    assert node.exited() is None
    assert node.events("api_defect") == []


@pytest.fixture(scope="module")
def running(node: Node) -> Any:
    """Return the document of the running mpsd."""
    return node.get("/v1/openapi.json").json


@pytest.fixture(scope="module")
def operations(running: Any) -> dict[str, Any]:
    """Return the operations of that document as objects of schemathesis, by method and path."""
    schema = schemathesis.openapi.from_dict(running)
    found: list[Any] = [each.ok() for each in schema.get_all_operations() if hasattr(each, "ok")]
    return {operation.label: operation for operation in found}


@pytest.fixture
def sessions(node: Node) -> Iterator[st.SearchStrategy[requests.Session]]:
    """Yield a choice of sessions over the socket: root's, and, where the tests may become another user, a user's."""
    callers = [requests.Session() for _ in ((None, USER) if OWN_UID == 0 else (None,))]
    for session, uid in zip(callers, (None, USER), strict=False):
        session.mount("http://mpsd", _Adapter(node.socket, uid))
    yield st.sampled_from(callers)
    for session in callers:
        session.close()


def tame(case: Any) -> Any:
    """Return a case that stays allowed or forbidden, and whose answer does not depend on time.

    Such a case does not wait or follow, and its lease does not end before its caller has the answer.
    """
    if isinstance(case.query, dict) and case.query.get("follow") == "true":
        case.query["follow"] = "false"
    if isinstance(case.body, dict):
        wait = case.body.get("wait", 0)
        if wait is None or (isinstance(wait, (int, float)) and not isinstance(wait, bool) and wait > 0):
            case.body["wait"] = 0
        ttl = case.body.get("ttl")
        if isinstance(ttl, (int, float)) and not isinstance(ttl, bool) and 0 < ttl < 60:
            case.body["ttl"] = 60
    return case


def conform(node: Node, session: requests.Session, case: Any, *, more: str = "not_a_server_error") -> int:
    """Send a case, check the answer against the document, and return its status; `more` is a check of schemathesis."""
    response = case.call(base_url="http://mpsd", session=session, timeout=20)
    case.validate_response(response, checks=CHECKS.get_by_names([*CONFORMANCE, more]))
    if response.status_code == 201:
        assert node.request("DELETE", f"/v1/leases/{response.json()['id']}").status == 204
    status: int = response.status_code
    return status


def many(label: str) -> settings:
    """Return the number of cases of an operation, over a node that is started once; two where all are the same."""
    number = EXAMPLES if label in TAKING or "{" in label else 2
    return settings(max_examples=number, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("label", ROWS)
def test_what_is_allowed(node: Node, sessions: Any, operations: dict[str, Any], label: str) -> None:
    """Every request that the document allows is answered with a documented status, in the documented form."""

    @many(label)
    @given(case=operations[label].as_strategy(generation_mode=GenerationMode.POSITIVE), session=sessions)
    def check(case: Any, session: requests.Session) -> None:
        conform(node, session, tame(case))

    check()


@pytest.mark.parametrize("label", TAKING)
def test_what_is_forbidden(node: Node, sessions: Any, operations: dict[str, Any], label: str) -> None:
    """Every request that the document forbids is refused with a documented status, in the documented form."""

    @many(label)
    @given(case=operations[label].as_strategy(generation_mode=GenerationMode.NEGATIVE), session=sessions)
    def check(case: Any, session: requests.Session) -> None:
        assume(case.body is not None)  # null counts as no body, though the document does not say so
        conform(node, session, tame(case), more="negative_data_rejection")

    check()


def test_what_makes_sense(node: Node, sessions: Any, operations: dict[str, Any]) -> None:
    """A request for existing resources, with any other allowed values, is granted."""
    label = "POST /v1/leases"

    @many(label)
    @given(
        case=operations[label].as_strategy(generation_mode=GenerationMode.POSITIVE),
        some=st.fixed_dictionaries({"threads": st.integers(1, 1000).map(lambda tenths: tenths / 10)})
        | st.fixed_dictionaries({"fraction": st.floats(0.001, 1)}),
        session=sessions,
    )
    def check(case: Any, some: dict[str, float], session: requests.Session) -> None:
        kept = {name: value for name, value in case.body.items() if name in {"name", "labels", "ttl", "request_id"}}
        case.body = {"memory": "1GiB", **kept, **some} if "threads" in some else {**kept, **some}
        assert conform(node, session, tame(case)) == 201

    check()


def test_it_is_whole(running: Any, operations: dict[str, Any]) -> None:
    """The running mpsd serves the document that is made from its route table, with exactly its routes."""
    assert running == json.loads(json.dumps(document(ROUTES)))
    assert sorted(operations) == sorted(ROWS)


def test_without_docstrings(make_node: Start, running: Any) -> None:
    """An mpsd whose Python drops docstrings and assertions serves the same document."""
    node = make_node(fork_server=None, env={"PYTHONOPTIMIZE": "2"}).start()
    answer = node.get("/v1/openapi.json")
    assert (answer.status, answer.json) == (200, running)


def test_patterns_mean_the_same_everywhere(running: Any) -> None:
    """No pattern uses features that only Python's regular expressions have."""
    patterns = re.findall(r'"pattern": "((?:[^"\\]|\\.)*)"', json.dumps(running))
    assert patterns
    assert not [each for each in patterns if re.search(r"\\\\[AZzGQE]|\(\?[PiLmsux#<]", each)]
