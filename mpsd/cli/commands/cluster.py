"""The commands about a whole cluster: cluster, and cluster upgrade."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Final

import click

from mpsd.cli.command import Listing, note, print_listing, with_listing
from mpsd.cli.commands.upgrade import upgrade
from mpsd.cli.groups import Commands
from mpsd.cli.kubectl import Kubectl
from mpsd.cli.render import age, percent, size
from mpsd.cli.tables import Figure, Listed, Row, columns_of
from mpsd.core.errors import UnreachableError
from mpsd.core.kubernetes import node_state
from mpsd.core.kubernetes.node_state import GpuRow, NodeRow
from mpsd.core.kubernetes.settings import DOMAIN, Settings
from mpsd.system import clock

_COLUMNS: Final = columns_of(
    ("NODE", "GPU", "MODEL", "THREADS", "MEMORY", "MEMORY TOTAL", "AGE", "POD", "STATE"),
    drops=("MODEL",),
    data=("MEMORY TOTAL",),
    cuts=("MODEL", "POD", "STATE"),
)

_RESOURCES: Final = [Settings().slice_resource, Settings().core_resource, Settings().memory_resource]
"""The default names of the resources that nodes with mpsd offer."""

_NONE: Final = "no nodes with mpsd: none has its labels, and none has a pod with mpsd-kubernetes"
_NONE_KNOWN: Final = (
    "no nodes with labels or default resources of mpsd; its pods would show more, if you could list pods"
)


@click.group(cls=Commands, invoke_without_command=True)
@click.option("--context", metavar="NAME", help="Context of kubectl.  [default: as kubectl has it]")
@click.option("--domain", metavar="NAME", default=DOMAIN, show_default=True, help="The setting `domain` of the nodes.")
@with_listing(lambda _: _COLUMNS)
def cluster(listing: Listing, context: str | None, domain: str) -> None:
    """Show which pod has how much of which GPU of a cluster.

    It calls `kubectl get nodes` and `kubectl get pods`, with your own kubeconfig and your own rights, and reads what
    mpsd-kubernetes wrote into each node's annotation, with its AGE. It queries no mpsd.
    """
    if click.get_current_context().invoked_subcommand is not None:
        return
    kubectl, none = Kubectl(context), list[str]()

    def ask() -> dict[str, list[NodeRow]]:
        found, none[:] = _nodes(kubectl, domain)
        return {"nodes": found}

    print_listing(listing, ask, lambda safe: Listed(_COLUMNS, [*_rows(safe["nodes"])], none[0]))


def _nodes(kubectl: Kubectl, domain: str) -> tuple[list[NodeRow], list[str]]:
    """Return the nodes with mpsd, and the sentence in their place where there are none."""
    nodes = kubectl.get("nodes", f"--selector={node_state.count_label(domain)}")
    if nodes is None:
        raise UnreachableError(
            "kubectl could not list the nodes; its own message is above",
            hint="see that `kubectl get nodes` works: KUBECONFIG, --context, and your rights",
        )
    running = "--field-selector=status.phase!=Succeeded,status.phase!=Failed"
    pods = kubectl.get("pods", "--all-namespaces", running)
    rows = node_state.nodes(domain, nodes, pods or [], clock.now())
    if pods is not None:
        return rows, [_NONE]
    note("kubectl could not list the pods, so they are shown by their uids")
    return rows or node_state.offering(kubectl.get("nodes") or [], _RESOURCES), [_NONE_KNOWN]


def _rows(nodes: Sequence[NodeRow]) -> Iterator[Row]:
    """Yield a row for each GPU, and below it one for each share of a pod."""
    now, nothing = clock.now(), Figure("-", None)
    for node in nodes:
        written = "-" if node["at"] is None else f"{'STALE ' if node['stale'] else ''}{age(node['at'], now)}"
        seconds = None if node["at"] is None else -datetime.fromisoformat(node["at"]).timestamp()
        at = Figure(written, seconds, node["at"])
        if node["because"]:
            yield node["name"], nothing, "-", nothing, nothing, nothing, at, "-", node["because"]
        for gpu in node["gpus"]:
            place = node["name"], Figure(f"{gpu['index']}", gpu["index"]), gpu["model"]
            granted, total = gpu["memory_granted"], gpu["memory_total"]
            of_all = f"{percent(gpu['threads_granted'])} of {percent(gpu['threads_total'])}"
            threads = Figure(of_all, gpu["threads_granted"])
            memory = Figure(f"{size(granted)} of {size(total)}", granted), Figure(size(total), total)
            yield *place, threads, *memory, at, "-", _state(node, gpu)
            for each in gpu["pods"]:
                part = Figure(percent(each["threads"]), each["threads"]), Figure(size(each["memory"]), each["memory"])
                yield *place, *part, nothing, at, each["pod"] or "(not of a pod)", "-"


def _state(node: NodeRow, gpu: GpuRow) -> str:
    """Say what is known to be wrong; nothing is known to be well of a node that is silent."""
    reasons = [] if node["ready"] else ["the node is not ready"]
    reasons += ["unknown: mpsd-kubernetes is silent there"] if node["stale"] else []
    return "; ".join([*reasons, *([gpu["because"]] if gpu["because"] else [])]) or "ok"


cluster.add_command(upgrade)
