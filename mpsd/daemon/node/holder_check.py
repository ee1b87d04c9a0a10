"""Whether a holder can be a client of MPS at all. If it cannot, its programs would run outside MPS, without limits."""

import os
from pathlib import Path

from mpsd.core.errors import NotPermittedError
from mpsd.system import capabilities, rundir


def check(uid: int, daemons: Path) -> None:
    """Refuse a holder whose uid cannot have a server, or cannot reach the control sockets in this directory.

    Raises NotPermittedError.
    """
    if uid in {0, os.geteuid()}:
        return
    if not capabilities.can_serve_users():
        raise NotPermittedError(
            f"uid {uid} cannot have a server: mpsd has no CAP_SETUID, so it would be root's, or none",
            hint="ask an administrator to give mpsd CAP_SETUID",
        )
    closed = rundir.closed_to_others(daemons)
    if closed is not None:
        raise NotPermittedError(
            f"uid {uid} cannot reach the control daemons: it may not traverse {closed}",
            hint=f"ask an administrator to run: chmod o+x {closed}",
        )
