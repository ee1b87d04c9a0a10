"""The flags that a control program knows, asked of the program itself: no version says it for certain.

No question starts a control daemon, and each names a pipe directory that cannot exist.
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from mpsd.core.errors import ConfigurationError
from mpsd.core.gpus import serve_many_users
from mpsd.core.model import Gpu, Known, Reading, Unknown
from mpsd.core.mps.daemon_flags import MANY_USERS
from mpsd.core.settings import Settings, Users
from mpsd.system.mps.control_pipe import ControlProgram, variables
from mpsd.system.processes import process

_UNKNOWN_FLAG: Final = "-mpsd-asks"
"""A flag that no control program has."""

_USAGE: Final = "manual page"
"""A text in the usage of each control program (measured on 470 to 580) that none of its other outputs contains."""

_SECONDS: Final = 5.0


async def knows_many_users(program: ControlProgram) -> Reading[bool]:
    """Tell whether a control program knows -multiuser-server.

    The usage of 580 lists its flags. That of older programs does not. 555 answers a flag that it does not know with its
    usage, and one that it knows like a call without flags. 470, 535 and 550 ignore any flag, do not know this one, and
    take `-f` together with another flag for a call of a front-end, so that no control daemon starts (all measured).
    """
    try:
        if MANY_USERS in await _answer(program, "-h"):
            return Known(value=True)
        checks_flags = _USAGE in await _answer(program, _UNKNOWN_FLAG)
        return Known(checks_flags and _USAGE not in await _answer(program, MANY_USERS))
    except (OSError, TimeoutError) as error:
        return Unknown(f"{program.argv[0]} cannot be asked which flags it knows: {error}")


def many_users_can(gpus: Iterable[Gpu]) -> bool:
    """Tell whether a control daemon of this process could serve several users on these GPUs, if its program can.

    Only root can become other users.
    """
    return os.geteuid() == 0 and serve_many_users(gpus)


async def check(program: ControlProgram, settings: Settings, *, can: bool = True) -> Settings:
    """Return the settings with what `auto` means for this control program as `daemon.users`.

    `can` tells whether it could serve several users otherwise, as `many_users_can` does. Raises ConfigurationError
    for `many` where the program does not know it.
    """
    if settings.daemon.users is Users.AUTO:
        users = Users.MANY if can and await knows_many_users(program) == Known(value=True) else Users.ONE
        return replace(settings, daemon=replace(settings.daemon, users=users))
    if settings.daemon.users is Users.MANY and await knows_many_users(program) == Known(value=False):
        raise ConfigurationError(
            f'daemon.users = "many" needs {MANY_USERS}, which {program.argv[0]} does not know: with it, no control'
            " daemon would start",
            hint='set daemon.users = "one", or install driver 555 or newer',
            limit="daemon.users",
        )
    return settings


async def _answer(program: ControlProgram, flag: str) -> str:
    environment = process.environment(variables(Path(os.devnull), Path(os.devnull)), path=program.directories)
    done = await process.run((*program.argv, flag), env=environment, stdin=b"", seconds=_SECONDS)
    if done.returncode is None:
        raise TimeoutError(f"it did not end within {_SECONDS:g} s")
    return done.output
