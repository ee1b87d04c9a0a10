"""The claims that kubelet prepared, on disk, whatever stands beside them."""

import json
from io import StringIO
from pathlib import Path

import pytest

from mpsd.core.dra.prepared import PreparedClaim
from mpsd.core.settings import LogFormat
from mpsd.kubernetes.dra.prepared_claims import PreparedStore
from mpsd.kubernetes.log import Log

OTHER = '{"uid":"uid-2","namespace":"default","name":"claim","pods":[],"shares":[],"version":2}'

CLAIM = PreparedClaim("uid-1", "default", "claim", [], [])


@pytest.mark.parametrize("damage", [b"", b"{", b'{"uid":"\xff"}', b"[" * 100_000, b'{"uid":"uid-2"}', OTHER.encode()])
def test_a_damaged_record(tmp_path: Path, damage: bytes) -> None:
    """A record that cannot be parsed, text that is not UTF-8 included, is logged, and the others are there."""
    log = StringIO()
    PreparedStore(tmp_path, Log(LogFormat.JSON, log)).put(CLAIM)
    damaged = tmp_path / "uid-2.json"
    damaged.write_bytes(damage)
    store = PreparedStore(tmp_path, Log(LogFormat.JSON, log))
    assert (store.all(), store.unreadable()) == ([CLAIM], {"uid-2"})
    (line,) = map(json.loads, log.getvalue().splitlines())
    assert (line["event"], line["file"]) == ("claim_unreadable", str(damaged))
