"""The command `cluster upgrade`: mpsd's pods are replaced node by node, as fast as their clients end."""

import time
from typing import Final

import click

from mpsd.cli.command import SignalledError, note
from mpsd.cli.kubectl import Kubectl
from mpsd.cli.options import DURATION, NODES
from mpsd.cli.render import plural
from mpsd.cli.tables import columns_of, look_of, table
from mpsd.cli.terminal import Progress, raised_signals
from mpsd.core.errors import DaemonNotReadyError, InvalidRequestError, NotFoundError, UnreachableError
from mpsd.core.kubernetes import upgrade as plan
from mpsd.core.kubernetes.upgrade import MaxUnavailable, Pod, Rollout, State
from mpsd.core.sanitize import plain
from mpsd.core.units import first_of

_COLUMNS: Final = columns_of(("NODE", "POD", "STATE"))

_LONGEST_PAUSE: Final = 10.0
"""Seconds between two looks at the API server, at most."""


@click.command()
@click.option("--context", metavar="NAME", help="Context of kubectl.  [default: as kubectl has it]")
@click.option(
    "--daemonset", metavar="NAMESPACE/NAME", help=f"The DaemonSet.  [default: the one with the label {plan.SELECTOR}]"
)
@click.option(
    "--max-unavailable",
    "most",
    metavar="N|PERCENT",
    type=NODES,
    default="1",
    show_default=True,
    help="How many nodes may be without a ready mpsd at a time, as 3 or 5%.",
)
@click.option(
    "--timeout", type=DURATION, default="10m", show_default=True, help="Longest time from a new pod to its readiness."
)
@click.option("--dry-run", "dry", is_flag=True, help="Show what would be done, without doing it.")
@click.pass_context
def upgrade(
    command: click.Context,
    context: str | None,
    daemonset: str | None,
    most: MaxUnavailable,
    timeout: float,
    *,
    dry: bool,
) -> None:
    """Replace mpsd's old pods, a few nodes at a time.

    Old is a pod that is not of the newest revision of its DaemonSet. A deleted pod drains its node's GPUs: it admits no
    client, and ends after its last one, or when its grace period is over. The next nodes follow when its successor is
    ready. If one does not become ready, no other pod is deleted. The command may be interrupted at any time, and
    continues when it is called again.

    It calls kubectl with your own kubeconfig, and needs your rights to list nodes, daemonsets, controllerrevisions and
    pods, and to delete pods.
    """
    above = command.parent.params if command.parent else {}
    upgrade = _Upgrade(Kubectl(context or above.get("context")), daemonset, timeout)
    seen = upgrade.look()
    bound = most.of(seen.owner.desired)
    if not dry:
        with raised_signals():
            upgrade.run(seen, bound)
        return
    click.echo(table(_COLUMNS, [plain(_row(each, seen)) for each in seen.pods], look_of(), none="no pods"))
    note(f"would replace the pods of {plural(len(seen.there(State.OLD)), 'node')}, at most {bound} at a time")


def _row(pod: Pod, seen: Rollout) -> tuple[str, ...]:
    state = f"{pod.state}" if pod.node in seen.nodes else f"{pod.state}, left alone: its node is not ready"
    return pod.node, pod.name, f"{state} ({pod.because})" if pod.because else state


class _Upgrade:
    def __init__(self, kubectl: Kubectl, name: str | None, timeout: float) -> None:
        """Find the DaemonSet. Raises MpsdError where there is none, or several and no name."""
        self._kubectl = kubectl
        namespace, _, self._name = (name or self._only()).rpartition("/")
        self._space = [f"--namespace={namespace}"] if namespace else []
        self._timeout = timeout
        self._progress = Progress()
        self._since = dict[str, float]()
        """Since when each awaited thing is awaited."""

    def run(self, seen: Rollout, most: int) -> None:
        """Replace the pods. Raises DaemonNotReadyError where one does not become ready."""
        revision = seen.revision
        try:
            while not seen.is_complete:
                self._check(seen)
                self._delete(seen.next_pods(most))
                seen = self._await_change(seen)
                if seen.revision != revision:
                    raise DaemonNotReadyError(
                        f"DaemonSet {seen.owner} was changed during its upgrade",
                        hint="to upgrade to its present revision, run the command again",
                    )
        except SignalledError:
            self._progress.say("interrupted; what was deleted ends by itself, and the same command continues")
            raise
        finally:
            self._progress.erase()
        if away := seen.away:
            raise DaemonNotReadyError(
                f"{plural(len(away), 'node')} could not be upgraded, because they are not ready: {first_of(away)}",
                hint="all others are; --dry-run lists them, and the same command upgrades them when they are back",
            )
        click.echo(f"all pods of {plain(f'{seen.owner}')} are of its newest revision: {plural(len(seen.pods), 'node')}")

    # -- looking -------------------------------------------------------------------------------------------------------

    def _only(self) -> str:
        """Return the name of the only DaemonSet that is mpsd's by its label and its argument."""
        found = self._get("daemonsets", "--all-namespaces", f"--selector={plan.SELECTOR}")
        names = [f"{each}" for each in plan.daemonsets(found) if each.drains]
        if len(names) == 1:
            return names[0]
        if names:
            raise InvalidRequestError(
                f"there are several DaemonSets: {', '.join(names)}", hint="name it by --daemonset"
            )
        raise NotFoundError(
            f"there is no DaemonSet of mpsd with the label {plan.SELECTOR}",
            hint="name it by --daemonset NAMESPACE/NAME",
        )

    def look(self) -> Rollout:
        """Return the present state. Raises UnreachableError where kubectl fails."""
        found = self._get("daemonsets", *self._space, f"--field-selector=metadata.name={self._name}")
        sets = plan.daemonsets(found)
        if not sets:
            raise NotFoundError(
                f"there is no DaemonSet {self._name} in that namespace",
                hint="kubectl get daemonsets --all-namespaces lists them",
            )
        (owner,) = sets
        if not owner.on_delete:
            raise InvalidRequestError(
                f"DaemonSet {owner} has another update strategy than OnDelete: Kubernetes replaces its pods by itself",
                hint=f"see kubectl --namespace {owner.namespace} rollout status daemonset/{owner.name}",
            )
        revision = plan.newest_revision(
            self._get("controllerrevisions", *self._space, f"--selector={owner.labels}"), owner
        )
        if not owner.is_observed or revision is None:
            raise UnreachableError(
                f"Kubernetes has not noticed the last change of DaemonSet {owner} yet", hint="try again in a moment"
            )
        pods = plan.pods(self._get("pods", *self._space, f"--selector={owner.labels}"), owner, revision)
        return Rollout(owner, revision, pods, plan.ready_nodes(self._get("nodes")))

    def _get(self, *arguments: str) -> list[object]:
        found = self._kubectl.get(*arguments)
        if found is None:
            raise UnreachableError(
                f"kubectl could not list the {arguments[0]}; its own message is above",
                hint="see that `kubectl get` works: KUBECONFIG, --context, and your rights",
            )
        return found

    def _await_change(self, before: Rollout) -> Rollout:
        """Return the next state that differs. Raises MpsdError where it takes too long.

        The pauses grow, and are longer where a look takes longer: a large cluster is not asked all the time.
        """
        failing_since: float | None = None
        pause = 0.0
        while True:
            self._show(before)
            began = time.monotonic()
            try:
                seen = self.look()
            except UnreachableError:
                failing_since = began if failing_since is None else failing_since
                if began - failing_since > self._timeout:
                    raise
            else:
                failing_since = None
                if seen != before:
                    return seen
                self._check(seen)
            pause = min(max(pause * 1.5, 2 * (time.monotonic() - began)), _LONGEST_PAUSE)
            time.sleep(pause)

    def _show(self, seen: Rollout) -> None:
        parts = [f"{len(seen.there(State.UPGRADED))} of {plural(seen.owner.desired, 'node')} upgraded"]
        for state, what in ((State.ENDING, "waiting for clients of"), (State.STARTING, "starting on")):
            if nodes := [each.node for each in seen.there(state)]:
                parts.append(f"{what} {first_of(nodes)}")
        self._progress.show("; ".join(parts))

    # -- acting --------------------------------------------------------------------------------------------------------

    def _check(self, seen: Rollout) -> None:
        """Raise DaemonNotReadyError where something awaited is hopeless, or its time is over."""
        now = time.monotonic()
        awaited = {each.lacks: each for each in seen.awaited()}
        self._since = {lacks: self._since.get(lacks, now) for lacks in awaited}
        for lacks, each in awaited.items():
            if each.is_hopeless or now - self._since[lacks] > each.grace + self._timeout:
                because = f": {each.because}" if each.because else ""
                raise DaemonNotReadyError(
                    f"{lacks}{because}",
                    hint="no further pod was deleted; correct the cause, and run the command again:"
                    f" kubectl --namespace {seen.owner.namespace} describe {each.about}",
                )

    def _delete(self, pods: list[Pod]) -> None:
        if not pods:
            return
        for each in pods:
            self._progress.say(f"{each.node}: pod {each.name} is deleted, and ends after its clients")
        options = (*self._space, "--wait=false", "--ignore-not-found")
        if self._kubectl.call("delete", "pods", *options, *(each.name for each in pods)) is None:
            raise UnreachableError(
                "kubectl could not delete all of these pods; its own message is above",
                hint="see your rights there, and run the command again",
            )
