"""Files generated from the code: parts of docs/reference (errors, life cycle of a control daemon), and more.

`python -m tests.gate.generate` writes them, the parts between their markers, and the tests of this folder fail while
they differ.
"""

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from mpsd import demo
from mpsd.core.errors import CapacityError, ControlError, GpuError, MpsdError, OperatorError, RequestError, catalogue
from mpsd.core.lifecycle import TABLE, Event, State
from mpsd.core.metrics.families import SECTIONS, Kind
from mpsd.core.programs import frameworks
from mpsd.core.units import GIB
from tests.gate import async_routes, completions, manual, protocol
from tests.gate.source import imports, modules

ROOT: Final = Path(__file__).resolve().parents[2]

_ABOUT_USERS: Final = (
    "These metrics name individual users and their leases. [Guarantees](#guarantees) says which callers get them."
)
"""The note above the metrics that not every caller gets."""

_DOING: Final[dict[type, str]] = {
    RequestError: "the caller",
    CapacityError: "the node's capacity",
    OperatorError: "the operator",
    ControlError: "MPS",
    GpuError: "the GPU",
    MpsdError: "mpsd",
}
"""The party that causes an error, by the nearest of these classes that it derives from."""


def _table(*lines: tuple[str, ...]) -> str:
    head, *rest = lines
    rule = tuple("---" for _ in head)
    return "\n".join(f"| {' | '.join(map(_escaped, line))} |" for line in (head, rule, *rest))


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def _summary(documented: object) -> str:
    return " ".join((documented.__doc__ or "").split())


def errors_list() -> str:
    """Return every error, in a list for each party whose doing it is."""
    lists: dict[str, list[str]] = {}
    for error in catalogue():
        doing = next(_DOING[group] for group in error.__mro__ if group in _DOING)
        again = ", retry" if error.retryable else ""
        line = f"- `{error.code}` ({error.status}, exit {error.exit_code}{again}): {_summary(error)}"
        lists.setdefault(doing, []).append(line)
    return "\n\n".join("\n".join((f"**{doing[0].upper()}{doing[1:]}**\n", *lines)) for doing, lines in lists.items())


def lifecycle_diagram() -> str:
    """Return the states of a control daemon and their transitions, as a Mermaid diagram."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {State.DOWN}"]
    for state, outcomes in TABLE.items():
        ways: dict[State, list[Event]] = {}
        for event, outcome in outcomes.items():
            if isinstance(outcome, State):
                ways.setdefault(outcome, []).append(event)
        lines += [f"    {state} --> {to}: {', '.join(events)}" for to, events in ways.items()]
    return "\n".join([*lines, "```"])


def rooms_diagram() -> str:
    """Return the rooms of mpsd and the imports between those of a layer, as a Mermaid diagram.

    The diagram leaves out three kinds of import: every room of `daemon` writes to `daemon/record`, every room of `core`
    uses the modules of `core` itself, and `daemon` connects all its rooms.
    """
    rooms = {module.name: "/".join(module.path.split("/")[1:-1]) for module in modules("mpsd")}
    drawn = sorted({*rooms.values()} - {"", "core", "daemon", "daemon/record"})
    arrows = {
        (rooms[module.name], rooms[name])
        for module in modules("mpsd")
        for each in imports(module)
        for name in (f"{each.module}.{each.name}", each.module)
        if name in rooms
    }
    lines = ["```mermaid", "flowchart TD"]
    for layer in dict.fromkeys(room.split("/")[0] for room in drawn):
        lines.append(f"    subgraph {layer}-layer[{layer}]")
        inside = [room for room in drawn if room.split("/")[0] == layer]
        lines += [f'        {room.replace("/", "-")}["{room}"]' for room in inside]
        lines += [
            f"        {importer.replace('/', '-')} --> {imported.replace('/', '-')}"
            for importer, imported in sorted(arrows)
            if importer != imported and importer in inside and imported in inside
        ]
        lines.append("    end")
    lines += ["    daemon-layer --> system-layer --> core-layer"]
    lines += [f"    {layer}-layer --> client-layer --> core-layer" for layer in ("cli", "daemon", "kubernetes")]
    return "\n".join([*lines, "```"])


def demo_table() -> str:
    """Return the commands of the demonstration, and what each does."""
    return _table(("command", "does"), *((f"`{command}`", does) for command, does in demo.STEPS.items()))


def frameworks_table() -> str:
    """Return what each framework takes, how doctor knows it, and what to set under a quarter of a GPU of 80 GiB."""
    lines = [("framework", "takes by default", "setting", "others", "read in", "known by")]
    for each in frameworks.TABLE:
        needed = frameworks.setting(each, 20 * GIB, 80 * GIB)
        setting = f"`{needed}`" if needed else "none is needed"
        further = frameworks.advice(each.name, 20 * GIB, 80 * GIB)
        optional = [("=", further.variable), (" ", further.option)] if not needed else []
        pairs = [between.join(pair) for between, pair in optional if pair is not None]
        others = ", ".join(f"`{name}`" for name in (*each.settings[1:], *pairs, *each.others))
        shows = (each.command, each.title and f"{each.title}*", each.library and f"{each.library}/")
        known = ", ".join(f"`{name}`" for name in shows if name)
        lines.append((each.name, each.takes, setting, others, each.version, known))
    return _table(*lines)


def metrics_lists() -> str:
    """Return every metric, in a list for each subject."""
    lists = []
    for section, families in SECTIONS.items():
        lines = []
        for each in families:
            name = f"{each.name}_bucket" if each.kind is Kind.HISTOGRAM else each.series
            own = {Kind.STATESET: (each.name,), Kind.HISTOGRAM: ("le",)}.get(each.kind, ())
            labels = ",".join((*each.labels, *own))
            lines.append(f"- `{name}{{{labels}}}`: {each.help}" if labels else f"- `{name}`: {each.help}")
        about = f"\n\n{_ABOUT_USERS}" if all(each.about_users for each in families) else ""
        listed = "\n".join(lines)
        lists.append(f"### {section}{about}\n\n{listed}")
    return "\n\n".join(lists)


def _page(path: str, part: str, make: Callable[[], str], blank: str = "\n") -> str:
    """Return a document with its generated part, between the markers of this name, up to date."""
    text = (ROOT / path).read_text(encoding="utf-8")
    pieces = re.split(rf"(<!-- {part}:(?:begin|end) -->\n?)", text)
    if len(pieces) != 5:
        raise ValueError(f"{path} has no single part between <!-- {part}:begin --> and <!-- {part}:end -->")
    pieces[2] = f"{blank}{make()}\n{blank}"
    return "".join(pieces)


_PARTS: Final[dict[str, tuple[str, Callable[[], str]]]] = {
    "README.md": ("demo", demo_table),
    "docs/guide/user.md": ("frameworks", frameworks_table),
    "docs/reference/errors.md": ("errors", errors_list),
    "docs/reference/life-cycle.md": ("lifecycle", lifecycle_diagram),
    "docs/reference/metrics.md": ("metrics", metrics_lists),
}
"""The documents with a generated part, and the name of that."""

_IN_CHART: Final = ("monitoring/prometheus/mpsd.rules.yml", "monitoring/grafana/mpsd.json")
"""Files that the chart has a copy of: Helm reads no file outside of it."""

FILES: Final[dict[str, Callable[[], str]]] = {
    "docs/man/mpsctl.1": manual.mpsctl_page,
    "docs/man/mpsd.8": manual.mpsd_page,
    "docs/man/mpsd.toml.5": manual.settings_page,
    "docs/mpsd.toml": manual.example,
    "docs/internals/architecture.md": partial(_page, "docs/internals/architecture.md", "rooms", rooms_diagram, ""),
    "docs/kubernetes/kubernetes.toml": manual.kubernetes_example,
    **{path: partial(_page, path, name, make) for path, (name, make) in _PARTS.items()},
    async_routes.FILE: async_routes.made,
    **completions.FILES,
    **{f"container/kubernetes/chart/files/{Path(path).name}": (ROOT / path).read_text for path in _IN_CHART},
}
"""Every file that is generated, or has a generated part, by its path from the root of the tree."""


def main() -> int:
    for name, make in FILES.items():
        _write(ROOT / name, make())
    for name, text in protocol.made().items():
        _write(ROOT / name, text)
    return 0


def _write(path: Path, text: str) -> None:
    stood = path.exists() and path.read_text(encoding="utf-8") == text
    if not stood:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"{path.relative_to(ROOT)} was {'up to date' if stood else 'written'}")


if __name__ == "__main__":
    sys.exit(main())
