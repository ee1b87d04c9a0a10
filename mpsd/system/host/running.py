"""The mpsd that uses a runtime directory now, found as the holder of its lock, and how it is ended."""

import os
import signal
from pathlib import Path
from typing import Final

from mpsd.core.errors import AlreadyRunningError, NotPermittedError
from mpsd.system.processes import file_locks, proc, process

_UNIT: Final = "mpsd.service"


async def end(runtime_dir: Path) -> None:
    """End the mpsd of a runtime directory, and return when it is gone; at once where there is none.

    Raises NotPermittedError where it belongs to another user, and AlreadyRunningError where systemd runs it, since
    systemd would start it again.
    """
    for identity in file_locks.holders(runtime_dir / "mpsd.lock"):
        living = process.adopt(identity)
        if living is None:
            continue
        try:
            if identity not in file_locks.holders(runtime_dir / "mpsd.lock"):
                continue
            if any(f"/{_UNIT}" in path for path in proc.control_groups(identity.pid).values()):
                raise AlreadyRunningError(
                    f"mpsd runs as a service of systemd (pid {identity.pid})",
                    hint="stop it, and its control daemons once they have no clients: systemctl start"
                    " mpsd-stop-daemons.service",
                )
            living.signal(signal.SIGTERM)
            await living.wait()
        except PermissionError:
            raise NotPermittedError(
                f"mpsd runs as another user (pid {identity.pid}), and uid {os.getuid()} may not end it",
                hint="use sudo mpsd stop",
            ) from None
        finally:
            living.close()
