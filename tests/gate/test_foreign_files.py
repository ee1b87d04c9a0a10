"""One module alone reads the files that another process can delay, and no library reads them for another one."""

import ast
from pathlib import Path
from typing import Final

from mpsd.system.processes.foreign_files import ForeignFile
from tests.gate.source import ROOT

DOOR: Final = Path("mpsd/system/processes/foreign_files.py")

APART: Final = ("mpsd/cli/leases/caller.py", "mpsd/simulator/")
"""mpsctl reads the command lines of its own ancestors; a simulated program does what a CUDA program does."""

PSUTIL: Final = Path("mpsd/system/processes/resources.py")
NUMBERS: Final = {"Process", "RLIMIT_NOFILE", "Error", "rlimit", "num_fds", "memory_info"}
"""What mpsd asks psutil for: numbers of the kernel, and no file that the process can delay."""

OWN: Final = "/proc/self/"


def texts(node: ast.AST) -> list[str]:
    """Return the literal texts of an expression, with `?` for each value in an f-string."""
    if isinstance(node, ast.JoinedStr):
        return ["".join(str(each.value) if isinstance(each, ast.Constant) else "?" for each in node.values)]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def test_one_door() -> None:
    """No other module has the path of such a file."""
    files = {*ForeignFile, "root"}
    found = []
    for path in (ROOT / "mpsd").rglob("*.py"):
        name = str(path.relative_to(ROOT))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        said = [text for node in ast.walk(tree) for text in texts(node) if " " not in text and "/proc" in text]
        if name != str(DOOR) and not name.startswith(APART):
            found += [(name, text) for text in said if text.rpartition("/")[2] in files and not text.startswith(OWN)]
    assert found == []


def test_psutil_counts() -> None:
    """psutil is asked for numbers alone, never for the name, arguments, environment or users of a process."""
    tree = ast.parse((ROOT / PSUTIL).read_text(encoding="utf-8"))
    names = {each.attr for each in ast.walk(tree) if isinstance(each, ast.Attribute)}
    assert names == NUMBERS | {"rss", "process_time"}
