"""The state of a control daemon has one writer."""

import ast
from collections.abc import Iterator
from typing import TypeGuard

from tests.gate.source import Module, dotted, modules, nodes


def writers(module: Module) -> Iterator[str]:
    """Yield each place outside `__init__` that assigns to an attribute called `_state`, in any form."""
    initial = {
        id(node)
        for function in nodes(module)
        if isinstance(function, ast.FunctionDef) and function.name == "__init__"
        for node in ast.walk(function)
    }
    for node in nodes(module):
        if id(node) not in initial and (assigned(node) or set_by_name(node)):
            yield f"{module.path}:{node.lineno}"


def assigned(node: ast.AST) -> TypeGuard[ast.Attribute]:
    """Return whether this is a `_state` that is written or deleted."""
    return isinstance(node, ast.Attribute) and node.attr == "_state" and not isinstance(node.ctx, ast.Load)


def set_by_name(node: ast.AST) -> TypeGuard[ast.Call]:
    """Return whether this is a call of setattr or delattr with that name."""
    if not isinstance(node, ast.Call) or dotted(node.func).rpartition(".")[2] not in {"setattr", "__setattr__"}:
        return False
    return any(isinstance(argument, ast.Constant) and argument.value == "_state" for argument in node.args)


def test_one_writer() -> None:
    """In all of mpsd/daemon the state is assigned in exactly one place, apart from its first value."""
    found = [place for module in modules("mpsd/daemon") for place in writers(module)]
    assert len(found) == 1, "\n".join(found)


def test_every_form_of_writing_is_seen() -> None:
    """The test above finds every form: plain, annotated, unpacked, augmented and by setattr."""
    text = """
class A:
    def __init__(self): self._state = 1
    def a(self): self._state = 2
    def b(self): self._state: int = 3
    def c(self): self.x, self._state = 4, 5
    def d(self): self._state += 6
    def e(self): setattr(self, "_state", 7)
    def f(self): del self._state
    def g(self): return self._state
"""
    assert len(list(writers(Module("mpsd/daemon/a.py", text, ast.parse(text))))) == 6
