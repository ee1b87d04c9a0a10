"""Users' typing mistakes: each is answered by one sentence that says what to type, and changes nothing."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import ROOT, mpsctl_as_nobody
from tests.disks import as_root, mounted
from tests.node import Node

SHARE = ("--threads", "10", "--memory", "1GiB")

RUN = "mpsctl run --fraction 0.25 -- python train.py"

MISTAKES = {
    # commands
    "stauts": "mpsctl status",
    "frobnicate": "mpsctl --help",
    "ps": "mpsctl clients",
    "free": "mpsctl gpus",
    "list": "mpsctl leases",
    "squeue": "mpsctl leases",
    "sacct": "mpsctl usage",
    "logs": "mpsctl events",
    "logs gpu0": "mpsctl explain gpu0",
    "describe train": "mpsctl explain train",
    "info": "mpsctl status",
    "version": "mpsctl --version",
    "get leases": "mpsctl leases",
    "list gpu": "mpsctl gpus",
    "kill": "mpsctl release LEASE",
    "kill train": "mpsctl release train",
    "kill 4711": "mpsctl end 4711",
    "scancel train": "mpsctl release train",
    "srun python train.py --lr 1": "mpsctl run --fraction 0.25 -- python train.py --lr 1",
    "salloc": "mpsctl shell --fraction 0.25",
    "set": "mpsctl config",
    "lease": "mpsctl leases",
    "start gpu0": "mpsctl resume gpu0",
    "stop gpu0 --timeout 5m": "mpsctl drain gpu0 --timeout 5m",
    "cluster nodes": "mpsctl cluster --help",
    "demo": "mpsd demo",
    "check --config x.toml": "mpsd check --config x.toml",
    "service start": "systemctl start mpsd",
    "service instal --dry-run": "mpsctl service install --dry-run",
    "relaod": "mpsctl reload",
    # a share, and a command
    "run python train.py": RUN,
    "run -- python train.py": RUN,
    "run 0.5 python train.py": "mpsctl run --fraction 0.5 -- python train.py",
    "run python train.py --fraction 0.25": RUN,
    "run -- --fraction 0.25 python train.py": RUN,
    "run --fraction 0.25": RUN,
    "run --fraction 0.25 --": RUN,
    "run --threads 25 -- true": "mpsctl run --memory 8GiB --threads 25 -- true",
    "run --memory 8GiB -- true": "mpsctl run --threads 25 --memory 8GiB -- true",
    "admit 25": 'eval "$(mpsctl admit --threads 25 --memory 8GiB -o env)"',
    "admit": "mpsctl admit --fraction 0.25",
    "shell": "mpsctl shell --fraction 0.25",
    "shell bash": "mpsctl run --fraction 0.25 -- bash",
    # values
    "run --fraction 25 -- true": "give a number such as 0.25, which is a quarter of a GPU:"
    " mpsctl run --fraction 25% -- true",
    "run --threads 25 --memory 8 -- true": "give the unit, if 8MiB or 8GiB was meant:"
    " mpsctl run --threads 25 --memory 8GiB -- true",
    "run --threads 25 --memory 8G -- true": "write 8GiB (times 1024) or 8GB (times 1000):"
    " mpsctl run --threads 25 --memory 8GiB -- true",
    "run --threads 25 --memory=8G -- true": "write 8GiB (times 1024) or 8GB (times 1000):"
    " mpsctl run --threads 25 --memory=8GiB -- true",
    "run --gpus all --fraction 0.1 -- true": "mpsctl run --gpus 2 --fraction 0.1 -- true",
    "run --fraction 0.1 --ttl 2hours -- true": "mpsctl run --fraction 0.1 --ttl 2h -- true",
    "run --fraction 0.1 --wait -- true": "mpsctl run --fraction 0.1 --wait 10m -- true",
    "run --fraction 0.1 --wait '1 week' -- true": "mpsctl run --fraction 0.1 --wait 7d -- true",
    "run --fraction 0.1 --label vision -- true": "mpsctl run --fraction 0.1 --label team=vision -- true",
    "admit --fraction 0.1 --pid shell": "mpsctl admit --fraction 0.1 --pid $$",
    "admit --fraction a-quarter": "mpsctl admit --fraction 0.25",
    "renew train 2h": "mpsctl renew train --ttl 2h",
    "renew train": "mpsctl renew train --ttl 2h",
    "leases -o jsno": "mpsctl leases -o json",
    "usage --since january": "mpsctl usage --since 2h",
    "run --fraction 0.1 --name 'a\tb' -- true": "name is one line of text of at most 128 characters:"
    " mpsctl run --fraction 0.1 --name 'a b' -- true",
    "admit --fraction 0.1 --ttl 0": "mpsctl admit --fraction 0.1 --ttl 2h",
    "admit --fraction 0.1 --ttl 10000000h": "mpsctl admit --fraction 0.1 --ttl 2h",
    "admit --gpu 0 --gpu 1 --fraction 0.1": "mpsctl admit --gpus 2 --fraction 0.1",
    "run --fraction 0.1 --gpu 0,1 -- true --gpu 0": "choose 0 (gpu0), 1 (gpu1), or a UUID: mpsctl gpus -o wide:"
    " mpsctl run --fraction 0.1 --gpus 2 -- true --gpu 0",
    "run --fraction 0.1 --gpu 7 -- true": "choose 0 (gpu0), 1 (gpu1), or a UUID: mpsctl gpus -o wide:"
    " mpsctl run --fraction 0.1 --gpu 0 -- true",
    "run --fraction 0.5 --threads 25 -- true --threads 8": "give either a fraction, or threads and memory:"
    " mpsctl run --fraction 0.5 -- true --threads 8",
    "run --fraction 0.1 --ttl 1-01:30:00 -- true": "mpsctl run --fraction 0.1 --ttl 1530m -- true",
    "leases --sort threds": "mpsctl leases --sort memory",
    "admit --processes 0 --fraction 0.1": "processes is a whole number from 1 to 1000, or any:"
    " mpsctl admit --processes 2 --fraction 0.1",
    "drain gpu0 --timeout=-5": "mpsctl drain gpu0 --timeout=1h",
    # options
    "leases --json": "mpsctl leases -o json",
    "leases -u bob": "mpsctl leases --user bob",
    "run --mem 8GiB --threads 5 -- true": "mpsctl run --memory 8GiB --threads 5 -- true",
    "run --mem=8GiB --threads 5 -- true": "mpsctl run --memory=8GiB --threads 5 -- true",
    "run -n train --fraction 0.1 -- true": "mpsctl run --name train --fraction 0.1 -- true",
    "run --treads 25 --memory 8GiB -- true": "mpsctl run --threads 25 --memory 8GiB -- true",
    "run --cpus 4 --fraction 0.1 -- true": RUN,
    "run --timeout 5m --fraction 0.1 -- true": "mpsctl run --wait 5m --fraction 0.1 -- true",
    "-o json leases": "mpsctl leases -o json",
    "events --tail 5": "mpsctl events --last 5",
    "drain --gpu gpu0": "mpsctl drain gpu0",
    "drain gpu1 --force": "this ends all clients at once: mpsctl drain gpu1 --timeout 0",
    "release --all": "mpsctl release $(mpsctl leases --mine -o name)",
    "web --host 0.0.0.0": "mpsctl web --port 8080",
    "-V": "mpsctl --version",
    # arguments
    "leases whisper": "mpsctl show whisper",
    "status gpu0": "mpsctl explain gpu0",
    "clients bob": "mpsctl clients --user bob",
    "config daemon.deaths": "mpsctl config | grep daemon.deaths",
    "doctor gpu": "mpsctl doctor --list",
    "hold gpu0 gpu1": "mpsctl hold gpu0 && mpsctl hold gpu1",
    "drain": "mpsctl drain DAEMON; their names: mpsctl daemons",
    "end train": "mpsctl end PID; the pids: mpsctl clients",
    "end 4194304": "to say yes: mpsctl end 4194304 --yes",
    "top": "for a program: mpsctl clients -o json",
    "explain": "mpsctl explain gpu0",
    "release": "mpsctl release LEASE; the leases: mpsctl leases --mine",
    "release --end-clients ''": "mpsctl release LEASE; the leases: mpsctl leases --mine",
    "pardon": "mpsctl pardon USER; the quarantined: mpsctl status",
    # an empty value, which comes from a variable that is not set
    "show lease-nobody-has ''": "mpsctl show train",
    "explain ''": "mpsctl explain gpu0",
    "drain ''": "mpsctl drain DAEMON; their names: mpsctl daemons",
    "verify --canary ''": "mpsctl verify --canary gpu0",
    "admit --fraction 0.1 --gpu ''": "mpsctl admit --fraction 0.1 --gpu 0",
    "cdi remove ''": "mpsctl cdi remove train",
    # what is not there
    "pardon nobody-of-this-name": "what is quarantined: mpsctl status",
    "events --lease nosuch": "the leases: mpsctl leases --all",
    "release nosuch": "list the leases: mpsctl leases",
    "verify 4194304": "mpsctl verify --pid 4194304",
}
"""What a newcomer types behind `mpsctl`, and the hint of the answer."""

NOT_THERE = {"pardon nobody-of-this-name", "events --lease nosuch", "release nosuch", "verify 4194304"}


@pytest.mark.parametrize("typed", MISTAKES)
def test_mistakes(node: Node, in_path: dict[str, str], typed: str) -> None:
    """A mistake is answered on stderr, with what to type, and changes nothing."""
    done = in_a_shell(f"mpsctl {typed}", in_path)
    status, code = (1, "not_found") if typed in NOT_THERE else (2, "invalid_request")
    assert (done.returncode, done.stdout) == (status, "(exit 2)\n" if "-o env" in typed else "")
    first, *hint = done.stderr.splitlines()
    assert first.startswith("mpsctl: ")
    assert first.endswith(f" [{code}]")
    assert hint == [f"  hint: {MISTAKES[typed]}"]
    assert node.leases() == []
    assert {each["state"] for each in node.daemons().values()} == {"ready"}


def in_a_shell(line: str, environment: dict[str, str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a line in a shell, as a user types it."""
    return subprocess.run(
        ["sh", "-c", line],
        env=environment, capture_output=True, text=True, timeout=60, check=False, **{"cwd": ROOT, **options},
    )  # fmt: skip


OF_MPSD = {
    "status": "mpsctl status",
    "leases --mine": "mpsctl leases --mine",
    "ps": "mpsctl clients",
    "restart": "systemctl restart mpsd",
    "reload": "mpsctl reload",
    "install": "mpsctl service install",
    "run --fraction 0.25 -- python train.py": RUN,
    "run python train.py": RUN,
    "run --simulate": "mpsd run --simulate 2",
    "run --simulate 0": "mpsd run --simulate 2",
    "check mpsd.toml": "mpsd check --config mpsd.toml",
    "chekc": "mpsd check",
}
"""What a newcomer types behind `mpsd`, and the hint of the answer."""


@pytest.mark.parametrize("typed", OF_MPSD)
def test_the_other_program(typed: str) -> None:
    """A command of mpsctl that is typed as one of mpsd is answered with mpsctl, and mistakes as by mpsctl."""
    command = [sys.executable, "-m", "mpsd", *shlex.split(typed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    first, hint = done.stderr.splitlines()
    assert first.startswith("mpsd: ")
    assert hint == f"  hint: {OF_MPSD[typed]}"


PROGRAMS = {
    "train.py": (127, "mpsctl run --fraction 0.25 -- python train.py"),
    "./train.py": (126, "mpsctl run --fraction 0.25 -- python ./train.py"),
    "program": (127, "mpsctl run --fraction 0.25 -- ./program"),
    "'./program --lr 1'": (127, "mpsctl run --fraction 0.25 -- sh -c './program --lr 1'"),
    "A=1 ./program": (127, "mpsctl run --fraction 0.25 -- env A=1 ./program"),
    "cd /tmp": (127, "mpsctl run --fraction 0.25 -- sh -c 'cd /tmp'"),
    "mpsclt status": (127, "mpsctl run --fraction 0.25 -- mpsctl status"),
    "./plain": (126, "chmod +x ./plain"),
    "/no/such": (127, "command -v /no/such"),
}
"""What newcomers want to run on a quarter of a GPU."""


@pytest.mark.parametrize("typed", PROGRAMS)
def test_programs(node: Node, in_path: dict[str, str], short_tmp: Path, typed: str) -> None:
    """A program that cannot be executed is answered as by a shell, with what to type, before it waits for a lease."""
    for name, mode in (("train.py", 0o644), ("plain", 0o644), ("program", 0o755)):
        (short_tmp / name).write_text("#!/bin/sh\n")
        (short_tmp / name).chmod(mode)
    before = node.get("/v1/leases?ended=true").json["leases"]
    done = in_a_shell(f"mpsctl run --fraction 0.25 {typed}", in_path, cwd=short_tmp)
    status, hint = PROGRAMS[typed]
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.splitlines()[1:] == [f"  hint: {hint}"]
    assert node.get("/v1/leases?ended=true").json["leases"] == before


def test_leases_that_ended(node: Node) -> None:
    """A name that only ended leases have is not ambiguous: nothing of it lives."""
    for _ in range(2):
        node.request("DELETE", f"/v1/leases/{node.lease(name='twice')['id']}")
    done = node.mpsctl("release", "twice")
    assert (done.returncode, done.stdout) == (1, "")
    assert "[not_found]" in done.stderr
    assert "hint: what lives: mpsctl leases;" in done.stderr


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
        ({"gpu": 1}, 'write "gpu": "1"; gpu is one line of text'),
        ({"ttl": "2h"}, 'write "ttl": 7200; ttl is a number above 0'),
        ({"wait": "90s"}, 'write "wait": 90; wait is a number'),
        ({"threads": "10%"}, 'write "threads": 10; the fields are described in /v1/openapi.json, schema LeaseRequest'),
        ({"gpus": "1"}, 'write "gpus": 1; gpus is a whole number'),
        ({"gpus": "1.5"}, "gpus is a whole number"),
        ({"name": "\x1b[2J"}, "name is one line of text of at most 128 characters"),
        ({"labels": {"a": "\n"}}, "labels[...] is one line of text of at most 128 characters"),
    ],
)
def test_valid_values(node: Node, body: dict[str, object], hint: str) -> None:
    """The refusal of a field has its valid values; a user of mpsctl does not read the API's document."""
    answer = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB", **body})
    assert answer.status == 422
    assert answer.json["hint"].startswith(hint)


def test_a_number_that_is_not_whole(node: Node) -> None:
    """A refused number is told apart from the numbers that are valid."""
    answer = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB", "gpus": 1.5})
    assert answer.json["detail"] == "gpus must be a whole number, not a decimal number"


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
        pytest.param(
            b"[admission]\noversubscribe = 2", "known settings: admission.threads_oversubscription", id="unlike"
        ),
        pytest.param(b"[daemon]\nuser = 1", "did you mean 'daemon.users'?", id="a near setting"),
        pytest.param(b"[daemon]\nusers = one", 'fix that line; text is in quotes, as in users = "one"', id="no quotes"),
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
