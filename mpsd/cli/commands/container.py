"""The commands about containers with a lease: cdi, container run, container stop, and the hook that runtimes call."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import click

from mpsd.cli.command import note, of_files, print_answer, with_api, with_form
from mpsd.cli.commands.admit import with_request
from mpsd.cli.groups import Commands
from mpsd.cli.leases import find, start
from mpsd.cli.leases.take import take
from mpsd.cli.options import DURATION, given, lease_names, together
from mpsd.cli.tables import PLAIN, columns_of, table
from mpsd.cli.users import user
from mpsd.client import Client
from mpsd.client.environment import environment
from mpsd.core.containers import cdi as device_files
from mpsd.core.containers import oci
from mpsd.core.errors import (
    AlreadyClaimedError,
    DoesNotFitError,
    InvalidRequestError,
    MpsdError,
    NotFoundError,
    NotPermittedError,
    StoppingError,
    UnreachableError,
)
from mpsd.core.kubernetes import hook as kubernetes_hook
from mpsd.core.kubernetes import pods
from mpsd.core.units import briefly
from mpsd.system.files import cdi_directory
from mpsd.system.processes import foreground, namespaces, proc

if TYPE_CHECKING:
    from mpsd.client import answer_types

T = TypeVar("T")

# -- CDI devices -------------------------------------------------------------------------------------------------------

_DIRECTORY: Final = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    default=cdi_directory.DEFAULT,
    show_default=True,
    metavar="DIR",
    help="Directory of CDI devices, in which no other user can write.",
)
_SHARED_MEMORY: Final = click.option(
    "--shm/--no-shm",
    "shared_memory",
    default=None,
    help="Give the container the machine's /dev/shm, or not."
    f"  [default: for drivers before {device_files.WITHOUT_SHARED_FILES}]",
)


_with_device: Final = together(_DIRECTORY, _SHARED_MEMORY)
"""The options for the place and the content of a device."""


@click.group(cls=Commands)
def cdi() -> None:
    """Manage the CDI devices by which containers get leases.

    A container has the device `--device mpsd/lease=ID`.
    """


@cdi.command()
@click.argument("lease", shell_complete=lease_names)
@_with_device
@with_api
def write(api: Client, lease: str, directory: Path, *, shared_memory: bool | None) -> None:
    """Write the CDI device of a lease, and print its name. The lease is claimed, and not taken yet.

    \b
        mpsctl admit --fraction 0.25 --claim -o json
        mpsctl cdi write LEASE
        podman run --device mpsd/lease=LEASE IMAGE COMMAND

    The container gets the lease's environment and the pipe directory of its control daemon, and nothing else of mpsd's.
    Before its program starts, a hook takes the claim: the lease is held by the container's control group from then on.
    Where it cannot be taken, the container fails with the reason.

    The file has the lease's token. It is readable for the user who writes it, and for the uid that the claim is for.

    Devices of leases that have ended are removed.
    """  # noqa: D301 - click knows by that character what not to wrap
    device_files.file_name(lease)  # refuses an invalid id before anything else
    _clean(api, directory)
    _write_device(api, api.lease(lease), directory, shared_memory=shared_memory)
    click.echo(device_files.device_name(lease))


@cdi.command(name="list")
@_DIRECTORY
@with_form()
@with_api
def list_(api: Client, form: str, directory: Path) -> None:
    """List the CDI devices of leases. Those of leases that have ended are removed."""
    _clean(api, directory)
    devices = [
        {"device": device_files.device_name(lease), "state": state, "file": str(path)}
        for path, lease, state in _devices(api, directory)
    ]
    print_answer(
        form,
        {"devices": devices},
        lambda safe: table(
            columns_of(("DEVICE", "STATE", "FILE")),
            [(each["device"], each["state"], each["file"]) for each in safe["devices"]],
            PLAIN,
            none="no devices",
        ),
    )


@cdi.command()
@click.argument("lease", shell_complete=lease_names)
@_DIRECTORY
def remove(lease: str, directory: Path) -> None:
    """Remove the CDI device of a lease, if there is one. The lease stays."""
    wanted = directory / device_files.file_name(lease)
    for path, _ in cdi_directory.devices(directory):
        if path == wanted:
            path.unlink(missing_ok=True)


def _write_device(api: Client, lease: "answer_types.Lease", directory: Path, *, shared_memory: bool | None) -> Path:
    """Write the device of a lease, and return its file. Raises InvalidRequestError where it cannot be claimed."""
    claim = next((each for each in lease["holders"] if each["kind"] == "claim"), None)
    if claim is None and lease["state"] != "ended":
        raise InvalidRequestError(
            f"{lease['id']} is held already, and a container can only take a claim",
            hint="claim one for the container: mpsctl admit --claim",
        )
    variables = {name: value for name, value in environment(api, lease).items() if name in lease["env"]}
    if device_files.TOKEN not in variables:
        raise InvalidRequestError(
            f"mpsd does not show the token of {lease['id']}, by which a container takes it",
            hint="write the device as root, or as the user who made the claim",
        )
    if shared_memory is None:
        shared_memory = _needs_shared_memory(api, lease)
    device = device_files.Device(lease["id"], os.path.abspath(api.path))  # noqa: PTH100 - unchanged, including links
    content = device_files.document(device, variables, program=_program(api), shared_memory=shared_memory)
    reader = None if claim is None else claim.get("uid")
    with of_files():
        return cdi_directory.write(directory, device, device_files.encode(content), reader=reader)


def _clean(api: Client, directory: Path) -> None:
    """Remove the devices of this mpsd's leases that have ended, and report each."""
    with of_files():
        for path, lease, state in list(_devices(api, directory)):
            if state == "ended":
                path.unlink(missing_ok=True)
                note(f"removed {path}: {lease} has ended")


def _devices(api: Client, directory: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield the file of each device of this mpsd, its lease, and the lease's state."""
    for path, device in cdi_directory.devices(directory):
        if device.socket == os.path.abspath(api.path):  # noqa: PTH100 - as above
            state = "ended"
            with contextlib.suppress(NotFoundError):  # mpsd forgets old leases
                state = api.lease(device.lease)["state"]
            yield path, device.lease, state


def _program(api: Client) -> list[str]:
    """Return the command with which a container runtime starts this mpsctl.

    It does not depend on the runtime's environment or directory.
    """
    trusted = [f"--trust-uid={uid}" for uid in sorted(api.trusted)]
    return [sys.executable, "-I", "-m", "mpsd.cli.main", *trusted]


def _needs_shared_memory(api: Client, lease: "answer_types.Lease") -> bool:
    """Tell whether clients and servers may share memory through files; True for an unknown driver."""
    from mpsd.core import gpus

    version = next((each["version"] for each in api.daemons()["daemons"] if each["name"] == lease["daemon"]), None)
    branch = gpus.driver_branch(version) if version is not None else None
    return branch is None or branch < device_files.WITHOUT_SHARED_FILES


# -- container run and stop --------------------------------------------------------------------------------------------

_RUNTIMES: Final = click.Choice(["podman", "docker"])

_DEADLINE: Final = 45.0
"""Seconds for mpsd's answer, so that the hook can still report an error before its runtime kills it
(cdi.HOOK_SECONDS)."""

_PATIENCE: Final = 10.0
"""Seconds for which a hook retries while mpsd does not answer: a new one may be starting."""

_PAUSE: Final = 0.2


@click.group(cls=Commands)
def container() -> None:
    """Run containers with a lease of their own."""


@container.command()
@click.argument("runtime", type=_RUNTIMES)
@with_request
@click.option(
    "--claim-deadline",
    type=DURATION,
    metavar="DURATION",
    help="Time until the container must have started, its image's download included.  [default: as mpsd has it]",
)
@_with_device
@click.argument(
    "arguments", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[OPTIONS OF RUN]... IMAGE [COMMAND]..."
)
@with_api
def run(
    api: Client,
    runtime: str,
    arguments: tuple[str, ...],
    *,
    wait: float,
    claim_deadline: float | None,
    directory: Path,
    shared_memory: bool | None,
    **request: object,
) -> None:
    """Take out a lease and run a container with it.

    \b
        mpsctl container run podman --fraction 0.25 -- --rm IMAGE COMMAND
        mpsctl container run podman --threads 25 --memory 8GiB -- --device nvidia.com/gpu=all IMAGE COMMAND

    What follows `--` goes to `RUNTIME run` as it is. The lease is held by the container's control group and ends with
    it; it belongs to the uid that the container's program starts with. The exit status is that of the runtime, and
    signals are passed on to it.

    It writes a CDI device (see mpsctl cdi write), which needs root, and removes it at the end. No container starts
    without a lease, and a container whose lease cannot be opened to it fails with the reason.
    """  # noqa: D301 - click knows by that character what not to wrap
    _clean(api, directory)
    lease = take(api, {**request, "holder": {"claim": given(deadline=claim_deadline)}}, wait=wait)
    with start.released_on_failure(api, lease):
        path = _write_device(api, lease, directory, shared_memory=shared_memory)
    elsewhere = runtime == "podman" and directory not in cdi_directory.READ_BY_DEFAULT
    where = [f"--cdi-spec-dir={directory}"] if elsewhere else []
    command = [runtime, *where, "run", f"--device={device_files.device_name(lease['id'])}", *arguments]
    try:
        status = foreground.run(command, os.environ)
    except OSError as error:
        click.echo(f"mpsctl: {runtime}: {error.strerror}", err=True)
        status = start.NOT_FOUND
    finally:
        path.unlink(missing_ok=True)
        _give_back_unless_taken(api, lease)
    click.get_current_context().exit(status)


def _give_back_unless_taken(api: Client, lease: "answer_types.Lease") -> None:
    """Release a lease that no container took; a taken one ends with its container."""
    api.close()  # another connection, since mpsd may have been restarted while the container ran
    try:
        api.release_untaken(lease["id"])
    except AlreadyClaimedError:
        return
    except MpsdError as error:
        note(f"{lease['id']} ends by itself, and could not be released: {error.detail}")


@container.command()
@click.argument("name")
@click.option("--runtime", type=_RUNTIMES, default="podman", show_default=True, help="Runtime of the container.")
@with_api
def stop(api: Client, name: str, runtime: str) -> None:
    """End the clients of a container's lease, then stop the container.

    Each client is ended by terminate_client before any signal (see mpsctl release --end-clients), so that the work of
    others on the GPU is not lost to a client that is killed.
    """
    status, pid = _process_of(runtime, name)
    if status:
        click.get_current_context().exit(status)  # the runtime has printed the reason
    if pid:
        lease = _lease_of(api, pid)
        if lease is None:
            note(f"{name} has no lease")
        else:
            find.end_with_clients(api, lease)
        if not _process_of(runtime, name)[1]:
            return  # the lease ended with its last client
    click.get_current_context().exit(foreground.run([runtime, "stop", name], os.environ))


def _process_of(runtime: str, name: str) -> tuple[int, int]:
    """Return the runtime's exit status, and the pid of a container's process; 0 where it does not run."""
    command = [runtime, "container", "inspect", "--format", "{{.State.Pid}}", name]
    status, text = foreground.output(command, os.environ)
    return status, int(text) if not status and text.isascii() and text.isdecimal() else 0


def _lease_of(api: Client, pid: int) -> str | None:
    """Return the lease that a process is a client or holder of, or that the innermost group around it holds."""
    own = [f"{path}/" for path in proc.control_groups(pid).values()]
    best, found = "", None
    for lease in api.leases()["leases"]:
        for each in lease["holders"]:
            if pid in lease["clients"] or each.get("pid") == pid:
                return lease["id"]
            held = each.get("cgroup") or ""
            if len(held) > len(best) and any(path.startswith(f"{held}/") for path in own):
                best, found = held, lease["id"]
    return found


# -- the hook ----------------------------------------------------------------------------------------------------------


@container.command(hidden=True)
@click.argument("lease", required=False)
@click.option("--pod", "root", metavar="ROOT", help="Have its pod's control group, below kubelet's ROOT, hold it.")
@click.option("--deadline", type=float, default=_DEADLINE, help="Seconds of the claim that changes the lease's user.")
@click.option("--by-environment", is_flag=True, help="A variable gives the container its GPU.")
@with_api
def hook(api: Client, lease: str | None, *, root: str | None, deadline: float, by_environment: bool) -> None:
    """Take a lease for a container that is being created; its runtime calls this, with its state on stdin.

    Without a LEASE, the container is one of a device plugin, and its variables tell which lease it has.
    """
    state = oci.state(sys.stdin.buffer.read(oci.STATE_BYTES))
    found = oci.container(_configuration(state))
    uid, gid = (_outside(state.pid, kind, inside) for kind, inside in (("uid", found.uid), ("gid", found.gid)))
    if lease is None:
        group = _pod_group(state.pid, root or "/")
        _take_for_plugin(api, found, group, {"uid": uid, "gid": gid}, deadline, by_environment=by_environment)
        return
    directory = _pipe_directory(found, f"--device {device_files.device_name(lease)}")
    is_nested = namespaces.has_few_uids()
    if is_nested:
        # Such a namespace shows every uid that it does not map under this number, including root, the user of this
        # mpsd.
        nobody = int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
        api = click.get_current_context().with_resource(Client(api.path, trusted=api.trusted | {nobody}))
    request: dict[str, object] = {"token": os.environ.get(device_files.TOKEN, "")}
    is_root = os.geteuid() == 0 and not is_nested
    if is_root:
        known = user(str(uid))  # the user's groups count in quotas
        request["owner"] = {"uid": uid, "gid": gid, "groups": known["groups"] if known is not None else []}
    elif uid != (own := _outside("self", "uid", os.geteuid())):
        raise NotPermittedError(
            f"the program of the container will run as uid {uid}, and the lease is for your own, {own}",
            hint="run it as root of the container, which is you, or with --userns=keep-id",
        )
    if root is not None:
        request["cgroup"] = _pod_group(state.pid, root)
        taken = _take_for_pod(api, lease, request, uid)
        _check_same(taken, lease, directory)
        kubernetes_hook.check_connections(found.variables, taken["env"])
        return
    request["pid"] = state.pid
    # Without a control group by the runtime (podman of a user on version 1), the container would share one with others.
    # Nor does mpsd accept a group that was not delegated to its user.
    has_group = proc.control_groups(state.pid) != proc.control_groups("self")
    try:
        taken = _take(api, lease, {**request, "group": has_group})
    except (InvalidRequestError, NotPermittedError) as refusal:
        if is_root or not has_group or refusal.limit not in {"cgroup", "ttl"}:
            raise
        taken = _take(api, lease, request)
    _check_same(taken, lease, directory)


def _pipe_directory(container: oci.Container, how: str) -> str:
    """Return the pipe directory that is mounted into a container. Raises NotPermittedError for one without any."""
    directory = container.variables.get(device_files.PIPE_DIRECTORY)
    if directory is None or container.mounts.get(directory) != directory:
        raise NotPermittedError(
            f"the container would run outside MPS, without limits: its {device_files.PIPE_DIRECTORY} is {directory!r},"
            " which is not mounted into it",
            hint=f"do not set that variable yourself, and mount nothing over the directory; {how} brings both",
        )
    return directory


def _take_for_plugin(
    api: Client,
    container: oci.Container,
    group: str,
    owner: Mapping[str, int],
    deadline: float,
    *,
    by_environment: bool,
) -> None:
    """Let the pod of a container hold its lease for the user of its program, and refuse one with other variables."""
    leases = _patiently(lambda: api.leases()["leases"])
    allocation = container.variables.get(kubernetes_hook.ALLOCATION, "")
    found = next((each for each in leases if each["labels"].get(kubernetes_hook.LABEL) == allocation), None)
    if found is None or not allocation:
        raise NotFoundError(
            f"no lease of the node is for this container: its {kubernetes_hook.ALLOCATION} is {briefly(allocation)}",
            hint=f"remove {kubernetes_hook.ALLOCATION} from the env of the container in its pod's manifest, if it is"
            " there; otherwise the lease has just ended, and kubelet tries again",
        )
    lease = _patiently(lambda: api.lease(found["id"]))
    others = {each["id"] for each in leases} - {lease["id"]}
    (gpu,), visible = lease["gpus"], set[str]()
    if by_environment:
        node = [each["uuid"] for each in _patiently(lambda: api.gpus()["gpus"])]
        visible = kubernetes_hook.visible(gpu, node)
    kubernetes_hook.check(container.variables, lease["env"], gpu, others, visible)
    _pipe_directory(container, "the resource of the device plugin")
    holders = {each.get("cgroup") for each in lease["holders"]}
    is_claim = any(each["kind"] == "claim" for each in lease["holders"])
    if not is_claim and group not in holders:
        raise AlreadyClaimedError(
            f"lease {lease['id']} is held by another pod", hint="it ends with that pod, and kubelet tries again"
        )
    # 1. The plugin has the pod hold the lease for this user already: only its turn may have to come.
    # 2. It holds it for another one, root as a rule: the lease becomes a claim for this user first.
    # 3. The pod takes the claim.
    if not is_claim and lease["owner"]["uid"] == owner["uid"]:
        with contextlib.suppress(DoesNotFitError):  # of its client that has just ended: that opens it again
            _patiently(lambda: api.attach(lease["id"], deadline=_DEADLINE))
        return
    if not is_claim:
        claim = {"deadline": deadline, "uid": owner["uid"]}
        _patiently(lambda: api.hold(lease["id"], {"claim": claim, "replace": True}, deadline=_DEADLINE))
    token = lease["env"].get(device_files.TOKEN, "")
    _take(api, lease["id"], {"token": token, "owner": owner, "cgroup": group, "while": "exists"})


def _check_same(taken: "answer_types.Lease", lease: str, directory: str) -> None:
    """Refuse a container that has the pipe directory of another lease."""
    if taken["env"].get(device_files.PIPE_DIRECTORY) != directory:
        raise NotPermittedError(
            f"the container's {device_files.PIPE_DIRECTORY} is {directory}, and that of {lease} is another",
            hint="write the device of the lease again: mpsctl cdi write",
        )


def _pod_group(pid: int, root: str) -> str:
    """Return the control group of the pod of a container's process. Raises NotPermittedError."""
    above = [path.rpartition("/")[0] for path in proc.control_groups(pid).values()]
    group = next((path for path in above if pods.pod_of(path, root) is not None), None)
    if group is None:
        raise NotPermittedError(
            f"process {pid} of the container is in no control group of a pod below {root}",
            hint="see kubelet's cgroupsPerQOS, and cgroup_root of mpsd-kubernetes",
        )
    return group


def _take_for_pod(api: Client, lease: str, request: Mapping[str, object], uid: int) -> "answer_types.Lease":
    """Let the pod of a container hold a lease, so that the lease outlives its containers; each of them requests this.

    Another pod that shares the lease becomes a further holder.
    """
    try:
        taken = _take(api, lease, {**request, "while": "exists"})
    except AlreadyClaimedError:
        taken = api.lease(lease)
        if taken["owner"]["uid"] == uid:
            taken = _take(api, lease, {"cgroup": request["cgroup"], "while": "exists"})
    if taken["owner"]["uid"] != uid:
        raise NotPermittedError(
            f"the program of the container will run as uid {uid}, and {lease} belongs to uid {taken['owner']['uid']},"
            " as which another container of its claim runs",
            hint="run them as the same user, or write a request of its own for each: resources.claims[].request",
        )
    return taken


def _take(api: Client, lease: str, request: Mapping[str, object]) -> "answer_types.Lease":
    """Take the claim."""
    try:
        return _patiently(lambda: api.hold(lease, request, deadline=_DEADLINE))
    except NotFoundError:
        raise _ended(api, lease) from None


def _patiently(ask: Callable[[], T]) -> T:
    """Ask mpsd; retry for some seconds while it does not answer, since it may be restarting."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            return ask()
        except (UnreachableError, StoppingError) as error:
            if not error.retryable or time.monotonic() > end:
                raise
        time.sleep(_PAUSE)


def _ended(api: Client, lease: str) -> NotFoundError:
    """Return the error that says why a lease can no longer be taken."""
    because = "mpsd does not know it"
    with contextlib.suppress(MpsdError):  # mpsd forgets old leases, and shows leases only to their users
        because = api.lease(lease)["because"]
    return NotFoundError(f"{lease} has ended: {because}", hint="claim another lease for the container")


def _configuration(state: oci.State) -> bytes:
    try:
        with Path(state.bundle, "config.json").open("rb") as file:
            return file.read(oci.CONFIGURATION_BYTES)
    except OSError as error:
        raise NotFoundError(
            f"the configuration of the container cannot be read: {error.filename}: {error.strerror}",
            hint="the hook has to run where the runtime does",
        ) from None


def _outside(pid: int | str, kind: str, inside: int) -> int:
    """Convert an id of a container to the machine's. Raises InvalidRequestError for one that is not mapped."""
    try:
        found = oci.outside(Path(f"/proc/{pid}/{kind}_map").read_text(encoding="ascii"), inside)
        if found is not None and not Path(f"/proc/{pid}/ns/user").samefile("/proc/self/ns/user"):
            found = oci.outside(Path(f"/proc/self/{kind}_map").read_text(encoding="ascii"), found)
    except OSError as error:
        raise NotFoundError(
            f"process {pid} of the container is gone: {error.strerror}", hint="see why its runtime ended it"
        ) from None
    if found is None:
        raise InvalidRequestError(
            f"{kind} {inside} of the container is not mapped in its user namespace",
            hint="run it as a user that its user namespace has",
        )
    return found
