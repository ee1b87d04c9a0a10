"""The rules for taking a claimed lease: a process may take it that could have requested it."""

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import structs

from mpsd.core.admission import quota
from mpsd.core.admission.admission import Amount, Offer
from mpsd.core.errors import MpsdError, NotPermittedError, QuotaError
from mpsd.core.holders.holders import claim_of
from mpsd.core.model import Lease, Owner
from mpsd.core.reload import LiveSettings
from mpsd.core.roles import UserIdentity
from mpsd.daemon.holders.named_holder import NamedHolder
from mpsd.daemon.leases import mount_visibility
from mpsd.daemon.leases.leases import Leases
from mpsd.daemon.leases.quarantine import Quarantine
from mpsd.daemon.node import holder_check
from mpsd.daemon.record.log import Logger
from mpsd.system.process import Process


class ClaimTaking:
    """Has claims taken, and applies the refusals of a grant."""

    def __init__(
        self,
        leases: Leases,
        settings: LiveSettings,
        daemons: Path,
        quarantine: Quarantine,
        *,
        offers: Callable[[], Sequence[Offer]],
        log: Logger,
    ) -> None:
        """Take the node's parts; `daemons` is the directory of the control sockets."""
        self._leases = leases
        self._settings = settings
        self._daemons = daemons
        self._quarantine = quarantine
        self._offers = offers
        self._log = log

    async def take(self, lease_id: str, owner: Owner, named: NamedHolder, user: UserIdentity) -> Lease:
        """Let a holder take the claim of a lease for its owner, as if that owner had requested the lease.

        Raises what `Claims.take` does, QuotaError, QuarantinedError, and NotPermittedError for a uid that the claim is
        not for, or that cannot be a client.
        """
        limits_of = quota.quota_of(user, self._settings.current)
        try:
            ttl = quota.time_to_live(limits_of, self._leases.claims.granted(lease_id).ttl)
            taken = self._leases.claims.take(
                lease_id, named, owner, ttl, lambda lease: self._check(lease, owner, named, user)
            )
            return await taken
        except MpsdError as refusal:
            self._leases.record_refusal(owner, refusal)
            raise

    def _check(self, lease: Lease, owner: Owner, named: NamedHolder, user: UserIdentity) -> None:
        uid, claim = owner.uid, claim_of(lease)
        if claim is not None and claim.uid is not None and claim.uid != uid:
            raise NotPermittedError(
                f"lease {lease.id} was claimed for uid {claim.uid}, and its holder belongs to uid {uid}",
                hint=f"start it as uid {claim.uid}, or claim a lease for uid {uid}",
            )
        self._quarantine.check(uid)
        holder_check.check(uid, self._daemons)
        if isinstance(named.watched, Process):
            self._check_visibility(lease, named.watched)
        if lease.owner.uid == uid:
            return  # the lease has counted against the quota since the claim was made
        limits_of = quota.quota_of(user, self._settings.current)
        ledger = self._leases.ledger
        worth = ledger.worth(lease.request) if quota.weighs(limits_of) else Amount()
        quota.check(limits_of, ledger.user(uid), lease.request, worth)
        for share in lease.shares:
            if limits_of.gpus is not None and share.gpu not in limits_of.gpus:
                raise QuotaError(
                    f"lease {lease.id} is on GPU {share.gpu}, which the quota of uid {uid} does not include",
                    hint=f"claim a lease for uid {uid}: it is placed where its quota allows",
                    limit="quota.gpus",
                )

    def _check_visibility(self, lease: Lease, process: Process) -> None:
        """Refuse a process that does not see a pipe directory of the lease. Raises NotPermittedError."""
        offers = self._offers()
        for share in lease.shares:
            mount_visibility.narrowed(structs.replace(lease.request, gpu=share.gpu), process, offers, self._log)
