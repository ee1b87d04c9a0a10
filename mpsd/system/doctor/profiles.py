"""The machine as a configuration has to fit it: GPUs, control program, and the group of administrators."""

from dataclasses import replace
from typing import Final

from mpsd.core.configuration.profiles import Machine
from mpsd.core.errors import NotFoundError
from mpsd.core.model import Known
from mpsd.core.settings import Roles, Settings
from mpsd.system.doctor import gpus
from mpsd.system.host.configuration import with_names

_ADMINISTRATORS: Final = ("sudo", "wheel", "admin")
"""The groups of users who may become root: of Debian, of Red Hat and others, and of older Ubuntus."""


async def look(settings: Settings, group: str | None = None) -> Machine:
    """Inspect this machine with the driver that these settings name; an absent driver is no error.

    Raises NotFoundError where the machine lacks a group that is named.
    """
    wanted = _ADMINISTRATORS if group is None else (*_ADMINISTRATORS, group)
    asked = replace(Settings(), roles=Roles(admins=tuple(f"%{each}" for each in wanted)))
    known = (await with_names(asked)).names.gids
    if group is not None and group not in known:
        raise NotFoundError(f"there is no group {group}", hint=f"create it: groupadd {group}; or name another")
    seen = await gpus.look(settings, None, simulated=False)
    return Machine(
        gpus=tuple(each.gpu for each in seen.node.value.gpus) if isinstance(seen.node, Known) else (),
        many_users=seen.many_users.value if isinstance(seen.many_users, Known) else None,
        administrators=next((each for each in _ADMINISTRATORS if each in known), ""),
    )
