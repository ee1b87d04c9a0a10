"""The checks of a request before the ledger decides, and of the holder that takes a claim: the rules are the same."""

import os
from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from mpsd.core import gpus, holders
from mpsd.core.admission import users
from mpsd.core.admission.admission import NOTHING, Amount, Offer
from mpsd.core.admission.ledger import Ledger
from mpsd.core.enforcement import violations
from mpsd.core.errors import DaemonNotReadyError, MpsdError, NotPermittedError, QuotaError
from mpsd.core.events import EventName
from mpsd.core.model import Claim, Known, Lease, LeaseRequest, Reading, Unknown
from mpsd.core.reload import LiveSettings
from mpsd.core.roles import UserIdentity
from mpsd.core.settings import Quota
from mpsd.daemon.gpu.gpus import Gpus
from mpsd.daemon.leases.holder_watch import NamedHolder
from mpsd.daemon.leases.quarantine import Quarantine
from mpsd.daemon.record.log import Logger
from mpsd.system.files import rundir
from mpsd.system.host import host_environment
from mpsd.system.processes import capabilities, foreign_files
from mpsd.system.processes.foreign_reader import ForeignReader, owner_of
from mpsd.system.processes.process import Process


class AdmissionChecks:
    """Refuses holders that may not have a lease, or could not use it."""

    def __init__(
        self,
        ledger: Ledger,
        gpus: Gpus,
        quarantine: Quarantine,
        *,
        daemons: Path,
        settings: LiveSettings,
        reader: ForeignReader,
        log: Logger,
    ) -> None:
        """Take the parts; `daemons` is the directory of the control sockets."""
        self._ledger, self._gpus, self._quarantine = ledger, gpus, quarantine
        self._daemons = daemons
        self._settings, self._reader, self._log = settings, reader, log

    def check_request(
        self,
        request: LeaseRequest,
        named: NamedHolder | Claim,
        user: UserIdentity,
        ttl: float | None,
        offers: Sequence[Offer],
        *,
        elsewhere: Reading[list[Path]],
    ) -> tuple[LeaseRequest, float | None]:
        """Return a request with the GPUs that its user may have and its holder can use, and its time to live.

        Raises QuotaError, QuarantinedError, InvalidRequestError, DaemonNotReadyError, and NotPermittedError for a uid
        that cannot reach a control daemon or a process that does not see it.
        """
        # 1. The quota restricts the GPUs, then the uid and the holder's control group must not be quarantined, then the
        #    amount must be within the quota.
        # 2. The uid must reach the control daemons, and the holder must see their directories.
        limits_of = users.quota_of(user, self._settings.current)
        if request.gpu != "any" or limits_of.gpus is not None:
            request = structs.replace(request, gpu=self.gpu(request.gpu), among=limits_of.gpus)
        self._quarantine.check(user.uid, _origin(named))
        if not users.is_free(limits_of, request):
            ttl = users.time_to_live(limits_of, ttl)
            request = self._within_quota(limits_of, request, user.uid)
        self._check_reach(user.uid)
        return self._visible(request, named, offers, elsewhere), ttl

    def free(self, user: UserIdentity, now: float) -> dict[str, Amount | MpsdError]:
        """Return what the next request of a user can have of each GPU at once, within its quota, or why it is refused.

        The errors are those that such a request would raise.
        """
        found = self._ledger.free(user.uid, now)
        try:
            self._quarantine.check(user.uid, "")
            self._check_reach(user.uid)
        except MpsdError as refusal:
            return dict.fromkeys(found, refusal)
        limits_of, has = users.quota_of(user, self._settings.current), self._ledger.user(user.uid)
        theirs = [each for each in self._ledger.all() if each.owner.uid == user.uid]
        free = dict[str, Amount | MpsdError]()
        for gpu, left in found.items():
            try:
                users.check_gpu(limits_of, gpu)
                users.within_gpu_count(limits_of, LeaseRequest(gpu=gpu), theirs)
                users.check_left(limits_of, has)
            except QuotaError as refusal:
                free[gpu] = refusal
            else:
                free[gpu] = users.left_of(limits_of, has, left) if isinstance(left, Amount) else left.raised()
        return free

    def check_taker(
        self,
        lease: Lease,
        claim: Claim,
        named: NamedHolder,
        user: UserIdentity,
        *,
        offers: Sequence[Offer],
        elsewhere: Reading[list[Path]],
    ) -> None:
        """Refuse a holder of a user that could not have requested the lease of a claim.

        Raises QuotaError, QuarantinedError, and NotPermittedError for a uid that the claim is not for, or that cannot
        be a client.
        """
        uid = user.uid
        if claim.uid is not None and claim.uid != uid:
            raise NotPermittedError(
                f"lease {lease.id} was claimed for uid {claim.uid}, and its holder belongs to uid {uid}",
                hint=f"start it as uid {claim.uid}, or claim a lease for uid {uid}",
            )
        self._quarantine.check(uid, _origin(named))
        self._check_reach(uid)
        for share in lease.shares:
            self._visible(structs.replace(lease.request, gpu=share.gpu), named, offers, elsewhere)
        if lease.owner.uid == uid:
            return  # the lease has counted against the quota since the claim was made
        limits_of = users.quota_of(user, self._settings.current)
        granted = tuple(share.gpu for share in lease.shares)
        self._within_quota(limits_of, structs.replace(lease.request, gpu="any", among=granted), uid)
        for share in lease.shares:
            if limits_of.gpus is not None and share.gpu not in limits_of.gpus:
                raise QuotaError(
                    f"lease {lease.id} is on GPU {share.gpu}, which the quota of uid {uid} does not include",
                    hint=f"claim a lease for uid {uid}: it is placed where its quota allows",
                    limit="quota.gpus",
                )

    def gpu(self, wanted: str) -> str:
        """Return the UUID of the named GPU, or `any`. Raises InvalidRequestError, DaemonNotReadyError."""
        if wanted == "any":
            return wanted
        named = gpus.select(list(self._gpus.by_index.values()), wanted)
        refused = gpus.unsupported(named)
        if refused is not None:
            raise DaemonNotReadyError(f"GPU {named.index} cannot be shared: {refused[0]}", hint=refused[1], limit="gpu")
        return named.uuid

    def _within_quota(self, limits_of: Quota, request: LeaseRequest, uid: int) -> LeaseRequest:
        """Return a request within the quota of a user, restricted to the GPUs that it leaves. Raises QuotaError."""
        worth = self._ledger.worth(request) if users.weighs(limits_of) else NOTHING
        users.check_quota(limits_of, self._ledger.user(uid), request, worth)
        return users.within_gpu_count(
            limits_of, request, (each for each in self._ledger.all() if each.owner.uid == uid)
        )

    def _check_reach(self, uid: int) -> None:
        """Refuse a uid that cannot have a server, or cannot reach the control sockets. Raises NotPermittedError.

        Its programs would run outside MPS, without limits.
        """
        if uid in {0, os.geteuid()}:
            return
        if not capabilities.can_serve_users():
            raise NotPermittedError(
                f"uid {uid} cannot have a server: mpsd has no CAP_SETUID, so it would be root's, or none",
                hint="ask an administrator to give mpsd CAP_SETUID",
            )
        closed = rundir.closed_to_others(self._daemons)
        if closed is not None:
            raise NotPermittedError(
                f"uid {uid} cannot reach the control daemons: it may not traverse {closed}",
                hint=f"ask an administrator to run: chmod o+x {closed}",
            )

    async def elsewhere(self, named: NamedHolder | Claim, offers: Sequence[Offer]) -> Reading[list[Path]]:
        """Return the paths of those that MPS needs that lead a holder elsewhere than mpsd; unknown with the reason.

        It is asked before anything is decided, since the holder may make that take long.
        """
        # Same root and mount namespace: every path is the same for the holder. This is the usual case.
        if isinstance(named, Claim) or not isinstance(named.watched, Process):
            return Known([])
        alike, pid = named.watched.sees_alike(), named.watched.pid
        if isinstance(alike, Unknown):
            return alike
        if alike.value:
            return Known([])
        places = [*(Path(offer.pipe_directory) for offer in offers), host_environment.SHARED_MEMORY]
        return await self._reader.ask(owner_of(pid), foreign_files.hidden, pid, places)

    def _visible(
        self, request: LeaseRequest, named: NamedHolder | Claim, offers: Sequence[Offer], elsewhere: Reading[list[Path]]
    ) -> LeaseRequest:
        """Restrict a request to the GPUs whose pipe directory its holder sees. Raises NotPermittedError."""
        if isinstance(named, Claim) or not isinstance(named.watched, Process):
            return request
        return _narrowed(request, named.watched, offers, elsewhere, self._log)


def _origin(named: NamedHolder | Claim) -> str:
    return holders.origin(named.holder) if isinstance(named, NamedHolder) else ""


def _narrowed(
    request: LeaseRequest, holder: Process, offers: Sequence[Offer], elsewhere: Reading[list[Path]], log: Logger
) -> LeaseRequest:
    """Restrict a request to the offered GPUs whose pipe directory its holder sees at the same path.

    A program that does not find the directory there runs outside MPS, without limits. Raises NotPermittedError where no
    GPU is left. A holder whose /dev/shm differs from that of the servers is logged: CUDA may not reach its server then
    (error 805). A holder of which this is unknown gets the lease, and is logged.
    """
    # 1. Unknown: no reason to refuse, and its log line names what mpsd lacks. A holder that is gone needs no line.
    # 2. Another file system at a pipe directory: that GPU is not offered, and without any left the request is refused.
    # 3. Another /dev/shm: servers of drivers before 580 need a shared one, so this alone refuses nothing.
    pid = holder.pid
    if isinstance(elsewhere, Unknown):
        if not holder.is_gone():
            log.warning(
                EventName.MOUNTS_UNKNOWN,
                pid=pid,
                because=f"whether process {pid} sees the pipe directory of its lease is unknown: {elsewhere.reason}",
                hint="an mpsd of root with CAP_SYS_PTRACE can read it; to see whether the program is under MPS:"
                " mpsctl verify",
            )
        return request
    hidden = elsewhere.value
    if not hidden:
        return request
    directories = {offer.gpu: Path(offer.pipe_directory) for offer in offers}
    invisible = {gpu for gpu, path in directories.items() if path in hidden}
    if invisible:
        wanted = directories if request.gpu == "any" else {request.gpu}
        seen = (gpu for gpu in wanted if gpu not in invisible and (request.among is None or gpu in request.among))
        request = structs.replace(request, among=tuple(seen))
        if not request.among:
            raise NotPermittedError(
                f"process {pid} cannot see {hidden[0]}, the pipe directory of its lease: its container has"
                " another file system, and the process would run outside MPS, without limits",
                hint=violations.bind(str(hidden[0])),
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
