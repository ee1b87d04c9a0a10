"""The visibility of a lease's paths for its holder: a container has a file system of its own."""

from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from mpsd.core.admission.admission import Offer
from mpsd.core.errors import NotPermittedError
from mpsd.core.events import EventName
from mpsd.core.model import Known, LeaseRequest, Unknown
from mpsd.daemon.record.log import Logger
from mpsd.system import host_environment, namespaces
from mpsd.system.process import Process


def narrowed(request: LeaseRequest, holder: Process, offers: Sequence[Offer], log: Logger) -> LeaseRequest:
    """Restrict a request to the offered GPUs whose pipe directory its holder sees at the same path.

    A program that does not find the directory there runs outside MPS, without limits. Raises NotPermittedError where no
    GPU is left. A holder whose /dev/shm differs from that of the servers is logged: CUDA may not reach its server then
    (error 805). A holder of which this is unknown gets the lease, and is logged.
    """
    # 1. Same root and mount namespace: every path is the same for the holder. This is the usual case.
    # 2. Unknown: no reason to refuse, and its log line names what mpsd lacks. A holder that is gone needs no line.
    # 3. Another file system at a pipe directory: that GPU is not offered, and without any left the request is refused.
    # 4. Another /dev/shm: servers of drivers before 580 need a shared one, so this alone refuses nothing.
    alike, pid = holder.sees_alike(), holder.pid
    if alike == Known(value=True):
        return request
    if isinstance(alike, Unknown):
        if not holder.is_gone():
            log.warning(
                EventName.MOUNTS_UNKNOWN,
                pid=pid,
                because=f"whether process {pid} sees the pipe directory of its lease is unknown: {alike.reason}",
                hint="an mpsd of root with CAP_SYS_PTRACE can read it; to see whether the program is under MPS:"
                " mpsctl verify",
            )
        return request
    directories = {offer.gpu: Path(offer.pipe_directory) for offer in offers}
    hidden = namespaces.hidden(pid, (*directories.values(), host_environment.SHARED_MEMORY))
    invisible = {gpu for gpu, path in directories.items() if path in hidden}
    if invisible:
        wanted = directories if request.gpu == "any" else {request.gpu}
        seen = (gpu for gpu in wanted if gpu not in invisible and (request.among is None or gpu in request.among))
        request = structs.replace(request, among=tuple(seen))
        if not request.among:
            raise NotPermittedError(
                f"process {pid} cannot see {hidden[0]}, the pipe directory of its lease: its container has"
                " another file system, and the process would run outside MPS, without limits",
                hint=f"mount {hidden[0].parents[1]} into the container under the same path (-v, or a volume of"
                " type hostPath)",
                limit="pipe_directory",
            )
    if host_environment.SHARED_MEMORY in hidden:
        log.warning(
            EventName.SHARED_MEMORY_DIFFERS,
            pid=pid,
            because=f"process {pid} has its own /dev/shm, and MPS may need one that the process shares with its server",
            hint="use hostIPC: true or --ipc=host, or mount the host's /dev/shm into the container",
        )
    return request
