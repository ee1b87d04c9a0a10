"""Imports point one way, no module reaches into another, and a room that grows large is named in a warning."""

import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Final

from tests.gate.source import ROOT, Import, Module, imports, modules

MAY_IMPORT: Final = {
    "__init__": "core client errors",  # the public names, each at its first use
    "errors": "core",
    "core": "core",
    "system": "core system",
    "daemon": "core system client daemon",  # of client, the types of answers: see below
    "client": "core client",
    "cli": "core client cli",
    "simulator": "core simulator",
    "kubernetes": "core system client kubernetes",
    "slurm": "core system client slurm",
    "demo": "core system cli simulator",
    "__main__": "core system daemon cli simulator demo",  # the composition root
}
"""The folders of mpsd that each folder may import from."""

ROOMS: Final = {
    "core": "",
    "core/configuration": "core",
    "core/mps": "core",
    "core/admission": "core core/mps",
    "core/accounting": "core",
    "core/enforcement": "core core/mps",
    "core/supervision": "core",
    "core/metrics": "core core/mps core/admission",
    "core/programs": "core",
    "core/doctor": "core core/mps core/programs",
    "core/containers": "core",
    "core/kubernetes": "core core/configuration core/containers core/mps",
    "core/dra": "core core/containers core/kubernetes",
    "core/slurm": "core core/mps",
    "system": "",
    "system/files": "system",
    "system/processes": "system",
    "system/sockets": "system system/processes",
    "system/gpus": "system system/files",
    "system/mps": "system system/processes",
    "system/host": "system system/files system/processes system/sockets",
    "system/doctor": "system system/files system/processes system/sockets system/gpus system/mps system/host",
    "daemon/record": "",
    "daemon/http": "daemon/record",
    "daemon/gpu": "daemon/record",
    "daemon/ends": "daemon/record",
    "daemon/control": "daemon/record daemon/ends",
    "daemon/leases": "daemon/record daemon/ends daemon/control",
    "daemon/violations": "daemon/record daemon/ends daemon/leases",
    "daemon/canary": "daemon/record daemon/gpu daemon/control daemon/leases",
    "daemon/node": "daemon/record daemon/gpu daemon/ends daemon/control daemon/leases daemon/violations daemon/canary",
    "daemon/metrics": "daemon/record daemon/http daemon/node",
    "daemon/accounting": "daemon/record daemon/leases daemon/node",
    "daemon/api": (
        "daemon/record daemon/accounting daemon/metrics daemon/http daemon/gpu daemon/control"
        " daemon/leases daemon/canary daemon/node"
    ),
    "daemon": (
        "daemon/record daemon/http daemon/gpu daemon/ends daemon/control daemon/leases daemon/canary"
        " daemon/node daemon/accounting daemon/metrics daemon/api"
    ),
    "client": "",
    "client/processes": "client",
    "cli": "cli/commands",  # doctor's own room uses nothing else
    "cli/leases": "cli",
    "cli/top": "cli",
    "cli/history": "cli cli/leases",
    "cli/web": "cli cli/history",
    "cli/job": "cli",
    "cli/commands": "cli cli/leases cli/top cli/history cli/web cli/job",
    "simulator": "",
    "kubernetes/protocol": "",
    "kubernetes": "kubernetes/protocol",
    "kubernetes/dra": "kubernetes kubernetes/protocol",
    "kubernetes/webhook": "kubernetes",
    "slurm": "",
}
"""The rooms of its own layer that each room may import from, beside itself; each imported room is above it here."""

MANY_FILES: Final = 20
"""More modules than these in one room, beside the `__init__.py` that states its purpose, are worth a look."""

LONG: Final = 600
"""More lines than these in one module are worth a look."""

MAY_IMPORT_MORE: Final = {
    "mpsd/cli/doctor_run.py": "system",  # it looks at the machine itself, for doctor alone
    # they start processes that end with each other, and wait for them
    "mpsd/cli/job/keeper.py": "system",
    "mpsd/cli/job/rank.py": "system",
    "mpsd/cli/job/service.py": "system",
    "mpsd/cli/kubectl.py": "system",  # it runs kubectl
    "mpsd/cli/commands/cluster.py": "system",  # it compares times with the present one
    # it runs a container runtime, is its hook, and writes its files
    "mpsd/cli/commands/container.py": "system",
    "mpsd/cli/commands/metrics.py": "system",  # it writes a file that node_exporter reads, at once
    "mpsd/cli/commands/slurm.py": "system",  # it reads and writes Slurm's configuration
    "mpsd/cli/commands/service.py": "system",  # it writes units and drop-ins, and is called by them
    "mpsd/cli/web/server.py": "system",  # it asks the kernel for the user of each connection
}
"""The further folders that a single module may import from, with the reason."""

LIBRARIES: Final = {
    "__init__": "",
    "errors": "",
    "core": "msgspec",  # limited by CORE_LIBRARY
    "system": "msgspec psutil pynvml structlog tenacity",
    "daemon": "httptools msgspec prometheus_client structlog",
    "client": "msgspec",
    "cli": "click rich textual",
    "simulator": "",
    "kubernetes": "click google grpc msgspec structlog",
    "slurm": "",
    "demo": "click",
    "__main__": "click",
}
"""The libraries that each folder may import. The doors of single files are in pyproject.toml (see test_doors.py)."""

CORE_STANDARD_LIBRARY: Final = frozenset({
    "__future__", "abc", "bisect", "collections", "dataclasses", "datetime", "decimal", "difflib", "enum", "fractions",
    "functools", "heapq", "ipaddress", "itertools", "math", "operator", "re", "string", "textwrap", "types", "typing",
    "json",  # to quote text, not to read files
    "pathlib",  # as a value: other code touches the disk
    "shlex",  # to quote a path in a command that an operator is told to type
    "tomllib",  # from text, not from a file
})  # fmt: skip
"""The modules that core may use: none that does I/O, knows the time, waits, logs, or has random numbers."""

CORE_LIBRARY: Final = {("msgspec", "Meta"), ("msgspec", "Struct"), ("msgspec", "field"), ("msgspec", "structs")}
"""Further imports of core: values that are made at every grant are structs, which takes a tenth of the time; and bounds
and names of values that are read from a store or from others' JSON.
"""

SLOW_TO_IMPORT: Final = frozenset(
    {"asyncio", "concurrent", "email", "http", "logging", "multiprocessing", "ssl", "subprocess", "tempfile", "urllib"}
)
"""The modules that `mpsctl` starts without: each of these costs a caller more than the whole of click."""

LATE: Final = (
    "mpsd.cli.doctor_run",
    "mpsd.cli.web",
    "mpsd.client.async_",
    "mpsd.client.processes.",
)
"""The modules that one command of mpsctl, or one name of mpsd, alone imports, when it is used: they may be slow to
import."""

FOR_TYPES: Final = "mpsd/__init__.py"
"""The imports at its start are for type checkers; tests/client/test_package.py tests what Python imports."""


def wrong(is_wrong: Callable[[Module, Import], bool], folder: str = "mpsd") -> list[str]:
    return [
        f"{module.path}:{each.line}: {each.module}.{each.name}"
        for module in modules(folder)
        for each in imports(module)
        if is_wrong(module, each)
    ]


def test_imports_point_one_way() -> None:
    """Every module of mpsd imports only from folders that its own folder may import from."""

    def is_wrong(module: Module, each: Import) -> bool:
        top, folder, *_ = f"{each.module}.{each.name}".split(".")
        allowed = {*MAY_IMPORT[module.layer].split(), *MAY_IMPORT_MORE.get(module.path, "").split()}
        return top == "mpsd" and folder in MAY_IMPORT and folder not in allowed

    assert wrong(is_wrong) == []


def test_daemon_and_client_share_the_types_of_answers_alone() -> None:
    """The daemon's API, and nothing else of the daemon, imports these types, and nothing else of the client."""
    found = {
        (module.path.rpartition("/")[0], f"{each.module}.{each.name}".removeprefix("mpsd.client.").split(".")[0])
        for module in modules("mpsd/daemon")
        for each in imports(module)
        if f"{each.module}.".startswith("mpsd.client.")
    }
    assert found == {("mpsd/daemon/api", "answer_types")}


def test_what_one_command_needs_is_imported_late() -> None:
    """These modules cost the other commands of mpsctl nothing: no other module imports them at the start."""

    def is_wrong(module: Module, each: Import) -> bool:
        is_late = f"{each.module}.{each.name}".startswith(LATE)
        return is_late and each.at_start and not module.name.startswith(LATE) and module.path != FOR_TYPES

    assert wrong(is_wrong) == []


def _room(module: str) -> str:
    """Return the room of a module by its dotted name: mpsd.core.mps.commands is in core/mps."""
    return "/".join(module.split(".")[1:-1])


def _module_of(each: Import) -> str | None:
    """Return the module of mpsd that an import names, if any."""
    names = {module.name for module in modules("mpsd")}
    return next((name for name in (f"{each.module}.{each.name}", each.module) if name in names), None)


def test_rooms_import_one_way() -> None:
    """A room imports from the rooms in ROOMS, and from no other of its layer."""

    def is_wrong(module: Module, each: Import) -> bool:
        room, target = (
            _room(f"{module.name}.x" if module.path.endswith("__init__.py") else module.name),
            _module_of(each),
        )
        if room not in ROOMS or target is None or _room(target).split("/")[0] != room.split("/")[0]:
            return False
        return _room(target) not in {room, *ROOMS[room].split()}

    assert wrong(is_wrong) == []


def test_no_room_is_above_itself() -> None:
    """No arrow between rooms leads up: a room that another may import from may not import that one, even indirectly."""
    order = list(ROOMS)
    for room in order:
        if room.startswith("cli"):
            continue  # its commands are imported by name at a call (group.py), which is no import
        below, pending = set[str](), {*ROOMS[room].split()}
        while pending:
            below |= pending
            pending = {further for each in pending for further in ROOMS[each].split()} - below
        assert room not in below


def test_every_room_says_what_it_is_for() -> None:
    """Each folder of mpsd is in ROOMS, and its docstring describes it."""
    rooms = {"/".join(module.path.split("/")[1:-1]) for module in modules("mpsd")} - {""}
    assert rooms == {*ROOMS}
    silent = [
        module.path for module in modules("mpsd") if module.path.endswith("__init__.py") and not module.text.strip()
    ]
    assert not silent


def test_what_reads_http_knows_no_node() -> None:
    """Importing the HTTP code imports nothing of the node: no daemon, no GPU, no lease, and no NVML."""
    by_name = {module.name: module for module in modules("mpsd")}
    reached, pending = set[str](), {name for name in by_name if name.startswith("mpsd.daemon.http")}
    while pending:
        reached |= pending
        found = {_module_of(each) for name in pending for each in imports(by_name[name])}
        pending = {each for each in found if each is not None} - reached
    node = ("mpsd.daemon.node", "mpsd.daemon.control", "mpsd.daemon.gpu", "mpsd.daemon.leases", "mpsd.daemon.api")
    doors = ("mpsd.system.gpus.gpu", "mpsd.system.mps.control_pipe", "mpsd.system.files.database")
    assert [name for name in reached if name.startswith((*node, *doors))] == []


def test_libraries_stay_in_their_layer() -> None:
    """Every module imports only the libraries of its folder."""

    def is_wrong(module: Module, each: Import) -> bool:
        return each.module.split(".")[0] not in {"mpsd", *sys.stdlib_module_names, *LIBRARIES[module.layer].split()}

    assert wrong(is_wrong) == []


def test_services_do_without_what_draws() -> None:
    """No module of a service imports a library of `mpsctl top`, even through structlog, which would take rich."""
    layers = ("core", "system", "daemon", "simulator", "kubernetes")
    names = ["mpsd.__main__", *(each.name for layer in layers for each in modules(f"mpsd/{layer}"))]
    program = (
        "import importlib, mpsd, sys; mpsd.keep_rich_out();"
        "[importlib.import_module(each) for each in sys.argv[1:]];"
        "print(*(name for name, module in sys.modules.items() if module is not None))"
    )
    done = subprocess.run([sys.executable, "-c", program, *names], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = {each.split(".")[0] for each in done.stdout.split()}
    assert {"mpsd", "msgspec", "structlog", "grpc"} <= loaded
    assert loaded & {"textual", "rich", "pygments", "markdown_it", "platformdirs"} == set()


def test_core_is_pure() -> None:
    """Core imports a short list of the standard library, without I/O or the time."""

    def is_wrong(_: Module, each: Import) -> bool:
        is_known = each.module.split(".")[0] in {"mpsd", *CORE_STANDARD_LIBRARY}
        return not is_known and (each.module, each.name) not in CORE_LIBRARY

    assert wrong(is_wrong, "mpsd/core") == []


def test_the_command_line_starts_light() -> None:
    """No module of mpsctl, or of the client that it calls, imports a slow module before one of its commands runs."""

    def is_wrong(module: Module, each: Import) -> bool:
        is_slow = each.at_start and each.module.split(".")[0] in SLOW_TO_IMPORT
        return is_slow and not module.name.startswith(LATE)

    assert wrong(is_wrong, "mpsd/cli") == []
    assert wrong(is_wrong, "mpsd/client") == []


IN_A_HURRY: Final = ("mpsd/simulator/front_end.py", "_socket")
"""A program that runs for each conversation: importing `socket` would take longer than all the rest."""


def test_private_names_stay_private() -> None:
    """No module imports a name, or a module, that begins with an underscore."""

    def is_wrong(module: Module, each: Import) -> bool:
        parts = [part for part in f"{each.module}.{each.name}".split(".") if re.match(r"_(?!_)", part)]
        return parts != [] and (module.path, *parts) != IN_A_HURRY

    assert wrong(is_wrong) == []


def test_size_is_a_warning() -> None:
    """A long module and a full room are named at the end of the run: a reader decides whether to divide them."""
    sizes = {module.path: module.text.count("\n") for module in modules("mpsd")}
    rooms = Counter(path.rpartition("/")[0] for path in sizes if not path.endswith("__init__.py"))
    large = [f"{path} has {lines} lines" for path, lines in sizes.items() if lines > LONG]
    large += [f"{room} has {count} modules" for room, count in rooms.items() if count > MANY_FILES]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        for each in large:
            warnings.warn(each, stacklevel=1)
