"""One module alone reads what others can delay, a process that can be abandoned calls it, and no library does so."""

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

LINK: Final = ("mpsd/system/processes/namespaces.py", "/proc/?/root")
"""The text of this link is the kernel's own; what it leads to is not opened."""


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
    assert found == [LINK]


def test_psutil_counts() -> None:
    """psutil is asked for numbers alone, never for the name, arguments, environment or users of a process."""
    tree = ast.parse((ROOT / PSUTIL).read_text(encoding="utf-8"))
    names = {each.attr for each in ast.walk(tree) if isinstance(each, ast.Attribute)}
    assert names == NUMBERS | {"rss", "process_time"}


QUESTIONS: Final = {"mpsd/system/doctor/claims.py": {"of", "_claims", "programs"}}
"""Functions beside that module that a `ForeignReader` calls, too."""

HARMLESS: Final = {"known_of", "interpreter"}
"""Functions of that module that read nothing of others."""

USERS: Final = {"pwd", "grp"}


def calls(tree: ast.AST, within: str = "") -> list[tuple[str, str]]:
    """Return the functions of the module that are called, each with the function that calls it."""
    found = []
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                found += calls(node, node.name)
                continue
            case ast.Call(func=ast.Attribute(value=ast.Name(id="foreign_files"), attr=name)):
                found.append((within, name))
        found += calls(node, within)
    return found


def test_nobody_waits() -> None:
    """The functions of that module are passed to a `ForeignReader`, and called by nobody else."""
    found = []
    for path in (ROOT / "mpsd").rglob("*.py"):
        name = str(path.relative_to(ROOT))
        for caller, function in calls(ast.parse(path.read_text(encoding="utf-8"))):
            if function not in HARMLESS and caller not in QUESTIONS.get(name, ()):
                found.append((name, caller, function))
    assert found == []


def test_user_database() -> None:
    """No other module asks the user database, but for mpsctl, which only its own user waits for."""
    found = set()
    for path in (ROOT / "mpsd").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imports = [each for each in ast.walk(tree) if isinstance(each, (ast.Import, ast.ImportFrom))]
        modules = {each.module for each in imports if isinstance(each, ast.ImportFrom)}
        modules |= {alias.name for each in imports if isinstance(each, ast.Import) for alias in each.names}
        if modules & USERS:
            found.add(str(path.relative_to(ROOT)))
    assert {each for each in found if not each.startswith("mpsd/cli/")} == {str(DOOR)}
