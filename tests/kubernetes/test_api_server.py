"""The client of the API server, towards one that is too busy."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd.core.errors import UnreachableError
from mpsd.core.kubernetes import settings
from mpsd.kubernetes.api_server import ApiServer as Client
from mpsd.kubernetes.api_server import place
from tests.kubernetes.dra.api_server import ApiServer

NODE = "/api/v1/nodes/node-1"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    """Yield an API server with a Node, which is too busy."""
    server = ApiServer(tmp_path / "account").start()
    server.put(NODE, {"metadata": {"name": "node-1"}})
    server.refusal = 429
    yield server
    server.stop()


@pytest.fixture
def client(server: ApiServer) -> Client:
    given = {"api_server": server.url, "service_account": str(server.folder)}
    return Client(place(settings.parse("", {}, given), {}), threading.Event())


def test_waits_as_asked(client: Client, server: ApiServer) -> None:
    """It comes back no sooner than the API server wants."""
    server.retry_after = "2"
    client.node("node-1")
    first, second = (each.at for each in server.requests)
    assert second - first >= 2


def test_gives_up_at_once(client: Client, server: ApiServer) -> None:
    """Where that is too late, it fails without a further request."""
    server.retry_after = "3600"
    with pytest.raises(UnreachableError, match="unable to handle the request"):
        client.node("node-1")
    assert [each.status for each in server.requests] == [429]
