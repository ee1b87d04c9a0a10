"""Generated clients request leases, read times and bytes, and follow events."""

from pathlib import Path
from typing import Final

import pytest

from tests.clients.generated import go_client, lines, python_client, run
from tests.node import Node

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

HERE: Final = Path(__file__).parent

GIB: Final = 2**30


def check(said: str, *, granted: list[str], true: str) -> None:
    """Check that a user of a client got the expected results."""
    assert lines(said, "healthy ") == [true]
    assert lines(said, "total ") == [f"{2 * 80 * GIB}"]
    assert lines(said, "granted ") == granted
    assert lines(said, "verdict ") == ["nothing"] * 3
    assert lines(said, "renewed ") == [true] * 3
    assert lines(said, "refused ") == ["422 never_fits"]
    assert lines(said, "held ")[0].startswith("hold ")
    events = lines(said, "event ")
    assert "operation_begun" in events
    assert events[-1] == "heartbeat"
    assert lines(said, "kept ") == [true]
    assert "no time" not in said


def test_python(node: Node, document: Path, short_tmp: Path) -> None:
    """A Python client, by openapi-python-client, which accepts every operation without a warning."""
    python_client(document, short_tmp)
    said = run("python", str(HERE / "python_user.py"), str(short_tmp), str(node.socket), cwd=short_tmp)
    granted = [f"granted 25.0 {8 * GIB}", f"granted 5.5 {6 * GIB}", f"granted 25.0 {20 * GIB - 128 * 2**20}"]
    check(said, granted=granted, true="True")
    assert lines(said, "daemons ") == ["['gpu0', 'gpu1']"]


def test_go(node: Node, document: Path, short_tmp: Path) -> None:
    """A Go client, by OpenAPI Generator: it compiles completely, and a granted lease is decoded."""
    go_client(document, short_tmp)
    run("go", "vet", ".", cwd=short_tmp)
    user = short_tmp / "user"
    user.mkdir()
    (user / "main.go").write_text((HERE / "go_user.go").read_text(encoding="utf-8"), encoding="utf-8")
    said = run("go", "run", "./user", str(node.socket), cwd=short_tmp)
    granted = [f"granted 25 {8 * GIB}", f"granted 5.5 {6 * GIB}", f"granted 25 {20 * GIB - 128 * 2**20}"]
    check(said, granted=granted, true="true")
    assert lines(said, "listed ") == ["true"] * 3
