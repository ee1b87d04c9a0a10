"""The leases of the claims' shares, and the CDI devices through which containers get them."""

from collections.abc import Collection
from pathlib import Path

from mpsd.core.dra import cdi_devices, prepared
from mpsd.core.dra.prepared import PreparedClaim, PreparedShare, ShareLease
from mpsd.core.errors import DaemonNotReadyError, StorageError
from mpsd.core.kubernetes import claims
from mpsd.core.kubernetes.devices import Gpu
from mpsd.core.kubernetes.settings import GpuDevices, Settings
from mpsd.kubernetes import answers
from mpsd.kubernetes.board import Board
from mpsd.kubernetes.mpsd_client import LeaseAnswer, Mpsd
from mpsd.system import clock
from mpsd.system.files import cdi_directory


class ShareLeases:
    """The leases of all shares. mpsd stores them, and no second record here can contradict it."""

    def __init__(self, settings: Settings, mpsd: Mpsd, board: Board) -> None:
        self._settings = settings
        self._mpsd = mpsd
        self._board = board
        self._directory = Path(settings.cdi_dir)

    def all(self) -> list[ShareLease]:
        """Return the leases that have not ended."""
        return [found for each in self._mpsd.leases() if (found := _share_lease(each)) is not None]

    def ensure(self, claim: PreparedClaim) -> list[LeaseAnswer]:
        """Make sure that each share of a claim has a lease, write the CDI device, and return the leases.

        Raises MpsdError.
        """
        living = {each.number: each.lease for each in self.all() if each.claim == claim.uid}
        leases = [
            self._mpsd.lease(living[number]) if number in living else self._claim(claim, number, share)
            for number, share in enumerate(claim.shares)
        ]
        content = cdi_devices.encoded(
            claim.uid,
            [each["env"] for each in leases],
            shared_memory=[answers.shares_memory(self._gpu(each.gpu), self._settings) for each in claim.shares],
            more=[self._more(each) for each in claim.shares],
            socket=self._settings.socket,
            hook=self._settings.hook,
        )
        try:
            cdi_directory.put(self._directory, cdi_devices.file_name(claim.uid), content)
        except OSError as error:
            raise StorageError(
                f"the CDI device cannot be written to {self._directory}: {error.strerror}",
                hint="see cdi_dir; kubelet tries again",
            ) from None
        return leases

    def has_device(self, claim: str) -> bool:
        """Tell whether the CDI device of a claim exists."""
        return (self._directory / cdi_devices.file_name(claim)).exists()

    def remove_unknown_devices(self, claims: Collection[str]) -> None:
        """Remove the CDI devices of all other claims: their record was lost, and their leases are released."""
        for path in sorted(self._directory.glob(cdi_devices.file_name("*"))):
            if cdi_devices.claim_of(path.name) not in claims:
                path.unlink(missing_ok=True)

    def remove_device(self, claim: str) -> None:
        """Remove the CDI device of a claim, if there is one. Raises StorageError."""
        try:
            (self._directory / cdi_devices.file_name(claim)).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(
                f"the CDI device cannot be removed from {self._directory}: {error.strerror}", hint="see cdi_dir"
            ) from None

    def _gpu(self, uuid: str) -> Gpu:
        found = self._board.gpus.get(uuid)
        if found is None:
            raise DaemonNotReadyError(f"mpsd does not show GPU {uuid}", hint="see mpsctl gpus on the node")
        return found

    def _more(self, share: PreparedShare) -> dict[str, str]:
        if self._settings.gpu_devices is GpuDevices.ENVIRONMENT:
            return {"NVIDIA_VISIBLE_DEVICES": share.gpu}
        return {}

    def _claim(self, claim: PreparedClaim, number: int, share: PreparedShare) -> LeaseAnswer:
        """Claim a lease for a share; a repeated call returns the same lease."""
        settings = self._settings
        user = settings.uid if share.user is None else share.user
        processes = settings.processes if share.processes is None else share.processes
        held: dict[str, object] = {"deadline": settings.claim_deadline}
        if user is not None:
            held["uid"] = user
        request: dict[str, object] = {
            "threads": share.tenths / 10,
            "memory": f"{share.mebibytes}MiB",
            "gpu": share.gpu,
            "processes": "any" if processes is None else processes,
            "wait": settings.wait,
            "name": f"{claim.namespace}/{claim.name}"[:128],
            "labels": {"kubernetes/claim": claim.uid, "kubernetes/request": share.request[:128]},
            "holder": {"claim": held},
            "request_id": prepared.request_id(claim.uid, number),
        }
        if share.client_priority is not None:
            request["client_priority"] = share.client_priority
        if share.stop is not None:
            request["stop"] = share.stop
        return self._mpsd.admit(request, settings.wait)


def _share_lease(lease: LeaseAnswer) -> ShareLease | None:
    """Return a lease as that of a share; None for any other lease: any user may choose a request_id."""
    share, held = prepared.share_of(lease["request_id"]), claims.held(lease["holders"], clock.now())
    if share is None or held is None:
        return None
    return ShareLease(
        lease["id"],
        *share,
        pod=held.pod,
        group=held.group,
        uid=lease["owner"]["uid"],
        left=held.left,
        has_clients=bool(lease["clients"]),
    )
