"""The source of mpsd and of its tests, parsed once, for the tests of this folder."""

import ast
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """One Python file; it is equal to nothing else, so that results about it can be cached."""

    path: str
    """Relative to the root of the tree, such as mpsd/core/units.py."""
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """Its dotted name, such as mpsd.core.units."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def layer(self) -> str:
        """The folder below mpsd that contains it, or its own name if none does."""
        return self.path.split("/")[1].removesuffix(".py")


@dataclass(frozen=True, slots=True)
class Import:
    """One name that a module imports from one place."""

    line: int
    module: str
    name: str | None
    at_start: bool
    """Whether it is executed when the module is imported, not when a function of it is called."""


@cache
def modules(folder: str) -> tuple[Module, ...]:
    """Parse every Python file below a folder of the tree."""
    files = [path for path in sorted((ROOT / folder).rglob("*.py")) if "__pycache__" not in path.parts]
    gc.disable()  # nothing of it is garbage, and the collector would look for that in all of it, again and again
    try:
        return tuple(_parsed(path) for path in files)
    finally:
        gc.freeze()
        gc.enable()


def _parsed(path: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    return Module(f"{path.relative_to(ROOT)}", text, ast.parse(text, str(path)))


@cache
def nodes(module: Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(module.tree))


@cache
def imports(module: Module) -> tuple[Import, ...]:
    inside = {
        id(node)
        for function in nodes(module)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in _imports_below(function)
    }
    found = list[Import]()
    for node in nodes(module):
        at_start = id(node) not in inside
        if isinstance(node, ast.Import):
            found += [Import(node.lineno, alias.name, None, at_start) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [Import(node.lineno, node.module or "", alias.name, at_start) for alias in node.names]
    return tuple(found)


def _imports_below(block: ast.AST) -> Iterator[ast.AST]:
    """Yield the imports among the statements of a block; an expression has none."""
    for each in ast.iter_child_nodes(block):
        if isinstance(each, ast.Import | ast.ImportFrom):
            yield each
        elif not isinstance(each, ast.expr):
            yield from _imports_below(each)


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` for an expression of names and dots only, and an empty text for any other."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name) if dotted(value):
            return f"{dotted(value)}.{name}"
        case _:
            return ""
