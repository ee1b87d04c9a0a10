"""The state of a control daemon has one writer."""

import ast
from collections.abc import Iterator

from tests.gate.source import Module, dotted, modules, nodes


def writers(module: Module) -> Iterator[str]:
    """Yield each place outside `__init__` that assigns to an attribute called `_state`, or deletes it."""
    initial = {
        id(node)
        for function in nodes(module)
        if isinstance(function, ast.FunctionDef) and function.name == "__init__"
        for node in ast.walk(function)
    }
    for node in nodes(module):
        match node:
            case ast.Attribute(attr="_state", ctx=ast.Store() | ast.Del()) if id(node) not in initial:
                yield f"{module.path}:{node.lineno}"
            case ast.Call(args=[_, ast.Constant(value="_state"), *_]) if "setattr" in dotted(node.func):
                yield f"{module.path}:{node.lineno}"


def test_one_writer() -> None:
    """In all of mpsd/daemon the state is assigned in exactly one place, apart from its first value."""
    found = [place for module in modules("mpsd/daemon") for place in writers(module)]
    assert len(found) == 1, "\n".join(found)
