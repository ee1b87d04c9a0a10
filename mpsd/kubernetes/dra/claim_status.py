"""The thread that writes what became of a claim's shares into the claim's status, for `kubectl describe`.

Nothing waits for it, and what cannot be written is logged once and lost: kubelet's events and the log have it too.
Where the service account has no right to it, which is so before Kubernetes 1.36, no further claim is tried.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from mpsd.core.dra import claim_status
from mpsd.core.dra.claim_status import Verdict
from mpsd.core.dra.prepared import PreparedClaim
from mpsd.core.errors import MpsdError, NotFoundError, NotPermittedError
from mpsd.kubernetes.api_server import ApiServer, ConflictError, Document
from mpsd.kubernetes.log import EventName
from mpsd.kubernetes.mpsd_client import LeaseAnswer
from mpsd.kubernetes.parts import Part, Program
from mpsd.system import clock

_PAUSE: Final = 0.5
"""Minimum seconds from one write to the next."""


class _Said(NamedTuple):
    leases: Sequence[str]
    verdict: Verdict
    document: Document


class ClaimStatus(Part):
    """Writes the status of claims. Any thread may call `note` and `forget`."""

    def __init__(self, program: Program, api_server: ApiServer, told: Callable[[MpsdError], str]) -> None:
        """`told` puts an error in words for users."""
        super().__init__(program)
        self._api_server, self._told = api_server, told
        self._lock = threading.Lock()
        self._said: dict[str, _Said] = {}
        """The latest of each prepared claim, by uid."""
        self._unwritten = dict[str, None]()
        self._has_new = threading.Event()

    def note(
        self, claim: PreparedClaim, leases: Sequence[LeaseAnswer] | None = None, error: MpsdError | None = None
    ) -> None:
        """Say of a claim that it has these leases, or those that it had, or why it cannot use them."""
        message = "" if error is None else self._told(error)
        with self._lock:
            before = self._said.get(claim.uid)
            ids = [each["id"] for each in leases] if leases is not None else before.leases if before else []
            found = claim_status.verdict(error, message, clock.now(), before and before.verdict)
            document = claim_status.document(claim, self._settings.domain, ids, found)
            if before is None or before.document != document:
                self._said[claim.uid] = _Said(ids, found, document)
                self._unwritten[claim.uid] = None
                self._has_new.set()

    def forget(self, claim: str) -> None:
        """Say nothing more of a claim: Kubernetes removes what was said of its devices."""
        with self._lock:
            self._said.pop(claim, None)
            self._unwritten.pop(claim, None)

    def run(self) -> None:
        while not self._ended.wait(_PAUSE):
            if not self._has_new.wait(1.0) or (document := self._next()) is None:
                continue
            try:
                self._api_server.apply_claim_status(document, self._settings.domain)
            except NotFoundError:
                pass  # the claim was deleted
            except NotPermittedError as error:
                self._log.warning(EventName.CLAIM_STATUS_NOT_WRITTEN, error)
                self._ended.wait()
            except (MpsdError, ConflictError) as error:
                if self._log.is_new("claim status", str(error)):
                    self._log.warning(EventName.CLAIM_STATUS_NOT_WRITTEN, because=str(error))

    def _next(self) -> Document | None:
        with self._lock:
            uid = next(iter(self._unwritten), None)
            if uid is None:
                self._has_new.clear()
                return None
            del self._unwritten[uid]
            return self._said[uid].document
