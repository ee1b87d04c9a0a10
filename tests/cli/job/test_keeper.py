"""What the keeper of a job waits for, and where its directory is."""

import os
import time
from pathlib import Path
from socket import AF_UNIX, SOCK_SEQPACKET, socketpair

import pytest

from mpsd.cli.commands.job import _names_mpsctl
from mpsd.cli.job import place
from mpsd.cli.job.keeper import Keeper, _Group, _Member
from mpsd.core.mps_facts import CONTROL_PATH_BYTES


def test_sleeps_while_probes_start(short_tmp: Path) -> None:
    """Until every probe has its answer there is nothing to look for."""
    ours, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
    keeper, member = Keeper(short_tmp), _Member(ours)
    now = time.monotonic()
    group = _Group(1, 60.0, False, [member], phase="probing", until=now + 60, next_look=now)
    keeper._groups = [group]
    assert min(keeper._times()) == group.until
    member.probe = {"ok": True}
    assert min(keeper._times()) == group.next_look
    keeper._listener.close()
    ours.close()
    theirs.close()


def test_ranks_below_a_launcher_have_a_deadline(short_tmp: Path) -> None:
    """The command around the launcher runs, and is rarely looked at; its ranks are late on time all the same."""
    keeper, now = Keeper(short_tmp), time.monotonic()
    outer = _Group(1, 60.0, True, phase="running", until=now, next_look=now + 15)
    ranks = _Group(2, 5.0, False, until=now + 5)
    keeper._groups = [outer, ranks]
    assert min(keeper._times()) == ranks.until
    keeper._listener.close()


def test_dead_rank_is_not_waited_for(short_tmp: Path) -> None:
    """Where a rank ended before all had come, the keeper waits for those that had not."""
    pairs = [socketpair(AF_UNIX, SOCK_SEQPACKET) for _ in range(2)]
    keeper, members = Keeper(short_tmp), [_Member(ours) for ours, _ in pairs]
    for rank, member in enumerate(members):
        member.request = {"rank": rank}
    keeper._members, keeper._groups = [*members], [_Group(3, 60.0, False, [*members])]
    keeper._lose(members[0])
    assert keeper._missing == {2}
    for each in (keeper._listener, *(end for pair in pairs for end in pair)):
        each.close()


def test_long_directory(short_tmp: Path) -> None:
    """One in which no socket of a control daemon could have its name is passed over."""
    base = short_tmp / ("x" * (CONTROL_PATH_BYTES - len(os.fsencode(short_tmp))))
    base.mkdir()
    assert place.directory("j", {"TMPDIR": f"{base}"}).parent == Path("/tmp")
    assert place.directory("j", {"TMPDIR": f"{short_tmp}"}).parent == short_tmp


def test_closed_directory(short_tmp: Path) -> None:
    """MPSD_JOB may come from another user's job, by sudo."""
    closed = short_tmp / "closed"
    closed.mkdir(mode=0)
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        assert place.connect(closed / "job") is None
    finally:
        os.seteuid(user)


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["mpirun", "-n", "8", "/opt/bin/mpsctl", "job", "--", "./app"], True),
        (["sh", "-c", "prepare; mpirun  mpsctl  job -- ./app"], True),
        (["mpirun", "mpsctl", "status"], False),
    ],
)
def test_names_mpsctl(command: list[str], *, named: bool) -> None:
    assert _names_mpsctl(command) is named
