"""The claims that kubelet prepared, on disk: one file for each, in the driver's own directory.

Only root can read them. Each is whole or absent, also after a loss of power, because kubelet does not repeat them.
"""

import threading
from pathlib import Path
from typing import Final

from mpsd.core.dra.prepared import VERSION, PreparedClaim
from mpsd.core.errors import StorageError
from mpsd.kubernetes.log import EventName, Log
from mpsd.system.files import encoding
from mpsd.system.files.encoding import DamagedError

_SUFFIX: Final = ".json"


class PreparedStore:
    """The prepared claims, by uid. Any thread may call."""

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
