"""kubelet's protocol: the messages are protoc's output for the .proto files."""

from tests.gate.protocol import FOLDER, made
from tests.gate.source import ROOT


def test_messages_are_made_of_the_protocol() -> None:
    """Each generated file is up to date, and there is no other: `python -m tests.gate.generate`."""
    wanted = made()
    assert {f"{path.relative_to(ROOT)}" for path in (ROOT / FOLDER).glob("*_pb2.py*")} == set(wanted)
    assert [name for name, text in wanted.items() if (ROOT / name).read_text(encoding="utf-8") != text] == []
