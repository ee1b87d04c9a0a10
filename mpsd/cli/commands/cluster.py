"""The commands about a whole cluster: cluster, and cluster upgrade."""

from collections.abc import Sequence
from typing import Final

import click

from mpsd.cli.command import note, print_answer, with_form
from mpsd.cli.commands.upgrade import upgrade
from mpsd.cli.kubectl import Kubectl
from mpsd.cli.render import age, size
from mpsd.cli.tables import columns_of, look_of, table
from mpsd.core.errors import UnreachableError
from mpsd.core.kubernetes import node_state
from mpsd.core.kubernetes.node_state import GpuRow, NodeRow
from mpsd.core.kubernetes.settings import DOMAIN, Settings
from mpsd.system import clock

_COLUMNS: Final = columns_of(("NODE", "GPU", "MODEL", "THREADS", "MEMORY", "AGE", "STATE / POD"), drops=("MODEL",))

_RESOURCES: Final = [Settings().slice_resource, Settings().core_resource, Settings().memory_resource]
"""The default names of the resources that nodes with mpsd offer."""

_NONE: Final = "no nodes with mpsd: none has its labels, and none has a pod with mpsd-kubernetes"
_NONE_KNOWN: Final = (
    "no nodes with labels or default resources of mpsd; its pods would show more, if you could list pods"
)


@click.group(invoke_without_command=True)
@click.option("--context", metavar="NAME", help="Context of kubectl.  [default: as kubectl has it]")
@click.option("--domain", metavar="NAME", default=DOMAIN, show_default=True, help="The setting `domain` of the nodes.")
@with_form()
def cluster(form: str, context: str | None, domain: str) -> None:
    """Show the nodes of a cluster, their GPUs, and which pod has how much of each.

    It calls `kubectl get nodes` and `kubectl get pods`, with your own kubeconfig and your own rights, and reads what
    mpsd-kubernetes wrote into each node's annotation, with its AGE. It queries no mpsd.
    """
    if click.get_current_context().invoked_subcommand is not None:
        return
    kubectl = Kubectl(context)
    nodes = kubectl.get("nodes", f"--selector={node_state.count_label(domain)}")
    if nodes is None:
        raise UnreachableError(
            "kubectl could not list the nodes; its own message is above",
            hint="see that `kubectl get nodes` works: KUBECONFIG, --context, and your rights",
        )
    running = "--field-selector=status.phase!=Succeeded,status.phase!=Failed"
    pods = kubectl.get("pods", "--all-namespaces", running)
    rows, said = node_state.nodes(domain, nodes, pods or [], clock.now()), _NONE
    if pods is None:
        note("kubectl could not list the pods, so they are shown by their uids")
        if not rows:
            rows, said = node_state.offering(kubectl.get("nodes") or [], _RESOURCES), _NONE_KNOWN
    print_answer(form, {"nodes": rows}, lambda safe: _view(safe["nodes"], said))


def _view(rows: Sequence[NodeRow], none: str) -> str:
    now, lines = clock.now(), list[tuple[str, ...]]()
    for node in rows:
        written = "-" if node["at"] is None else age(node["at"], now)
        if node["because"]:
            lines.append((node["name"], "-", "", "", "", written, node["because"]))
        for gpu in node["gpus"]:
            memory = f"{size(gpu['memory_granted'])} of {size(gpu['memory_total'])}"
            threads = f"{gpu['threads_granted']:g}% of {gpu['threads_total']:g}%"
            at = f"STALE {written}" if node["stale"] else written
            lines.append((node["name"], f"{gpu['index']}", gpu["model"], threads, memory, at, _state(node, gpu)))
            lines += [
                ("", "", "", f"{each['threads']:g}%", size(each["memory"]), "", each["pod"] or "(not of a pod)")
                for each in gpu["pods"]
            ]
    return table(_COLUMNS, lines, look_of(), none=none)


def _state(node: NodeRow, gpu: GpuRow) -> str:
    """Say what is known to be wrong; nothing is known to be well of a node that is silent."""
    reasons = [] if node["ready"] else ["the node is not ready"]
    reasons += ["unknown: mpsd-kubernetes is silent there"] if node["stale"] else []
    return "; ".join([*reasons, *([gpu["because"]] if gpu["because"] else [])]) or "ok"


cluster.add_command(upgrade)
