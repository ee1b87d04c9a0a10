"""What a holder finds, from where it runs, of what its lease will tell it: a container has a file system of its own."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mpsd.core.errors import NotPermittedError
from mpsd.core.model import LeaseRequest
from mpsd.daemon.log import Happened, Logger
from mpsd.system import surroundings


def narrowed(request: LeaseRequest, holder: int, directories: Mapping[str, str]) -> LeaseRequest:
    """Keep a request to the GPUs, by UUID, whose pipe directory is where its holder, a pid, will be told that it is.

    A program that does not find it there runs outside MPS, without limits. Raises NotPermittedError where none is left.
    """
    hidden = surroundings.hidden(holder, map(Path, directories.values()))
    if not hidden:
        return request
    wanted = directories if request.gpu == "any" else {request.gpu}
    out_of_sight = {gpu for gpu, path in directories.items() if Path(path) in hidden}
    seen = tuple(gpu for gpu in wanted if gpu not in out_of_sight and (request.among is None or gpu in request.among))
    if not seen:
        raise NotPermittedError(
            f"process {holder} does not find {hidden[0]}, where its lease would send it: its container has another file"
            " system, and it would run outside MPS, without limits",
            hint=f"mount {hidden[0].parents[1]} there under the same path (-v, or a volume of type hostPath)",
            limit="pipe_directory",
        )
    return replace(request, among=seen)


def check_shared_memory(holder: int, log: Logger) -> None:
    """Tell where a holder has another /dev/shm than the servers: CUDA may not come to its server then (error 805)."""
    if surroundings.hidden(holder, [surroundings.SHARED_MEMORY]):
        log.warning(
            Happened.SHARED_MEMORY_APART,
            pid=holder,
            because=f"process {holder} has a /dev/shm of its own, and MPS may need one that it shares with its server",
            hint="hostIPC: true, --ipc=host, or mount the host's /dev/shm there",
        )
