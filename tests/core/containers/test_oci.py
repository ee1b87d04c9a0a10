"""A hook's view of a container: its state, its configuration, and the uid of its program."""

import json
from typing import Any

import pytest

from mpsd.core.containers import oci
from mpsd.core.errors import InvalidRequestError


def raw(content: Any) -> bytes:
    return json.dumps(content).encode()


class TestState:
    """The container that is being created."""

    def test_read(self) -> None:
        """The state has the runtime's process, and the path of the configuration."""
        found = oci.state(raw({"ociVersion": "1.0.2", "id": "c", "status": "creating", "pid": 17, "bundle": "/b"}))
        assert found == oci.State(17, "/b")

    @pytest.mark.parametrize(
        "content",
        [
            None, [], {}, {"pid": 17}, {"bundle": "/b"}, {"pid": 0, "bundle": "/b"}, {"pid": -1, "bundle": "/b"},
            {"pid": True, "bundle": "/b"}, {"pid": "17", "bundle": "/b"}, {"pid": 17, "bundle": "b"},
            {"pid": 17, "bundle": 5},
        ],
    )  # fmt: skip
    def test_none(self, content: Any) -> None:
        """A document that is not the state of a container is refused."""
        with pytest.raises(InvalidRequestError):
            oci.state(raw(content))

    @pytest.mark.parametrize("junk", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
    def test_junk(self, junk: bytes) -> None:
        """Bytes that are no JSON are refused."""
        with pytest.raises(InvalidRequestError):
            oci.state(junk)


class TestContainer:
    """The program of a container."""

    def test_read(self) -> None:
        """Uid, gid, variables and mounts are read; of several mounts on a path, the last one is visible."""
        found = oci.container(
            raw(
                {
                    "process": {"user": {"uid": 1000, "gid": 100}, "env": ["A=1", "B=x=y", "odd", "A=2"]},
                    "mounts": [
                        {"destination": "/p", "type": "tmpfs"},
                        {"destination": "/d", "source": "/one"},
                        {"destination": "/d", "source": "/two"},
                    ],
                }
            )
        )
        assert found == oci.Container(1000, 100, {"A": "2", "B": "x=y"}, {"/p": "", "/d": "/two"})

    def test_root(self) -> None:
        """Without a user it is root; variables and mounts are optional."""
        assert oci.container(raw({"process": {"env": None}, "mounts": None})) == oci.Container(0, 0, {}, {})

    @pytest.mark.parametrize(
        "content",
        [
            None, [], {}, {"process": None}, {"process": {"user": {"uid": "0"}}}, {"process": {"user": {"uid": True}}},
            {"process": {"user": 5}}, {"process": {"env": [5]}}, {"process": {}, "mounts": [{}]},
            {"process": {}, "mounts": [5]},
        ],
    )  # fmt: skip
    def test_none(self, content: Any) -> None:
        """A document that is not the configuration of a container is refused."""
        with pytest.raises(InvalidRequestError):
            oci.container(raw(content))


@pytest.mark.parametrize(
    ("id_map", "inside", "expected"),
    [
        ("         0          0 4294967295\n", 2601, 2601),
        ("         0      65534          1\n", 0, 65534),
        ("         0      65534          1\n", 1, None),
        ("0 1000 1\n1 100000 65536\n", 0, 1000),
        ("0 1000 1\n1 100000 65536\n", 1, 100000),
        ("0 1000 1\n1 100000 65536\n", 1000, 100999),
        ("0 1000 1\n1 100000 65536\n", 65536, 165535),
        ("0 1000 1\n1 100000 65536\n", 65537, None),
        ("0 1 1000\n1000 0 1\n", 1000, 0),
        ("", 0, None),
    ],
)
def test_outside(id_map: str, inside: int, expected: int | None) -> None:
    """A uid is mapped by the line that contains it; a uid without a line has no uid outside."""
    assert oci.outside(id_map, inside) == expected
