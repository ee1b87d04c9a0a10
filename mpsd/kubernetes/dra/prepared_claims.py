"""The claims that kubelet prepared: the driver's record of each, the leases of its shares, and its CDI devices."""

import threading
from collections.abc import Collection
from pathlib import Path
from typing import Final

from mpsd.core.dra import prepared
from mpsd.core.dra.prepared import VERSION, PreparedClaim, PreparedShare, ShareLease
from mpsd.core.errors import DaemonNotReadyError, StorageError
from mpsd.core.kubernetes import claims, devices
from mpsd.core.kubernetes.devices import Gpu
from mpsd.core.kubernetes.settings import GpuDevices, Settings
from mpsd.kubernetes.board import Board
from mpsd.kubernetes.log import EventName, Log
from mpsd.kubernetes.mpsd_client import LeaseAnswer, Mpsd
from mpsd.system import clock
from mpsd.system.files import cdi_directory, encoding
from mpsd.system.files.encoding import DamagedError

_SUFFIX: Final = ".json"


class PreparedStore:
    """The prepared claims by uid, on disk: one file for each, in the driver's own directory. Any thread may call.

    Only root can read them. Each is whole or absent, also after a loss of power, because kubelet does not repeat them.
    """

    def __init__(self, directory: Path, log: Log) -> None:
        """Read the claims that an earlier process stored. Raises OSError."""
        self._directory = directory
        self._lock = threading.Lock()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.chmod(0o700)
        self._claims: dict[str, PreparedClaim] = {}
        for path in sorted(directory.glob(f"*{_SUFFIX}")):
            try:
                claim = encoding.read(path, PreparedClaim)
            except DamagedError as error:
                log.error(
                    EventName.CLAIM_UNREADABLE,
                    file=str(path),
                    because=str(error),
                    hint="its leases end with their pods; remove the file",
                )
                continue
            if claim is not None and claim.version == VERSION and path.name == f"{claim.uid}{_SUFFIX}":
                self._claims[claim.uid] = claim

    def get(self, uid: str) -> PreparedClaim | None:
        """Return a claim; None where it is not prepared."""
        return self._claims.get(uid)

    def all(self) -> list[PreparedClaim]:
        with self._lock:
            return list(self._claims.values())

    def put(self, claim: PreparedClaim) -> None:
        """Store a claim; it is on the disk when this returns. Raises StorageError and then changes nothing."""
        with self._lock:
            try:
                encoding.store(self._path(claim.uid), claim, lasting=True)
            except OSError as error:
                raise self._failed(error) from None
            self._claims[claim.uid] = claim

    def remove(self, uid: str) -> None:
        """Forget a claim. Raises StorageError."""
        with self._lock:
            try:
                self._path(uid).unlink(missing_ok=True)
            except OSError as error:
                raise self._failed(error) from None
            self._claims.pop(uid, None)

    def _path(self, uid: str) -> Path:
        return self._directory / f"{uid}{_SUFFIX}"

    def _failed(self, error: OSError) -> StorageError:
        return StorageError(
            f"what was prepared cannot be stored in {self._directory}: {error.strerror}",
            hint="see its disk and its permissions; kubelet tries again",
        )


class ShareLeases:
    """The leases of all shares, and the CDI devices through which containers get them.

    mpsd stores the leases, and no second record here can contradict it.
    """

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
        content = prepared.device_document(
            claim.uid,
            [each["env"] for each in leases],
            shared_memory=[devices.shares_memory(self._gpu(each.gpu), self._settings) for each in claim.shares],
            more=[self._more(each) for each in claim.shares],
            socket=self._settings.socket,
            hook=self._settings.hook,
        )
        try:
            cdi_directory.put(self._directory, prepared.device_file(claim.uid), content)
        except OSError as error:
            raise StorageError(
                f"the CDI device cannot be written to {self._directory}: {error.strerror}",
                hint="see cdi_dir; kubelet tries again",
            ) from None
        return leases

    def has_device(self, claim: str) -> bool:
        """Tell whether the CDI device of a claim exists."""
        return (self._directory / prepared.device_file(claim)).exists()

    def remove_unknown_devices(self, claims: Collection[str]) -> None:
        """Remove the CDI devices of all other claims: their record was lost, and their leases are released."""
        for path in sorted(self._directory.glob(prepared.device_file("*"))):
            if prepared.claim_of_file(path.name) not in claims:
                path.unlink(missing_ok=True)

    def remove_device(self, claim: str) -> None:
        """Remove the CDI device of a claim, if there is one. Raises StorageError."""
        try:
            (self._directory / prepared.device_file(claim)).unlink(missing_ok=True)
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
