"""The mpsd that serves a job: the node's own where it answers, or a private one, which ends with the keeper."""

import contextlib
import os
import select
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mpsd.cli.job import place
from mpsd.client.client import Client
from mpsd.core.errors import JobFailedError, MpsdError, UnreachableError, error_named
from mpsd.core.programs import job
from mpsd.core.programs.job import JobGpu
from mpsd.system.processes import foreground

if TYPE_CHECKING:
    from mpsd.client import answer_types

_START: Final = 90.0
"""Seconds for the start of a private mpsd: the driver may set up every GPU first."""

_END: Final = 30.0
"""Seconds for its end."""

_READY: Final = b"ready\n"

_SEE_GPUS: Final = "see the GPUs: nvidia-smi"
_AGAIN: Final = (
    "find out what killed it (dmesg shows what the kernel ended for lack of memory), and start the job again"
)


class Service:
    """The mpsd of a job, and the leases that the job has from it."""

    def __init__(self, directory: Path) -> None:
        self.gpus: list[JobGpu] = []
        """The GPUs of the job, once it is ready."""
        self._directory = directory
        self._options: Mapping[str, Any] = {}
        self._private: foreground.Companion | None = None
        self._until = 0.0
        self._client: Client | None = None
        self._simulated = False
        self._leases: dict[str, answer_types.Lease] = {}
        """By UUID, the lease of the job on a GPU."""

    @property
    def is_ready(self) -> bool:
        return self._client is not None

    # -- its life ------------------------------------------------------------------------------------------------------

    def begin(self, options: Mapping[str, Any]) -> None:
        """Find the mpsd of the node, or start a private one. Raises MpsdError."""
        self._options = options
        if options["simulate"] is None and options["control"] is None:
            try:
                self._use(Client(options["socket"], trusted=options["trusted"]))
            except UnreachableError as error:
                if error.socket is None or options["lease"] is not None:
                    raise
            else:
                return
        root = self._directory / "mpsd"
        root.mkdir(mode=0o700)
        command = [sys.executable, "-P", "-m", "mpsd", "job", f"{root}", "--gpus", options["gpus"]]
        for name in ("visible", "simulate", "control"):
            if options[name] is not None:
                command += [f"--{name}", f"{options[name]}"]
        if options["by_bus"]:
            command.append("--by-bus")
        self._private = foreground.Companion(command, os.environ)
        self._until = time.monotonic() + _START

    @property
    def descriptors(self) -> Sequence[int]:
        """The descriptors to wait for, before a call of `heed`."""
        if self._private is None:
            return ()
        return (self._private.pidfd,) if self.is_ready else (self._private.pidfd, self._private.printed)

    @property
    def times(self) -> Sequence[float]:
        """The time at which `heed` has to be called at the latest."""
        return () if self._private is None or self.is_ready else (self._until,)

    def heed(self) -> None:
        """Take note that a private mpsd is ready, or has ended. Raises MpsdError where it has, or is too late."""
        if self._private is None:
            return
        there = select.select(self.descriptors, [], [], 0)[0]
        if not self.is_ready and self._private.printed in there:
            if os.read(self._private.printed, len(_READY)) == _READY:
                self._use(Client(f"{self._directory / 'mpsd' / 'run' / 'mpsd.sock'}"))
                return
            there = select.select([self._private.pidfd], [], [], _END)[0]
        if self._private.pidfd in there:
            raise self._ended()
        if not self.is_ready and time.monotonic() >= self._until:
            self._private.end(_END)
            self._private = None
            raise JobFailedError(f"the job's own mpsd was not ready within {_START:g} s", hint=_SEE_GPUS)

    def _ended(self) -> MpsdError:
        """Say why the private mpsd has ended; its control daemons have ended with it."""
        assert self._private is not None  # noqa: S101 - its caller saw it end
        status, was_ready = self._private.end(_END), self.is_ready
        self._private = self._client = None
        said = (self._directory / place.LOG).read_text(errors="replace").splitlines()
        detail = next((each for each in reversed(said) if each.startswith("mpsd: ")), "")
        hint = next((each for each in reversed(said) if each.startswith("  hint: ")), "")
        if not detail and not os.statvfs(self._directory).f_bavail:
            return JobFailedError(f"there is no space left in {self._directory.parent}", hint=place.ELSEWHERE)
        if was_ready or not detail:
            return JobFailedError(
                f"the job's own mpsd ended unexpectedly, with status {status}, and its control daemons with it",
                hint=_AGAIN,
            )
        sentence, _, code = detail.removeprefix("mpsd: ").removesuffix("]").rpartition(" [")
        return error_named(code, sentence, hint=hint.removeprefix("  hint: "))

    def close(self) -> None:
        """Release the leases of the job, and end a private mpsd with its control daemons."""
        if self._private is not None:
            self._private.end(_END)
        elif self._client is not None and not self._options["lease"]:
            for lease in self._leases.values():
                with contextlib.suppress(MpsdError):
                    self._client.release(lease["id"])

    def _use(self, client: Client) -> None:
        """Use the mpsd that this client calls. Raises MpsdError."""
        options, status = self._options, client.status()
        gpus = [
            JobGpu(each["index"], each["uuid"], each["name"] or "", _node_of(each))
            for each in status["gpus"]
            if each["uuid"] is not None
        ]
        if self._private is None:  # a private one has only those
            gpus = job.chosen(options["gpus"], job.visible(options["visible"], gpus, by_bus=options["by_bus"]))
        if options["lease"] is not None:
            lease = client.lease(options["lease"])
            gpus = [each for each in gpus if each.uuid in lease["gpus"]]
            self._leases = {each.uuid: lease for each in gpus}
        self._simulated, self.gpus, self._client = status["simulated"], gpus, client

    # -- leases --------------------------------------------------------------------------------------------------------

    @property
    def _ready(self) -> Client:
        assert self._client is not None  # noqa: S101 - its callers looked
        return self._client

    def lease(self, gpu: JobGpu, pids: Sequence[int], ranks: int | None) -> None:
        """Take the lease of the ranks on a GPU, or add them to its holders; None: their number is not known."""
        options, client, held = self._options, self._ready, self._leases.get(gpu.uuid)
        if held is None:
            free = next(each["memory_free"] for each in client.gpus()["gpus"] if each["uuid"] == gpu.uuid)
            share = job.share(
                ranks or options["processes"],
                threads=options["threads"],
                memory=options["memory"],
                even=options["even"],
                free=free,
            )
            request = {**share, "gpu": gpu.uuid, "name": options["name"], "pid": pids[0]}
            held, pids = client.admit(request), pids[1:]
            self._leases[gpu.uuid] = held
        if options["lease"] is None:
            for pid in pids:
                client.hold(held["id"], {"pid": pid}, deadline=_START)

    def variables(self, gpu: JobGpu | None) -> dict[str, str]:
        """Return the variables of a program on this GPU; None: on none of them, as a launcher is."""
        found = {"MPSD_JOB": f"{self._directory}"}
        if self._simulated and self._private is not None:
            found["MPSD_SIMULATED_GPUS"] = f"{self._directory / 'mpsd' / 'run' / 'simulated'}"
        if gpu is not None:
            shares = self._leases[gpu.uuid]["shares"]
            found |= next(each["env"] for each in shares if each["gpu"] == gpu.uuid)
            found |= self._ready.variables()
        return found

    def probe(self, seconds: float) -> tuple[str, ...] | None:
        """Return the command of a client that says what CUDA says: that with which mpsd itself tests its servers.

        None where NVIDIA's own control daemon runs without a GPU: it can have no client there.
        """
        if self._simulated and self._options["control"] is not None:
            return None
        module = "mpsd.simulator.client" if self._simulated else "mpsd.system.mps.canary"
        return (sys.executable, "-I", "-m", module, "--alarm", f"{max(int(seconds), 1)}")

    def verify(self, gpu: JobGpu) -> "answer_types.Verify":
        """Return what mpsd says about the processes of the job on a GPU. Raises MpsdError."""
        return self._ready.verify(self._leases[gpu.uuid]["id"])


def _node_of(gpu: "answer_types.Gpu") -> int | None:
    """Return the NUMA node of a GPU; None where the kernel names none."""
    hardware = gpu["hardware"]
    if hardware is None or hardware["pci_bus_id"] is None:
        return None
    try:
        path = Path(f"/sys/bus/pci/devices/{hardware['pci_bus_id'].lower()}/numa_node")
        node = int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
