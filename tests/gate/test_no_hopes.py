"""No test replaces a part of mpsd by a mock or relies on the length of a sleep, and mpsd swallows no error."""

import ast
from collections.abc import Iterator
from typing import Final

from tests.gate.source import Module, dotted, imports, modules, nodes

MAY_SLEEP: Final = {
    "tests/harness.py": "between two looks at a condition",
    "tests/gpu/everything.py": "between two looks at processes, without the wheels that tests.harness needs",
    "tests/gpu/questions.py": "it is no test: how long a client waits is part of what is measured",
}
"""The files of the tests that may sleep, each with the reason."""

BOUNDARIES: Final = {
    "mpsd/cli/job/keeper.py": "nothing is handled: the ranks hear of a defect before it ends the keeper",
    "mpsd/client/processes/starter.py": "nothing is handled: what a start raised is raised where it is awaited",
    "mpsd/client/async_client.py": "nothing is handled: whatever ends a task, such as its cancellation, ends its lease",
    "mpsd/client/watcher.py": "what a callback of the program raises is logged, and must not end the renewals",
    "mpsd/client/waiting.py": "nothing is handled: whatever ends a wait, such as KeyboardInterrupt, gives up its place",
    "mpsd/daemon/api/dispatcher.py": "a defect answers one request with `internal`, and must not end mpsd",
    "mpsd/daemon/leases/completeness.py": "a lease that cannot be restored must not keep mpsd from starting",
    "mpsd/kubernetes/service.py": "nothing is handled: what a thread raised is raised in the main thread",
    "mpsd/slurm/__main__.py": "a hook of slurmd that fails drains the node, and what it writes is seen by nobody",
    "mpsd/system/gpus/nvml_thread.py": "nothing is handled: what a call to NVML raised is raised where it is awaited",
}
"""Files of mpsd that may catch every error, each with the reason why no outer code could."""


def sleeps(module: Module) -> Iterator[str]:
    """Yield each call of a sleep in a module, under any imported name."""
    names = {"time.sleep", "asyncio.sleep"}
    names |= {"sleep" for each in imports(module) if each.module in {"time", "asyncio"} and each.name == "sleep"}
    for node in nodes(module):
        if isinstance(node, ast.Call) and dotted(node.func) in names and not _yields(node):
            yield f"{module.path}:{node.lineno}"


def _yields(call: ast.Call) -> bool:
    """Return whether a sleep takes no time: `asyncio.sleep(0)` only lets other tasks run first."""
    return len(call.args) == 1 and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0


def mocks(module: Module) -> Iterator[str]:
    """Yield each place in a module that replaces a part of the program."""
    for each in imports(module):
        if f"{each.module}.{each.name}".startswith(("unittest.mock", "mock.", "pytest_mock.")):
            yield f"{module.path}:{each.line}"
    for node in nodes(module):
        if isinstance(node, ast.Call) and dotted(node.func).endswith(("monkeypatch.setattr", "monkeypatch.delattr")):
            yield f"{module.path}:{node.lineno}"


def swallows(module: Module) -> Iterator[str]:
    """Yield each handler in a module that catches every error."""
    for node in nodes(module):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(each is None or dotted(each) in {"Exception", "BaseException"} for each in caught):
                yield f"{module.path}:{node.lineno}"


def test_no_sleep_that_hopes() -> None:
    """No test sleeps; it waits for a condition with a deadline (tests.harness.wait_until)."""
    found = [place for module in modules("tests") if module.path not in MAY_SLEEP for place in sleeps(module)]
    assert not found, "\n".join(found)


def test_no_mocks() -> None:
    """Fakes are programs and files: no test patches a part of mpsd."""
    found = [place for module in modules("tests") for place in mocks(module)]
    assert not found, "\n".join(found)


def test_no_swallowed_errors() -> None:
    """No part of mpsd catches every error, except for the boundaries named above; and each of those still does."""
    found = [place for module in modules("mpsd") for place in swallows(module)]
    assert {place.split(":")[0] for place in found} == BOUNDARIES.keys(), "\n".join(found)
