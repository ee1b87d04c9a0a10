"""The CDI device of a lease: the changes that a runtime makes to a container with `--device mpsd/lease=ID`.

Source of the format: the Container Device Interface specification, version 0.3.0. This is the oldest version that all
of podman 4.1, containerd 1.7, CRI-O 1.24 and Docker 25 read, and it has all that mpsd needs.
"""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from mpsd.core.errors import InvalidRequestError
from mpsd.core.mps_facts import UNASKED
from mpsd.core.sanitize import SECRETS

VERSION: Final = "0.3.0"
KIND: Final = "mpsd/lease"

HOOK_SECONDS: Final = 60
"""Seconds after which the runtime kills the hook, and the container fails. The hook's own deadlines are shorter."""

(TOKEN,) = SECRETS
PIPE_DIRECTORY: Final = "CUDA_MPS_PIPE_DIRECTORY"

WITHOUT_SHARED_FILES: Final = 580
"""The first driver whose servers share memory with their clients without a file in /dev/shm (its own logs)."""

_PREFIX: Final = "mpsd-lease_"
"""The specification's form for devices that come and go: VENDOR-CLASS_NAME."""

_SUFFIX: Final = ".json"
_READ_ONLY: Final = ("bind", "ro", "nosuid", "nodev", "noexec")
"""A client connects to sockets in its pipe directory, which works on a read-only mount, and makes no file there."""

_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - where POSIX shared memory is, shm_overview(7)


class Program(NamedTuple):
    """mpsctl for a container runtime: an absolute path with arguments, and the variables that it needs."""

    command: Sequence[str]
    variables: Mapping[str, str] = MappingProxyType({})


class Device(NamedTuple):
    """The identity of a device that mpsctl wrote: its lease, and the socket of the mpsd that granted it."""

    lease: str
    socket: str


def device_name(lease: str) -> str:
    """Return the device's name for `--device`."""
    return f"{KIND}={lease}"


def file_name(lease: str) -> str:
    """Return the name of the device file of a lease.

    Raises InvalidRequestError for a text that cannot be a lease id.
    """
    if not lease.isascii() or not lease.replace("-", "").isalnum() or not lease[0].isalnum():
        raise InvalidRequestError(f"{lease!r} is not the id of a lease", hint="list the leases: mpsctl leases")
    return f"{_PREFIX}{lease}{_SUFFIX}"


def lease_of(name: str) -> str | None:
    """Return the lease that a device file is named after; None for the file of another device."""
    if not name.startswith(_PREFIX) or not name.endswith(_SUFFIX):
        return None
    return name.removeprefix(_PREFIX).removesuffix(_SUFFIX)


def document(
    device: Device, variables: Mapping[str, str], *, program: Sequence[str], shared_memory: bool
) -> dict[str, object]:
    """Return the CDI document with the device of a lease; `edits` has the content."""
    hook = hook_of(device, variables, Program(program))
    found = edits(variables, hook=hook, shared_memory=shared_memory)
    return of_devices(KIND, {device.lease: found})


def of_devices(kind: str, devices: Mapping[str, object]) -> dict[str, object]:
    """Return the CDI document of devices: the changes that each makes to a container, by the device's name."""
    listed = [{"name": name, "containerEdits": found} for name, found in devices.items()]
    return {"cdiVersion": VERSION, "kind": kind, "devices": listed}


def edits(variables: Mapping[str, str], *, hook: object | None, shared_memory: bool) -> dict[str, object]:
    """Return the changes that a lease's device makes to a container.

    `variables` are the lease's environment; what it does not have of `UNASKED`, the image does not add. Of the node's
    files, the container gets only the directory that
    CUDA_MPS_PIPE_DIRECTORY names, and with `shared_memory` the machine's /dev/shm.
    """
    directory = variables[PIPE_DIRECTORY]
    mounts = [{"hostPath": directory, "containerPath": directory, "options": [*_READ_ONLY]}]
    if shared_memory:
        options = ["bind", "rw", "nosuid", "nodev", "noexec"]
        mounts.append({"hostPath": _SHARED_MEMORY, "containerPath": _SHARED_MEMORY, "options": options})
    hooks = {} if hook is None else {"hooks": [hook]}
    own = {**variables, **without_unasked(variables)}
    return {"env": [f"{name}={value}" for name, value in own.items()], "mounts": mounts, **hooks}


def without_unasked(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the values by which a container has none of the variables that its lease does not have."""
    return {name: value for name, value in UNASKED.items() if value and name not in variables}


def hook_of(device: Device, variables: Mapping[str, str], program: Program, *options: str) -> dict[str, object]:
    """Return the hook that takes the claim of a lease.

    It gets the token through its environment, which other users cannot read; they could read its arguments.
    """
    return hook(program, device.socket, *options, device.lease, secrets={TOKEN: variables[TOKEN]})


def hook(
    program: Program, socket: str, *arguments: str, secrets: Mapping[str, str] = MappingProxyType({})
) -> dict[str, object]:
    """Return a hook that calls `mpsctl container hook` before the program of a container starts."""
    # Never empty: runc gives a hook without variables the runtime's own.
    own = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **program.variables, **secrets}
    return {
        "hookName": "createRuntime",
        "path": program.command[0],
        "args": [*program.command, "--socket", socket, "container", "hook", *arguments],
        "env": [f"{name}={value}" for name, value in own.items()],
        "timeout": HOOK_SECONDS,
    }


def encode(content: Mapping[str, object]) -> bytes:
    """Return a CDI document as the bytes of its file."""
    return f"{json.dumps(content, indent=2)}\n".encode()


def decode(name: str, raw: bytes) -> Device | None:
    """Return the device of a file with that name; None for a file that `document` did not make."""
    lease = lease_of(name)
    try:
        content = json.loads(raw)
        (device,) = content["devices"]
        (hook,) = device["containerEdits"]["hooks"]
        *_, option, socket, command, verb, hooked = hook["args"]
        marks = (content["kind"], device["name"], option, command, verb, hooked)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None
    if lease is None or marks != (KIND, lease, "--socket", "container", "hook", lease) or not isinstance(socket, str):
        return None
    return Device(lease, socket)
