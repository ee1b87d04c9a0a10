"""The selection of events: by time, lease, control daemon, GPU, user, or kind."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final, NamedTuple

from mpsd.core.errors import InvalidRequestError
from mpsd.core.events import EventName
from mpsd.core.units import briefly

if TYPE_CHECKING:
    from mpsd.client import answer_types


def matching_kinds(pattern: str) -> frozenset[str]:
    """Return the kinds of events that match a name, or a pattern such as `lease_*`.

    Raises InvalidRequestError where there are none, with similar names.
    """
    wanted = pattern.replace("-", "_")
    found = frozenset(each for each in EventName if fnmatchcase(each, wanted))
    if found:
        return found
    near = difflib.get_close_matches(wanted, EventName, n=3) or [each for each in EventName if wanted in each][:3]
    meant = f"did you mean {' or '.join(near)}?" if near else "list them: mpsctl events --kinds"
    raise InvalidRequestError(f"there are no events of the kind {briefly(pattern)}", hint=meant)


class GpuNames(NamedTuple):
    number: int
    uuid: str | None
    daemon: str | None


@dataclass
class Selector:
    """Selects events by criteria, of which None, or empty, stands for all.

    It takes the events in their order: the facts that one event has about a lease apply to later events about it.
    """

    since: datetime | None = None
    until: datetime | None = None
    lease: str | None = None
    """A lease's id, or the beginning of one."""
    daemon: str | None = None
    gpu: GpuNames | None = None
    uid: int | None = None
    kinds: Collection[str] = ()
    _owners: dict[str, int] = field(default_factory=dict, init=False)
    _gpus: dict[str, frozenset[str]] = field(default_factory=dict, init=False)

    def takes(self, event: "answer_types.Event") -> bool:
        """Tell whether an event is selected."""
        self._learn(event)
        if self.kinds and event["event"] not in self.kinds:
            return False
        if self.since is not None or self.until is not None:
            at = datetime.fromisoformat(str(event["at"]))
            if (self.since and at < self.since) or (self.until and at > self.until):
                return False
        return (
            (self.lease is None or any(each.startswith(self.lease) for each in leases_of(event)))
            and (self.daemon is None or self.daemon in _daemons_of(event))
            and (self.uid is None or self.uid in self._users_of(event))
            and (self.gpu is None or self._is_on(event, self.gpu))
        )

    def _learn(self, event: "answer_types.Event") -> None:
        match event:
            case {"lease": str(lease), "uid": int(uid), **others}:
                self._owners[lease] = uid
                if isinstance(gpus := others.get("gpus"), list):
                    self._gpus[lease] = frozenset(map(str, gpus))

    def _users_of(self, event: "answer_types.Event") -> set[object]:
        suspects = event.get("suspects")
        owners = {self._owners[each] for each in leases_of(event) if each in self._owners}
        return {event.get("uid"), *owners, *(suspects if isinstance(suspects, list) else ())}

    def _is_on(self, event: "answer_types.Event", gpu: GpuNames) -> bool:
        gpus = event.get("gpus")
        named = {event.get("uuid"), event.get("gpu"), *(gpus if isinstance(gpus, list) else ())}
        named.update(*(self._gpus.get(each, ()) for each in leases_of(event)))
        return (
            (gpu.uuid is not None and gpu.uuid in named)
            or (gpu.daemon is not None and gpu.daemon in _daemons_of(event))
            or (event["event"] in _BY_INDEX and event.get("index") == gpu.number)
        )


_BY_INDEX: Final = frozenset(
    {"gpu_found", "gpu_health", "gpu_admission", *(each for each in EventName if each.startswith("compute_mode_"))}
)


def leases_of(event: Mapping[str, object]) -> Iterable[str]:
    """Return the leases that an event is about."""
    match event:
        case {"lease": str(lease)}:
            return (lease,)
        case {"leases": list(leases)}:
            return tuple(map(str, leases))
        case _:
            return ()


def _daemons_of(event: Mapping[str, object]) -> Collection[object]:
    daemons = event.get("daemons")
    return (event.get("daemon"), *(daemons if isinstance(daemons, (list, dict)) else ()))
