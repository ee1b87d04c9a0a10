"""Leases are held by their intended holder: a shell, a program, or the command that mpsctl becomes."""

import contextlib
import json
import os
import pwd
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.cli.answering import answering, http
from tests.cli.conftest import ROOT, end, run_mpsctl, start_mpsctl
from tests.daemon.caller import needs_root
from tests.harness import wait_until
from tests.node import Node

pytestmark = pytest.mark.thorough

NOBODY = 61778
"""A uid that no user has."""

SHARE = ("--threads", "10", "--memory", "1GiB")

VARIABLES = {
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "MPSD_LEASE",
}


def last_end(node: Node) -> str:
    """Return the reason of the last lease end; the events are answered at once."""
    events = [json.loads(line) for line in node.get("/v1/events").body.splitlines()]
    return str([event["because"] for event in events if event["event"] == "lease_ended"][-1])


def ended(node: Node, lease: str) -> Any:
    """Wait until a lease has ended, and return it."""
    return wait_until(
        lambda: (found := node.get(f"/v1/leases/{lease}").json)["state"] == "ended" and found, what=f"{lease} to end"
    )


# -- what is asked for -------------------------------------------------------------------------------------------------


def test_admit(node: Node) -> None:
    """Every option reaches mpsd with its meaning, and the answer is the lease."""
    done = node.mpsctl(
        "admit", "--threads", "12.5", "--memory", "1536MiB", "--gpu", "1", "--name", "a b", "--label", "team=x=y",
        "--label", "run=7", "--pid", str(os.getpid()), "-o", "json",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    lease = json.loads(done.stdout)
    assert lease == node.get(f"/v1/leases/{lease['id']}").json
    assert (lease["active_thread_percentage"], lease["pinned_device_mem_limit"]) == (12.5, 1536 * 1024**2)
    assert (lease["daemon"], lease["name"], lease["labels"]) == ("gpu1", "a b", {"team": "x=y", "run": "7"})
    assert lease["owner"]["pid"] == os.getpid()


def test_admit_forms(node: Node) -> None:
    """The lease is printed as a table, or as export lines, without other output."""
    table = node.mpsctl("admit", *SHARE)
    assert re.match(r"lease +lease-\w+\nstate +granted: ", table.stdout)
    done = node.mpsctl("admit", *SHARE, "-o", "env")
    assert {line.split("=")[0] for line in done.stdout.splitlines()} == {
        f"export {name}" for name in (*VARIABLES, "MPSD_LEASE_TOKEN", "MPSD_SOCKET")
    }


def test_options(node: Node) -> None:
    """Options beyond the share reach mpsd with their meaning: time to live, processes, priority."""
    done = node.mpsctl("admit", *SHARE, "--processes", "2", "--priority", "-3", "--ttl", "1000", "-o", "json")
    lease = json.loads(done.stdout)
    assert (lease["processes"], lease["priority"]) == (2, -3)
    assert lease["env"]["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "5.0"
    assert lifetime(lease) == pytest.approx(1000, abs=1)


def lifetime(lease: Any) -> float:
    """Return the seconds from the grant of a lease to its end."""
    granted, expires = (datetime.fromisoformat(lease[name]) for name in ("granted", "expires"))
    return (expires - granted).total_seconds()


def test_renew(node: Node) -> None:
    """A renewed lease lives for that time from then on, and is printed in its new state."""
    lease = json.loads(node.mpsctl("admit", *SHARE, "--ttl", "1000", "-o", "json").stdout)
    done = node.mpsctl("renew", lease["id"], "--ttl", "5000", "-o", "json")
    assert (done.returncode, done.stderr) == (0, "")
    renewed = json.loads(done.stdout)
    assert {**renewed, "expires": None} == {**lease, "expires": None}
    assert lifetime(renewed) >= 5000
    shown = node.mpsctl("renew", lease["id"], "--ttl", "5000").stdout
    assert re.search(r"^expires +\S+ \S+ \(in 1h 23m, unless", shown, re.MULTILINE)


# -- whom it is for: admit ---------------------------------------------------------------------------------------------


def test_a_program_that_calls(node: Node) -> None:
    """A program that is no shell holds the leases that it requests."""
    done = run_mpsctl(node.socket, "admit", *SHARE, "-o", "json")
    assert json.loads(done.stdout)["owner"]["pid"] == os.getpid()


WAYS = {
    "eval": 'eval "$(mpsctl admit $SHARE -o env)" || exit',
    "piped": 'eval "$(mpsctl admit $SHARE -o env | cat)" || exit',
    "more in the subshell": 'eval "$(:; mpsctl admit $SHARE -o env; :)" || exit',
    "subshell in a subshell": 'eval "$(echo "$( (mpsctl admit $SHARE -o env; :); : )"; :)" || exit',
    "assigned first": 'lines=$(mpsctl admit $SHARE -o env) && eval "$lines" || exit',
    "function": 'take() { mpsctl admit $SHARE -o env; }; eval "$(take)" || exit',
    "plain": "mpsctl admit $SHARE > /dev/null || exit",
    "background": "{ mpsctl admit $SHARE > /dev/null; : ; } & wait $!",
}
"""Ways in which scripts request a lease; in each, the requesting process is gone by the next line."""


def shells() -> list[Any]:
    """Return the shells, with a skip for those that this machine lacks."""
    wanted = ("sh", "bash", "dash")
    return [
        pytest.param(shell, marks=pytest.mark.skipif(not shutil.which(shell), reason=f"no {shell}")) for shell in wanted
    ]


@pytest.mark.parametrize("shell", shells())
@pytest.mark.parametrize("way", WAYS)
def test_a_shell_that_calls(node: Node, short_tmp: Path, in_path: dict[str, str], shell: str, way: str) -> None:
    """A lease that a script requests lives as long as its shell, with any number of subshells in between."""
    script = short_tmp / "script"
    script.write_text(f"{WAYS[way]}\necho $$\nread -r line\n")
    with subprocess.Popen(
        [shell, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**in_path, "SHARE": " ".join(SHARE)},
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"{process.pid}\n"
            (lease,) = node.leases()
            assert lease["owner"]["pid"] == process.pid
        finally:
            process.communicate("\n", timeout=30)
    assert str(process.pid) in ended(node, lease["id"])["because"]


@pytest.mark.parametrize("wrapper", ["timeout 60", "nice -n 1 env timeout 60"])
@pytest.mark.parametrize("shell", shells())
def test_a_shell_that_calls_by_another_program(
    node: Node, short_tmp: Path, in_path: dict[str, str], shell: str, wrapper: str
) -> None:
    """The output for `eval` is for the shell that reads it, whichever program called mpsctl and is gone by then."""
    script = short_tmp / "script"
    script.write_text(f'eval "$({wrapper} mpsctl admit $SHARE -o env)"\necho $$ $MPSD_LEASE\nread -r line\n')
    with subprocess.Popen(
        [shell, *(["-y"] if shell.endswith("zsh") else []), str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**in_path, "SHARE": " ".join(SHARE)},
    ) as process:
        try:
            assert process.stdout is not None
            pid, own = process.stdout.readline().split()
            (lease,) = node.leases()
            assert (lease["owner"]["pid"], lease["id"]) == (process.pid, own) == (int(pid), own)
        finally:
            process.communicate("\n", timeout=30)
    assert str(process.pid) in ended(node, lease["id"])["because"]


@pytest.mark.parametrize("form", ["table", "json", "env", "env-file"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_killed_before_it_printed(node: Node, form: str, number: signal.Signals) -> None:
    """If mpsctl is killed after a grant and before its output, the lease ends; its holder, the caller, lives on."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb"), os.fdopen(writer, "wb", buffering=0) as full:
        os.set_blocking(writer, False)
        while full.write(bytes(65536)):  # until the pipe is full
            pass
        os.set_blocking(writer, True)
        process = start_mpsctl(node.socket, "admit", *SHARE, "-o", form, stdout=writer)
        try:
            wait_until(node.leases, what="a lease")
            process.send_signal(number)
            assert process.wait(30) == -number
            wait_until(lambda: node.leases() == [], what="the lease to end")
        finally:
            end(process)


def test_killed_at_any_moment(node: Node, short_tmp: Path) -> None:
    """After mpsctl is killed at any moment, there is no lease whose id it has not printed."""
    known = set()
    for moment in range(24):
        out = short_tmp / f"{moment}"
        with out.open("w", encoding="utf-8") as file:
            process = start_mpsctl(
                node.socket, "admit", "--threads", "1", "--memory", "64MiB", "-o", "json", stdout=file
            )
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.04 + moment * 0.005)
            finally:
                end(process)
        known |= set(re.findall(r"lease-[0-9a-f]{10}", out.read_text(encoding="utf-8")))
    wait_until(lambda: {each["id"] for each in node.leases()} <= known, what="every lease to be known, or none")


_TWO_PROCESSES = f"""
import os, resource, sys
sys.path.insert(0, sys.argv.pop(1))
from mpsd.cli import group, main, views
from mpsd.cli.commands import admit
import mpsd.core.units, pwd, shlex
resource.setrlimit(resource.RLIMIT_NPROC, (2, 2))
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
child = os.fork()
if child == 0:
    main.main()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
"""Calls mpsctl as a user that may have no process besides these two."""


@needs_root
def test_without_room_for_a_guard(node: Node) -> None:
    """A lease is granted even if no second process can be forked."""
    command = [sys.executable, "-c", _TWO_PROCESSES, str(ROOT), "--socket", str(node.socket), "admit", *SHARE]
    done = subprocess.run([*command, "--output", "json"], capture_output=True, text=True, check=False, cwd="/")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["owner"]["uid"] == NOBODY


def test_with_what_a_lease_ends(in_path: dict[str, str], node: Node, short_tmp: Path) -> None:
    """A lease whose environment is not read says with what it ends, how to end it, and how to use it."""
    script = f"mpsctl admit {' '.join(SHARE)}; mpsctl admit {' '.join(SHARE)} -o env >{short_tmp}/file; echo $$; read l"
    with subprocess.Popen(
        ["bash", "-c", script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=in_path,
    ) as process:  # fmt: skip
        wait_until(lambda: len(node.leases()) == 2 and (short_tmp / "file").stat().st_size, what="two leases")
        one, other = (each["id"] for each in node.leases())
        _, stderr = process.communicate("\n", timeout=30)
    assert stderr.splitlines() == [
        f"mpsctl: {one} ends with bash (pid {process.pid}); to end it: mpsctl release {one}",
        f'mpsctl: no process uses it yet; for this shell and what it starts: eval "$(mpsctl show {one} -o env)"',
        f"mpsctl: {other} ends with bash (pid {process.pid}); to end it: mpsctl release {other}",
    ]


def test_how_another_process_uses_it(node: Node) -> None:
    """The note about a lease that another process holds names that process, and not this shell."""
    with subprocess.Popen(["sleep", "60"]) as other:
        done = node.mpsctl("admit", *SHARE, "--pid", str(other.pid))
        (lease,) = (each["id"] for each in node.leases())
        other.kill()
    assert done.stderr.splitlines()[1] == (
        f"mpsctl: no process uses it yet; in sleep (pid {other.pid}), for what it starts:"
        f' eval "$(mpsctl show {lease} -o env)"'
    )


@needs_root
def test_how_another_user_uses_it(node: Node) -> None:
    """The note about a lease for another user has the command that starts a program of that user."""
    done = node.mpsctl("admit", *SHARE, "--user", "nobody", "--pid", str(os.getpid()))
    (lease,) = (each["id"] for each in node.leases())
    assert done.stderr.splitlines()[1].startswith(
        f'mpsctl: no process uses it yet; for a program that runs as nobody: (eval "$(mpsctl show {lease} -o env)";'
        f" setpriv --reuid {pwd.getpwnam('nobody').pw_uid} --regid "
    )


def test_with_what_a_claim_ends(node: Node) -> None:
    """A lease without a holder says that it waits for one."""
    done = node.mpsctl("admit", *SHARE, "--claim")
    (lease,) = (each["id"] for each in node.leases())
    assert done.stderr == (
        f"mpsctl: {lease} has no holder until its claim is taken, and ends if that takes too long;"
        f" to end it: mpsctl release {lease}\n"
    )


def test_a_shell_called_alike(node: Node, short_tmp: Path, in_path: dict[str, str]) -> None:
    """A shell within a shell of the same command line is a separate program, and the lease is for the inner one."""
    script = short_tmp / "script"
    script.write_text(
        f'if [ -z "$INNER" ]; then INNER=1 sh "$0"; echo outer; read -r line; exit; fi\n'
        f"echo $$\nmpsctl admit {' '.join(SHARE)} -o json\nexit\n"
    )
    with subprocess.Popen(
        ["sh", str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=in_path
    ) as outer:
        try:
            assert outer.stdout is not None
            lines = list(iter(outer.stdout.readline, "outer\n"))
            lease = json.loads("".join(lines[1:]))
            assert lease["owner"]["pid"] == int(lines[0]) != outer.pid
            ended(node, lease["id"])
            assert outer.poll() is None
        finally:
            outer.communicate("\n", timeout=30)


def test_env_file(in_path: dict[str, str]) -> None:
    """-o env-file has the same variables, a line each, for readers other than shells; for several GPUs it fails."""
    script = (
        f'eval "$(mpsctl admit {" ".join(SHARE)} -o env)"; mpsctl show $MPSD_LEASE -o env-file; echo; env;'
        f" mpsctl admit {' '.join(SHARE)} --gpus 2 -o env-file"
    )
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False, env=in_path)
    lines, _, exported = done.stdout.partition("\n\n")
    assert {line.split("=", 1)[0] for line in lines.splitlines()} == VARIABLES | {"MPSD_LEASE_TOKEN", "MPSD_SOCKET"}
    assert {*lines.splitlines()} <= {*exported.splitlines()}
    assert done.returncode == 2
    assert "-o env-file works for one GPU only" in done.stderr


def test_several_gpus(in_path: dict[str, str], node: Node) -> None:
    """A lease on several GPUs is granted as a whole, and each process of its holder takes its own GPU's environment.

    Each is numbered as launchers number the processes of a node: from 0.
    """
    script = (
        f"mpsctl run {' '.join(SHARE)} --gpus 2 -- sh -c '"
        'for rank in 0 1; do (eval "$(mpsctl show $MPSD_LEASE -o env --share $rank)"; env); done;'
        "mpsctl show $MPSD_LEASE -o json; env'"
    )
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, env=in_path)
    uuids = [gpu["uuid"] for gpu in node.get("/v1/gpus").json["gpus"]]
    assert re.findall(r"^CUDA_VISIBLE_DEVICES=(.+)$", done.stdout, re.MULTILINE) == [*uuids, uuids[0]]
    pipes = re.findall(r"^CUDA_MPS_PIPE_DIRECTORY=(.+)$", done.stdout, re.MULTILINE)
    assert pipes == [str(node.pipe_directory(name)) for name in ("gpu0", "gpu1", "gpu0")]
    lease = json.loads(done.stdout[done.stdout.index("\n{\n") : done.stdout.rindex("\n}\n") + 3])
    assert lease["gpus"] == uuids
    assert "env --share" not in done.stderr


REFUSED = {
    "too much": ("admit --threads 100 --memory 900GiB", 65, "never_fits"),
    "misspelt": ("admit --treads 10 --memory 1GiB", 2, "has no option --treads"),
    "on several GPUs": ("admit --threads 10 --memory 1GiB --gpus 2", 2, "invalid_request"),
    "unknown": ("show lease-nobody-has", 1, "not_found"),
    "waiting": ("show $WAITING", 75, "does_not_fit"),
    "ended": ("show $ENDED", 1, "not_found"),
    "no such share": ("show $ONE --share 1", 2, "invalid_request"),
    "which share": ("show $TWO", 2, "invalid_request"),
}
"""Requests that fail in a shell, each with its exit code and message."""


@pytest.fixture
def with_leases(node: Node, in_path: dict[str, str]) -> Iterator[dict[str, str]]:
    """Yield an environment that names leases in every state, and fewer and more GPUs."""

    def admit(*options: str) -> Any:
        return json.loads(node.mpsctl("admit", *SHARE, *options, "-o", "json").stdout)["id"]

    names = {"ENDED": admit(), "ONE": admit(), "TWO": admit("--gpus", "2")}
    node.request("DELETE", f"/v1/leases/{names['ENDED']}")
    waiter = start_mpsctl(node.socket, "admit", "--threads", "100", "--memory", "1GiB", "--wait", "forever")
    try:
        wait_until(lambda: node.leases()[-1]["state"] == "waiting", what="a lease to wait")
        yield {**in_path, **names, "WAITING": node.leases()[-1]["id"]}
    finally:
        end(waiter)


def test_what_a_shell_cannot_have(with_leases: dict[str, str], node: Node) -> None:
    """If there is no environment, `eval` fails with an exit code: no script continues without limits."""
    before = [lease["id"] for lease in node.leases()]
    for command, status, reason in REFUSED.values():
        script = f'eval "$(mpsctl {command} -o env)"; echo "went on, $?"'
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, env=with_leases)
        assert (done.stdout, reason in done.stderr) == (f"went on, {status}\n", True), (command, done.stderr)
    assert [lease["id"] for lease in node.leases()] == before


@pytest.mark.parametrize("command", ["admit", "run"])
def test_a_lease_without_an_environment(short_tmp: Path, command: str) -> None:
    """An mpsd that grants a lease without an environment is not trusted: nothing runs, and nothing is kept."""
    lease: Any = {"id": "lease-1", "state": "granted", "because": "", "gpus": ["GPU-1"], "env": {}, "expires": None}
    lease["holders"] = [{"kind": "process", "pid": 1}]
    gone = b"HTTP/1.1 204 No Content\r\n\r\n"
    rest = ["-o", "env"] if command == "admit" else ["--", "touch", str(short_tmp / "ran")]
    with answering(short_tmp / "s", http(lease, "201 Created"), gone) as server:
        done = run_mpsctl(short_tmp / "s", command, *SHARE, *rest)
        assert server.requests[-1].startswith(b"DELETE /v1/leases/lease-1 ")
    assert (done.returncode, done.stdout) == (1, "(exit 1)\n" if command == "admit" else "")
    assert "gave lease-1 no environment" in done.stderr
    assert not (short_tmp / "ran").exists()


def test_a_lease_that_cannot_be_printed(node: Node) -> None:
    """A lease that its caller does not get to see is released."""
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = run_mpsctl(node.socket, "admit", *SHARE, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (1, "mpsctl: cannot write the answer: No space left on device\n")
    assert node.leases() == []
    assert "released" in last_end(node)


# -- whom it is for: run -----------------------------------------------------------------------------------------------


def test_run(node: Node) -> None:
    """The command is the same process, has the lease's environment beside its own, and its exit status is mpsctl's."""
    script = 'echo $$; env -0 | grep -z -E "^(CUDA|KEPT|MPSD_LEASE)" | tr "\\0" "\\n"; exit 7'
    environment = {**os.environ, "KEPT": "as it was", "CUDA_VISIBLE_DEVICES": "3"}
    process = start_mpsctl(node.socket, "run", *SHARE, "--", "sh", "-c", script, env=environment)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (7, "")
    pid, *entries = stdout.splitlines()
    assert int(pid) == process.pid
    variables = dict(entry.split("=", 1) for entry in entries)
    assert variables.pop("KEPT") == "as it was"
    assert node.get(f"/v1/leases/{variables['MPSD_LEASE']}").json["owner"]["pid"] == process.pid
    assert variables.keys() == VARIABLES | {"MPSD_LEASE_TOKEN"}
    assert variables["CUDA_VISIBLE_DEVICES"] in {gpu["uuid"] for gpu in node.get("/v1/gpus").json["gpus"]}


OTHERS = {"CUDA_MPS_CLIENT_PRIORITY": "1", "CUDA_MPS_SM_PARTITION": "GPU-1/x", "CUDA_MPS_PROTOCOL_VERSION": "3"}
"""What another job, or another control daemon, may have left in the environment."""


@pytest.mark.parametrize("how", ["run", "claim", "eval"])
@pytest.mark.parametrize(
    ("asked", "has"), [((), ""), (("--client-priority", "0"), "CUDA_MPS_CLIENT_PRIORITY=0\n")], ids=["plain", "asked"]
)
def test_nothing_of_another_job(node: Node, how: str, asked: tuple[str, ...], has: str) -> None:
    """A program has the variables of MPS that its lease has, and none that mpsctl inherited from elsewhere."""
    options = (*SHARE, *asked)
    show = 'env | grep -E "^CUDA_MPS_(CLIENT|SM|PROTOCOL)"; exit 0'
    environment = {**os.environ, **OTHERS}
    if how == "run":
        done = run_mpsctl(node.socket, "run", *options, "--", "sh", "-c", show, env=environment)
    elif how == "claim":
        claimed = json.loads(node.mpsctl("admit", *options, "--claim", "-o", "json").stdout)
        environment["MPSD_LEASE_TOKEN"] = claimed["env"]["MPSD_LEASE_TOKEN"]
        done = run_mpsctl(node.socket, "claim", claimed["id"], "--", "sh", "-c", show, env=environment)
    else:
        mpsctl = shlex.join(node.mpsctl_command("admit", *options, "-o", "env"))
        script = f'eval "$({mpsctl})"; {show}'
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (0, has), done.stderr


@pytest.mark.parametrize("set_by_user", [None, "C.UTF-8"])
def test_no_locale_of_pythons(node: Node, set_by_user: str | None) -> None:
    """Variables that Python sets for itself in the C locale are not passed to the command; those of its caller are."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG"))}
    environment |= {} if set_by_user is None else {"LC_CTYPE": set_by_user}
    done = run_mpsctl(node.socket, "run", *SHARE, "--", "printenv", "LC_CTYPE", env=environment)
    assert (done.returncode, done.stdout) == ((1, "") if set_by_user is None else (0, f"{set_by_user}\n"))


def test_where_its_lease_is(node: Node, short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command gets mpsctl's options for finding the lease: the socket, as a path, and the trusted user."""
    monkeypatch.delenv("MPSD_SOCKET", raising=False)
    (short_tmp / "here").symlink_to(node.socket.parent)
    script = f'{sys.executable} -m mpsd.cli.main renew "$MPSD_LEASE" --ttl 5000 -o json; echo "$MPSD_TRUST_UID"'
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = run_mpsctl(
        "here/mpsd.sock", "--trust-uid", "4242", "run", *SHARE, "--ttl", "1000", "--", "sh", "-c", script,
        cwd=short_tmp, env=environment,
    )  # fmt: skip
    assert (done.stderr, done.stdout.splitlines()[-1]) == ("", "4242")
    assert lifetime(json.loads(done.stdout[: done.stdout.rindex("}\n") + 2])) >= 5000


_RENEW = f"{sys.executable} -m mpsd.cli.main renew --ttl 5000 -o json"


@pytest.mark.parametrize("way", ["admit", "claim", "shell"])
def test_where_its_lease_is_otherwise(node: Node, short_tmp: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Each way to a lease passes the named socket on, so that the program can renew its lease."""
    monkeypatch.delenv("MPSD_SOCKET", raising=False)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    match way:
        case "admit":
            take = f"{sys.executable} -m mpsd.cli.main --socket {node.socket} admit {' '.join(SHARE)} -o env"
            done = subprocess.run(
                ["sh", "-c", f'eval "$({take})" && {_RENEW}'],
                capture_output=True, text=True, check=False, env=environment,
            )  # fmt: skip
        case "claim":
            lease = json.loads(run_mpsctl(node.socket, "admit", *SHARE, "--claim", "-o", "json").stdout)
            environment["MPSD_LEASE_TOKEN"] = lease["env"]["MPSD_LEASE_TOKEN"]
            done = run_mpsctl(node.socket, "claim", lease["id"], "--", "sh", "-c", _RENEW, env=environment)
        case _:
            shell = short_tmp / "shell"
            shell.write_text(f"#!/bin/sh\n{_RENEW}\n")
            shell.chmod(0o755)
            done = run_mpsctl(node.socket, "shell", *SHARE, env={**environment, "SHELL": str(shell)})
    assert done.returncode == 0, done.stderr
    assert lifetime(json.loads(done.stdout)) >= 5000


_NO_PART = (
    "mpsctl: a program that {} starts as another user has no part in this lease: it gets error 46, or the whole GPU"
    " without limits; start it by mpsctl run --user NAME -- PROGRAM\n"
)


@needs_root
@pytest.mark.parametrize(
    ("command", "changer"),
    [
        (("su", "-s", "/bin/true", "nobody"), "su"),
        (("/usr/bin/setpriv", "--reuid=65534", "--clear-groups", "true"), "setpriv"),
        (("setpriv", "--reuid", "65534", "--clear-groups", "true"), "setpriv"),
        (("setpriv", "--no-new-privs", "true"), None),
        (("chroot", "--userspec=65534:65534", "/", "true"), "chroot"),
        (("chroot", "/", "true"), None),
        (("sh", "-c", "exit 0", "su"), None),
    ],
)
def test_a_command_that_changes_its_user(node: Node, command: tuple[str, ...], changer: str | None) -> None:
    """Root reads at once that a program of another user needs --user; the command runs nevertheless."""
    done = run_mpsctl(node.socket, "run", *SHARE, "--", *command)
    assert (done.returncode, done.stderr) == (0, _NO_PART.format(changer) if changer else "")


@needs_root
def test_a_command_of_another_user(node: Node) -> None:
    """With --user nothing is wrong with such a command."""
    done = run_mpsctl(
        node.socket, "run", *SHARE, "--user", "nobody", "--", "setpriv", "--reuid=65534", "--keep-groups", "true"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_no_token_on_a_screen(node: Node) -> None:
    """A lease's readable output has its environment, without the token."""
    lease = json.loads(node.mpsctl("admit", *SHARE, "--pid", str(os.getpid()), "-o", "json").stdout)
    assert lease["env"]["MPSD_LEASE_TOKEN"]
    for command in (("admit", *SHARE, "--pid", str(os.getpid())), ("show", lease["id"]), ("attach", lease["id"])):
        done = node.mpsctl(*command)
        assert "MPSD_LEASE=" in done.stdout
        assert "TOKEN" not in done.stdout


def test_a_time_to_live_that_nobody_asked_for(short_tmp: Path) -> None:
    """A command whose lease a quota ends before the command does gets a warning, and a remedy."""
    env = {"CUDA_VISIBLE_DEVICES": "GPU-1", "MPSD_LEASE": "lease-1"}
    lease = {"id": "lease-1", "state": "granted", "because": "", "gpus": ["GPU-1"], "env": env, "expires": "2026-11-21"}
    for options, told in (([], True), (["--ttl", "9"], False)):
        with answering(short_tmp / f"s{told}", http(lease, "201 Created")):
            done = run_mpsctl(short_tmp / f"s{told}", "run", *SHARE, *options, "--", "printenv", "MPSD_LEASE")
        assert (done.returncode, done.stdout) == (0, "lease-1\n")
        assert ("lease-1 ends at 2026-11-21 unless it is renewed: mpsctl renew lease-1" in done.stderr) is told


def test_signals_to_a_command(node: Node) -> None:
    """A signal to mpsctl reaches the command, since they are one process; so does its death by a signal."""
    script = (
        "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5));"
        "print('up', flush=True); signal.pause()"
    )
    for number, status in ((signal.SIGTERM, 5), (signal.SIGKILL, -signal.SIGKILL)):
        process = start_mpsctl(node.socket, "run", *SHARE, "--", sys.executable, "-c", script)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            process.send_signal(number)
            assert process.wait(timeout=60) == status
        finally:
            end(process)


def test_signals_are_as_they_were(node: Node) -> None:
    """A command has the same signals ignored and blocked with mpsctl as without it, in spite of Python's defaults."""
    command = ["grep", "-E", "^Sig(Ign|Blk)", "/proc/self/status"]
    bare = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    done = node.mpsctl("run", *SHARE, "--", *command)
    assert done.stdout == bare


def test_an_ignored_interrupt_stays_ignored(node: Node) -> None:
    """A command started with SIGINT ignored, as by `nohup` or `&` in a script, keeps ignoring it."""
    script = 'trap "" INT; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, "sh", sys.executable, "-m", "mpsd.cli.main", "--socket", str(node.socket),
         "run", *SHARE, "--", "grep", "SigIgn", "/proc/self/status"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(done.stdout.split()[1], 16) & 1 << (signal.SIGINT - 1)


def test_options_of_a_command(node: Node) -> None:
    """Options after the command's name belong to the command, with or without `--` before it."""
    for dashes in ([], ["--"]):
        done = node.mpsctl("run", *SHARE, *dashes, "printf", "%s\n", "--threads", "-o", "--", "--help")
        assert done.stdout == "--threads\n-o\n--\n--help\n"


@pytest.mark.parametrize(
    ("command", "status", "reason"),
    [
        pytest.param("no-such-command", 127, "No such file or directory", id="not in PATH"),
        pytest.param("/no/such/command", 127, "No such file or directory", id="no file"),
        pytest.param("/", 126, "Permission denied", id="a directory"),
        pytest.param("plain", 126, "Permission denied", id="not executable"),
        pytest.param("nonsense", 126, "Exec format error", id="no program"),
    ],
)
def test_a_command_that_cannot_run(node: Node, short_tmp: Path, command: str, status: int, reason: str) -> None:
    """The exit status is that of a shell, and no lease is left, instead of one that ends with its holder."""
    for name, mode in (("plain", 0o644), ("nonsense", 0o755)):
        (short_tmp / name).write_text("nonsense")
        (short_tmp / name).chmod(mode)
    if command in {"plain", "nonsense"}:
        command = str(short_tmp / command)
    done = node.mpsctl("run", *SHARE, "--", command)
    assert (done.returncode, done.stdout) == (status, "")
    first, hint = done.stderr.splitlines()
    assert first == f"mpsctl: {command}: {reason}"
    assert hint.startswith("  hint: ")
    assert node.leases() == []


def test_a_command_that_is_refused(node: Node, short_tmp: Path) -> None:
    """A command whose lease is refused does not run."""
    done = node.mpsctl("run", "--threads", "100", "--memory", "900GiB", "--", "touch", str(short_tmp / "ran"))
    assert done.returncode == 65
    assert not (short_tmp / "ran").exists()
