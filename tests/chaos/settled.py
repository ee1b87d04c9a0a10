"""The conditions on a node that is left in peace, as seen from outside."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.daemon.helpers import GIB, MIB

if TYPE_CHECKING:
    from tests.chaos.chaos import Chaos


@dataclass
class Settled:
    """Checks whether a whole node has settled."""

    chaos: "Chaos"

    def pending(self) -> str:
        """Return what has not settled yet; an empty text means that everything has."""
        before = self._said()
        if isinstance(before, str):
            return before
        limits, clients = before
        for daemon in limits:
            found, there = self._read(daemon)
            if found != {limits[daemon]}:
                return f"{daemon} has {found}, and the leases say {limits[daemon]}"
            if there != clients[daemon]:
                return f"the clients of {daemon} are {there}, and mpsd knows {clients[daemon]}"
        return "" if self._said() == before else "it goes on"

    def _said(self) -> "str | tuple[dict[str, tuple[str, ...]], dict[str, set[int]]]":
        """Return the expected limits and clients of each daemon, or why they are not known yet."""
        leases, daemons = self.chaos.look(), self.chaos.node.daemons()
        if gone := [each.pid for each in self.chaos.members if each.may_end and not each.ended]:
            return f"{gone} are still there"
        granted = {name: lease for name, lease in leases.items() if lease["state"] in {"granted", "active"}}
        owed = {name for name, lease in granted.items() if lease["owner"]["uid"] not in self.chaos.outlaws}
        if given_up := [each for each in owed if self.chaos.records.given_up.get(each, "it expires") != "it expires"]:
            return f"{given_up} are not over"
        if unpublished := owed - self.chaos.records.granted.keys():
            # A process that does not know its lease has ended, and the lease ends with it.
            return f"nobody was told of {unpublished}"
        running = []
        for name, daemon in daemons.items():
            if reason := self._unsettled(daemon, granted):
                return f"{name}: {reason}"
            running += self._running(name)
        self.chaos.records.check_operations(running)
        clients = {
            name: {pid for each in daemon["servers"] if not each["orphan"] for pid in each["clients"]}
            for name, daemon in daemons.items()
        }
        # A daemon that is quitting answers no query.
        answering = [name for name in daemons if daemons[name]["state"] != "stopping"]
        return {name: self._limits_by(name, granted) for name in answering}, clients

    def _running(self, daemon: str) -> list[str]:
        """Return the pending operations of a daemon, and record the outcomes of the others."""
        running = []
        for each in self.chaos.records.operations.values():
            if each.daemon != daemon or each.is_over:
                continue
            answer = self.chaos.node.get(f"/v1/operations/{each.id}")
            assert answer.status == 200, f"nobody knows what became of {each}: {answer.body!r}"
            if answer.json["state"] == "running":
                running.append(each.id)
            else:
                each.told = answer.json["state"]
        return running

    def _unsettled(self, daemon: dict[str, Any], granted: dict[str, Any]) -> str:
        """Return why a control daemon is not yet in its last desired state, or an empty text."""
        name, state = daemon["name"], daemon["state"]
        if state == "stopping" and any(each.daemon == name and each.went for each in self.chaos.members):
            return ""  # a client came after the command to quit, and `quit` waits for it
        if not daemon["verified"] or daemon["drift"]:
            return f"it is {state}: {daemon['because']}; its limits are not verified"
        desired = self.chaos.records.desired.get(name, {"run"})
        may_be = {{"run": "ready", "hold": "held", "drain": "draining"}[each] for each in desired}
        if daemon["operation"] is None:
            return "" if state in may_be else f"it is {state}, and is to be {may_be}"
        leases = [each for each in granted.values() if each["daemon"] == name]
        if state != "draining":
            return f"it is {state}, and {daemon['operation']}"
        if not leases and not any(each["clients"] or each["orphan"] for each in daemon["servers"]):
            return f"nobody is left, and {daemon['operation']}"
        return ""

    def _limits_by(self, daemon: str, granted: dict[str, Any]) -> tuple[str, ...]:
        """Return the limits that a daemon should have by the leases on it."""
        here = [each for each in granted.values() if each["daemon"] == daemon]
        threads = max((each["active_thread_percentage"] for each in here), default=0.1)
        memory = max((each["pinned_device_mem_limit"] for each in here), default=MIB)
        limits = f"{threads:.1f}", f"{memory // GIB}G" if memory >= GIB else "1M"
        return limits[: 1 + self.chaos.memory]

    def _read(self, daemon: str) -> tuple[set[tuple[str, ...]], set[int]]:
        """Read the defaults and the limits of each server with the front-end, and its clients."""
        limits = {self._limits(daemon, "get_default_active_thread_percentage", "get_default_device_pinned_mem_limit 0")}
        clients: set[int] = set()
        for server in self.chaos.node.ask(daemon, "get_server_list"):
            own = f"get_active_thread_percentage {server}", f"get_device_pinned_mem_limit {server} 0"
            limits.add(self._limits(daemon, *own))
            # A server that ended in between is not found, and has unexpected limits: not settled yet.
            said = self.chaos.node.ask(daemon, f"get_client_list {server}")
            clients.update(int(each) for each in said if each.isdecimal())
        return limits, clients

    def _limits(self, daemon: str, *commands: str) -> tuple[str, ...]:
        return tuple(self.chaos.node.ask(daemon, "\n".join(commands[: 1 + self.chaos.memory])))
