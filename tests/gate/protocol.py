"""protoc's output for the .proto files of mpsd/kubernetes/protocol, which is beside them.

It is in the tree, and not generated when mpsd is built, so that building mpsd from source, as Debian does, needs
neither protoc nor the network. The protoc is the one that pyproject.toml pins.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.gate.source import ROOT

FOLDER = "mpsd/kubernetes/protocol"


def made() -> dict[str, str]:
    """Return every file that protoc generates, relative to the root of the tree."""
    sources = [f"{path.relative_to(ROOT)}" for path in sorted((ROOT / FOLDER).glob("*.proto"))]
    with tempfile.TemporaryDirectory() as folder:
        out = (f"--python_out={folder}", f"--pyi_out={folder}")
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I.", *out, *sources], cwd=ROOT, check=True)
        found = sorted(Path(folder).rglob("*_pb2.py*"))
        return {f"{path.relative_to(folder)}": path.read_text(encoding="utf-8") for path in found}
