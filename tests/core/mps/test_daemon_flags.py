"""The flags of a control daemon: mpsd recognises its own daemons by them, and no others."""

import pytest

from mpsd.core.mps.daemon_flags import BACKGROUND, BY_USERS, FOREGROUND, MANY_USERS, is_daemon, users_of
from mpsd.core.settings import Users

PROGRAMS = (("/usr/bin/nvidia-cuda-mps-control",), ("/usr/bin/python3", "-I", "-S", "control.py", "--driver", "550"))


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("users", BY_USERS)
def test_what_mpsd_starts(program: tuple[str, ...], users: Users) -> None:
    """A control daemon of mpsd's is recognised by its flags, which also say whether it serves one user or many."""
    arguments = (*program, *BY_USERS[users])
    assert is_daemon(arguments)
    assert users_of(arguments) is users


@pytest.mark.parametrize(
    "flags",
    [
        (),
        (BACKGROUND,),
        (BACKGROUND, FOREGROUND, MANY_USERS, "-S"),
        (FOREGROUND, "-S"),
        (FOREGROUND, MANY_USERS, MANY_USERS),
        (MANY_USERS,),
        (MANY_USERS, BACKGROUND),
    ],
)
def test_what_others_start(flags: tuple[str, ...]) -> None:
    """A control daemon with other flags, and a front-end, are not mpsd's."""
    assert users_of((*PROGRAMS[0], *flags)) is None
    assert is_daemon((*PROGRAMS[0], *flags)) == bool({FOREGROUND, BACKGROUND} & {*flags})
