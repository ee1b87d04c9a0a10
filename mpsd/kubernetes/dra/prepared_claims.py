"""The claims that kubelet prepared, on disk: the driver's record of each, and its CDI devices."""

import contextlib
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from msgspec import Struct

from mpsd.core.containers.cdi import Program
from mpsd.core.dra import prepared
from mpsd.core.dra.prepared import VERSION, PreparedClaim
from mpsd.core.errors import StorageError
from mpsd.kubernetes.log import EventName, Log
from mpsd.system.files import cdi_directory, encoding
from mpsd.system.files.encoding import DamagedError

_SUFFIX: Final = ".json"


@contextlib.contextmanager
def _storing(failure: str, hint: str) -> Iterator[None]:
    """Raise StorageError for an operation on files that fails."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{failure}: {error.strerror}", hint=f"{hint}; kubelet tries again") from None


class _Version(Struct):
    """What records of all releases have."""

    version: int


class PreparedStore:
    """The records by uid: one file for each, in the driver's own directory. Any thread may call.

    Only root can read them. Each is whole or absent, also after a loss of power, because kubelet does not repeat them.

    A record that cannot be read, for example one of another release, stands for a claim all the same: its pods keep
    their leases and CDI devices until kubelet ends the claim, or prepares it anew.
    """

    def __init__(self, directory: Path, log: Log) -> None:
        """Read the claims that an earlier process stored. Raises OSError."""
        self._directory = directory
        self._lock = threading.Lock()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.chmod(0o700)
        self._claims: dict[str, PreparedClaim] = {}
        self._unreadable = set[str]()
        for path in sorted(directory.glob(f"*{_SUFFIX}")):
            try:
                claim = _read(path)
            except DamagedError as error:
                self._unreadable.add(path.stem)
                hint = "its pods keep their leases, and no lost one is replaced: delete the pods when they are done"
                log.error(EventName.CLAIM_UNREADABLE, file=str(path), because=str(error), hint=hint)
            else:
                self._claims[claim.uid] = claim

    def get(self, uid: str) -> PreparedClaim | None:
        """Return a claim; None where it is not prepared."""
        return self._claims.get(uid)

    def all(self) -> list[PreparedClaim]:
        with self._lock:
            return list(self._claims.values())

    def unreadable(self) -> set[str]:
        """Return the uids of claims whose records cannot be read."""
        with self._lock:
            return {*self._unreadable}

    def put(self, claim: PreparedClaim) -> None:
        """Store a claim; it is on the disk when this returns. Raises StorageError and then changes nothing."""
        with self._lock:
            with _storing(
                f"what was prepared cannot be stored in {self._directory}", "see its disk and its permissions"
            ):
                encoding.store(self._path(claim.uid), claim, lasting=True)
            self._claims[claim.uid] = claim
            self._unreadable.discard(claim.uid)

    def remove(self, uid: str) -> None:
        """Forget a claim. Raises StorageError."""
        with self._lock:
            with _storing(
                f"what was prepared cannot be stored in {self._directory}", "see its disk and its permissions"
            ):
                self._path(uid).unlink(missing_ok=True)
            self._claims.pop(uid, None)

    def _path(self, uid: str) -> Path:
        return self._directory / f"{uid}{_SUFFIX}"


def _read(path: Path) -> PreparedClaim:
    """Read a record. Raises DamagedError, also for one of another version."""
    version = encoding.read(path, _Version)
    if version is None or version.version != VERSION:
        found = "none" if version is None else version.version
        raise DamagedError(f"it has version {found}, and this release of mpsd-kubernetes reads version {VERSION}")
    claim = encoding.read(path, PreparedClaim)
    if claim is None or path.stem != claim.uid:
        raise DamagedError("it is the record of another claim than its name says")
    return claim


class CdiDevices:
    """The CDI devices of prepared claims, through which containers get their leases: one file for each claim."""

    def __init__(self, directory: Path, driver: str) -> None:
        self._directory, self._driver = directory, driver

    def put(self, claim: str, content: bytes) -> None:
        """Write the devices of a claim. Raises StorageError."""
        with _storing(f"the CDI device cannot be written to {self._directory}", "see cdi_dir"):
            cdi_directory.put(self._directory, prepared.device_file(self._driver, claim), content)

    def exist(self, claim: str) -> bool:
        return (self._directory / prepared.device_file(self._driver, claim)).exists()

    def remove(self, claim: str) -> None:
        """Remove the devices of a claim, if there are any. Raises StorageError."""
        with _storing(f"the CDI device cannot be removed from {self._directory}", "see cdi_dir"):
            (self._directory / prepared.device_file(self._driver, claim)).unlink(missing_ok=True)

    def remove_all_but(self, claims: Collection[str], program: Program | None, *, unreadable: Collection[str]) -> None:
        """Remove the devices of other claims, and those that do not call this program as their hook. Raises OSError.

        The record of another claim was lost, and its leases are released. What has an `unreadable` record stays.
        """
        for path in sorted(self._directory.glob(prepared.device_file(self._driver, "*"))):
            claim = prepared.claim_of_file(self._driver, path.name)
            if claim in unreadable or (claim in claims and prepared.has_hook(path.read_bytes(), program)):
                continue
            path.unlink(missing_ok=True)
