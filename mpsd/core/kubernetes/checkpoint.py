"""kubelet's own record of each container's devices: `device-plugins/kubelet_internal_checkpoint`. Pure.

The file belongs to root, and is the only place that has a pod's uid with its devices. kubelet writes it after it has
allocated all resources of a container, before the container is created. Its format is not documented and has changed
once: until 1.19 a list of ids, since 1.20 lists by NUMA node.
"""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from mpsd.core.errors import InvalidRequestError, MpsdError
from mpsd.core.kubernetes import devices
from mpsd.core.kubernetes.devices import KINDS, Kind, Numbers
from mpsd.core.kubernetes.settings import Settings

NAME = "device-plugins/kubelet_internal_checkpoint"
"""Its path below kubelet's root directory."""


class Container(NamedTuple):
    """The devices of a container in kubelet's record."""

    pod: str
    """The uid of its pod."""
    name: str
    gpu: str
    numbers: Mapping[Kind, Numbers]
    answers: Mapping[Kind, str]
    """The answer to kubelet's allocation: an encoded ContainerAllocateResponse, in base64."""

    def __str__(self) -> str:
        """Name the container so that a user can find it."""
        return f"container {self.name} of pod {self.pod}"


def parse(raw: bytes, settings: Settings) -> list[Container]:
    """Return the containers that have devices of these resources. Raises ValueError for a file of another form."""
    kinds = {devices.resource_name(kind, settings): kind for kind in KINDS[settings.resources]}
    found = dict[tuple[str, str], dict[Kind, tuple[list[str], str]]]()
    try:
        for entry in _entries(raw):
            kind = kinds.get(_text(entry["ResourceName"]))
            if kind is not None:
                key = _text(entry["PodUID"]), _text(entry["ContainerName"])
                answer = entry.get("AllocResp")
                found.setdefault(key, {})[kind] = _ids(entry["DeviceIDs"]), answer if isinstance(answer, str) else ""
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"kubelet's checkpoint has another form: {error!r}") from None
    containers = []
    for (pod, name), had in found.items():
        try:
            gpus = {kind: devices.by_gpu(ids) for kind, (ids, _) in had.items()}
        except MpsdError:
            continue  # devices of another plugin that had this resource name
        names = {gpu for each in gpus.values() for gpu in each}
        if len(names) == 1:
            (gpu,) = names
            numbers = {kind: each[gpu] for kind, each in gpus.items()}
            containers.append(Container(pod, name, gpu, numbers, {kind: answer for kind, (_, answer) in had.items()}))
    return containers


def with_devices(containers: Sequence[Container], kind: Kind, gpu: str, numbers: Numbers) -> Container:
    """Return the container that has these devices. Raises InvalidRequestError where kubelet's record has none."""
    for each in containers:
        if each.gpu == gpu and each.numbers.get(kind) == numbers:
            return each
    raise InvalidRequestError(
        f"kubelet starts a container with {len(numbers)} devices of GPU {gpu}, and its checkpoint lists them for none",
        hint="kubelet tries again; if it stays so, see kubelet_dir and kubelet's log",
        limit="checkpoint",
    )


def _entries(raw: bytes) -> Sequence[Mapping[str, object]]:
    document = cast("Mapping[str, Mapping[str, object]]", json.loads(raw))
    entries = document["Data"]["PodDeviceEntries"]
    return cast("Sequence[Mapping[str, object]]", entries or [])


def _ids(value: object) -> list[str]:
    lists = value.values() if isinstance(value, dict) else [value]
    return [_text(each) for one in lists for each in cast("Sequence[object]", one)]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value
