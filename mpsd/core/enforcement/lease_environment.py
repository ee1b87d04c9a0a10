"""The variables by which a process says whose it is.

MPSD_LEASE names a lease and is no secret. MPSD_LEASE_TOKEN is one: only a lease's owner and administrators are given
it, in answers about that lease alone, and it stands in no list, no event, no log and no text for people (`SECRETS`).
"""

from typing import Final

from mpsd.core.sanitize import SECRETS

LEASE: Final = "MPSD_LEASE"
(TOKEN,) = SECRETS

TOKEN_BYTES: Final = 16
"""128 bits, which nobody guesses."""
