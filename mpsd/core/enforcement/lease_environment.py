"""The variables by which a process names its lease.

MPSD_LEASE names a lease and is no secret. MPSD_LEASE_TOKEN is one: only a lease's owner and administrators get it, in
answers about that lease alone, and it is in no list, event, log or text for display (`SECRETS`).
"""

from typing import Final

from mpsd.core.sanitize import SECRETS

LEASE: Final = "MPSD_LEASE"
(TOKEN,) = SECRETS

TOKEN_BYTES: Final = 16
"""Bytes of a token: 128 bits cannot be guessed."""
