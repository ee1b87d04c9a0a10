"""Users' typing mistakes: each is answered by one sentence that says what to type, and changes nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT, mpsctl_as_nobody
from tests.disks import as_root, mounted
from tests.node import Node

SHARE = ("--threads", "10", "--memory", "1GiB")

MISTAKES = {
    "a command": (["stauts"], 2, "Did you mean status"),
    "no command at all": (["frobnicate"], 2, "See: mpsctl --help"),
    "an option": (["admit", "--treads", "10"], 2, "No such option"),
    "two GPUs": (["admit", "--gpu", "0", "--gpu", "1", *SHARE], 2, "it takes one value, and was given 0 and 1"),
    "no percentage": (["admit", "--threads", "a quarter", "--memory", "1GiB"], 2, "give a number such as 25, or 25%"),
    "no time": (["admit", *SHARE, "--ttl", "0"], 2, "such as 90s, 10m or 2h"),
    "an unknown time": (["admit", *SHARE, "--wait", "1 week"], 2, "such as 90s, 10m or 2h, or forever"),
    "time before now": (["drain", "gpu0", "--timeout=-5"], 2, "give 0, a number of seconds above 0, or"),
    "too long a time": (["admit", *SHARE, "--ttl", "10000000h"], 2, "give at most 11574d"),
    "a hint of mpsd": (["admit", *SHARE, "--processes", "0"], 2, "from 1 to 1000, or any\n"),
    "an empty lease": (["release", "--end-clients", ""], 2, "'[LEASE]...': it is empty; if a variable"),
    "an empty lease beside others": (["show", "lease-nobody-has", ""], 2, "'[LEASE]...': it is empty"),
    "an empty subject": (["explain", ""], 2, "'LEASE|DAEMON|GPU': it is empty"),
    "an empty daemon": (["drain", ""], 2, "'[DAEMON]': it is empty"),
    "an empty daemon of a canary": (["verify", "--canary", ""], 2, "'--canary': it is empty"),
    "an empty GPU": (["admit", *SHARE, "--gpu", ""], 2, "'--gpu': it is empty"),
    "an empty lease of a command below another": (["cdi", "remove", ""], 2, "'LEASE': it is empty"),
}
"""The input, with its exit status and the text of the answer."""


@pytest.mark.parametrize("arguments, status, says", MISTAKES.values(), ids=MISTAKES)  # noqa: PT006 - a line each
def test_mistakes(node: Node, arguments: list[str], status: int, says: str) -> None:
    """A mistake is answered on stderr, with the correct input."""
    done = node.mpsctl(*arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert says in done.stderr, done.stderr
    assert node.leases() == []


SIXTY = ("--threads", "60", "--memory", "1GiB")


def test_what_is_left_elsewhere(node: Node) -> None:
    """The refusal of a request that names a GPU mentions another one with room, if there is one."""
    assert node.mpsctl("admit", *SIXTY, "--gpu", "0").returncode == 0
    done = node.mpsctl("admit", *SIXTY, "--gpu", "0")
    assert done.returncode == 75
    assert "(--gpu any)" in done.stderr
    assert node.mpsctl("admit", *SIXTY, "--gpu", "1").returncode == 0
    for arguments in ((*SIXTY, "--gpu", "0"), SIXTY):
        done = node.mpsctl("admit", *arguments)
        assert done.returncode == 75
        assert "(--gpu any)" not in done.stderr
        assert "wait for it (--wait)" in done.stderr


def test_after_having_waited(node: Node) -> None:
    """A wait that timed out is answered with the hint to wait longer, not to wait."""
    for gpu in ("0", "1"):
        assert node.mpsctl("admit", *SIXTY, "--gpu", gpu).returncode == 0
    done = node.mpsctl("admit", *SIXTY, "--wait", "0.2")
    assert done.returncode == 75
    assert "[does_not_fit]" in done.stderr
    assert "wait longer (--wait)" in done.stderr


def test_more_than_a_quota(make_node: Callable[..., Node]) -> None:
    """An amount that a quota never allows is answered with who can change the quota, not with a release."""
    node = make_node(config='[quota."*"]\nthreads = 10\n').start()
    done = node.mpsctl("admit", "--threads", "20", "--memory", "1GiB")
    assert (done.returncode, done.stdout) == (77, "")
    assert "[quota]" in done.stderr
    assert "hint: request less, or ask an administrator to raise quota." in done.stderr


@pytest.mark.root("call as another user")
def test_what_a_user_may_do(node: Node) -> None:
    """A user whose GPU is held first reads what a user may do."""
    assert node.mpsctl("hold", "--all").returncode == 0
    try:
        done = mpsctl_as_nobody(node, "run", *SHARE, "--", "true")
        assert "hint: request another GPU, or wait until that has changed (--wait): only an operator" in done.stderr
        done = node.mpsctl("admit", *SHARE)
        assert "mpsctl resume gpu" in done.stderr
    finally:
        assert node.mpsctl("resume", "--all").returncode == 0


TENTHS = "0.15 % is taken as 0.1 %: MPS knows tenths of a percent"


@pytest.mark.parametrize(
    ("threads", "granted", "note"),
    [
        ("25%", 25.0, ""),
        ("1", 1.0, ""),
        ("0.5", 0.5, "half a percent; half of the GPU is --fraction 0.5"),
        ("33.3333 %", 33.3, "33.3333 % is taken as 33.3 %: MPS knows tenths of a percent"),
        ("0.15", 0.1, f"{TENTHS}\nmpsctl: 0.15 of a percent; 0.15 of the GPU is --fraction 0.15"),
        ("0.3", 0.3, "0.3 of a percent; 0.3 of the GPU is --fraction 0.3"),
    ],
)
def test_percentages(node: Node, threads: str, granted: float, note: str) -> None:
    """A percentage may have its sign; one below 1, or finer than MPS's step, is granted, and mpsctl says what it is."""
    done = node.mpsctl("admit", "--threads", threads, "--memory", "1gib", "-o", "json")
    assert json.loads(done.stdout)["active_thread_percentage"] == granted
    assert done.stderr == (f"mpsctl: {note}\n" if note else "")


@pytest.mark.parametrize("fraction", ["0.25", "25%", "25 %", "1/4", "0,25"])
def test_fractions(node: Node, fraction: str) -> None:
    """A fraction is understood in each usual notation."""
    done = node.mpsctl("admit", "--fraction", fraction, "-o", "json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["active_thread_percentage"] == 25.0


@pytest.mark.parametrize(
    ("fraction", "detail"),
    [
        ("25", "fraction 25 is not between 0.001 and 1"),
        ("0", "fraction 0 is not between 0.001 and 1"),
        ("250%", "fraction 2.5 is not between 0.001 and 1"),
        ("5/4", "fraction 1.25 is not between 0.001 and 1"),
        ("1/0", "'1/0' is not a fraction"),
        ("a quarter", "'a quarter' is not a fraction"),
        ("nan", "'nan' is not a fraction"),
    ],
)
def test_no_fractions(node: Node, fraction: str, detail: str) -> None:
    """A fraction that cannot be granted is refused with a usable one."""
    done = node.mpsctl("admit", "--fraction", fraction)
    assert done.returncode == 2
    assert detail in done.stderr
    assert "0.25" in done.stderr


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        ({"gpus": 65}, "gpus is a whole number from 1 to 64"),
        ({"ttl": 1e10}, "ttl is a number above 0 and up to 1000000000"),
        ({"stop": "now"}, "stop is terminate or sigterm"),
        ({"labels": {"a b": "c"}}, "a key of labels is text that matches ^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}$"),
        ({"labels": {f"a{number}": "" for number in range(33)}}, "labels is an object of at most 32 items"),
        ({"owner": {"uid": 1, "gid": 1, "groups": [-1]}}, "owner.groups[0] is a whole number from 0 to 4294967294"),
        ({"threads": "10"}, "the fields are described in /v1/openapi.json, schema LeaseRequest"),
    ],
)
def test_valid_values(node: Node, body: dict[str, object], hint: str) -> None:
    """The refusal of a field has its valid values; a user of mpsctl does not read the API's document."""
    answer = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB", **body})
    assert answer.status == 422
    assert answer.json["hint"].startswith(hint)


@pytest.mark.root("call as another user")
def test_a_lease_for_another_user(node: Node) -> None:
    """A user who names another one reads the option to leave out."""
    done = mpsctl_as_nobody(node, "admit", "--user", "root", *SHARE)
    assert (done.returncode, done.stdout) == (77, "")
    assert "hint: take it out for yourself, without an owner (--user), or ask an administrator" in done.stderr


# -- of operators ------------------------------------------------------------------------------------------------------


def check(path: Path) -> "subprocess.CompletedProcess[str]":
    """Have mpsd check a configuration."""
    command = [sys.executable, "-m", "mpsd", "check", "--config", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        pytest.param(b"[daemon]\ndeaths = 0", "The default is 5; mpsd.toml(5) describes it.", id="a setting"),
        pytest.param(b"\x7fELF\x02\xff\xfe", "name a configuration file, such as /etc/mpsd/", id="a program"),
    ],
)
def test_settings(short_tmp: Path, content: bytes, hint: str) -> None:
    """An invalid configuration is refused with a correct line, or with where it is described, not with both."""
    path = short_tmp / "mpsd.toml"
    path.write_bytes(content)
    done = check(path)
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.splitlines()[1].startswith(f"  hint: {hint}")


@as_root
def test_a_file_system_that_cannot_be_written(make_node: Callable[..., Node]) -> None:
    """mpsd says that it is read-only, also to root, for whom a change of users does not help."""
    node = make_node(simulate=1)
    (node.root / "state").mkdir()
    with mounted(node.root / "state", "1m"):
        subprocess.run(["mount", "-o", "remount,ro", node.root / "state"], check=True)
        status, said = node.refuse()
    assert status == 78
    assert f"{node.root}/state cannot be written: its file system is read-only" in said
    assert "hint: mount it for writing, or choose another directory" in said


@as_root
def test_a_directory_that_cannot_be_written(make_node: Callable[..., Node]) -> None:
    """If root may not write, the hint is not to change the owner, but where to find what forbids it."""
    node = make_node(simulate=1)
    (node.root / "state").mkdir()
    if subprocess.run(["chattr", "+i", node.root / "state"], check=False, capture_output=True).returncode:
        pytest.skip("this file system has no immutable directories")
    try:
        status, said = node.refuse()
    finally:
        subprocess.run(["chattr", "-i", node.root / "state"], check=True)
    assert status == 78
    assert f"{node.root}/state cannot be written: not even uid 0 may" in said
    assert "lsattr -d" in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write whatever the mode is")
def test_a_mode_that_forbids_writing(make_node: Callable[..., Node]) -> None:
    """If an owner's directory is closed to it, the hint is that the mode may forbid it."""
    node = make_node(simulate=1)
    (node.root / "state").mkdir(mode=0o500)
    status, said = node.refuse()
    assert status == 78
    assert f"cannot be written: not even uid {os.geteuid()} may" in said
    assert "its mode" in said
