"""mpsctl at a socket where another process listens: it trusts only processes that the kernel identifies as trusted."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.cli.conftest import run_mpsctl
from tests.daemon.caller import needs_root

pytestmark = [needs_root, pytest.mark.thorough]

ANN: Final = 2651

ANSWERS: Final = """
import json, os, socket, sys
path, uid, answers = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
listener.listen()
print(flush=True)
while True:
    connection, _ = listener.accept()
    with connection:
        request = connection.recv(65536)
        if request:
            print(request.split()[1].decode(), flush=True)
            body = json.dumps(answers.get(request.split()[1].decode(), {})).encode()
            connection.sendall(b"HTTP/1.1 201 Created\\r\\nContent-Length: %d\\r\\n" % len(body))
            connection.sendall(b"Connection: close\\r\\n\\r\\n" + body)
"""
"""Listens as a user, and answers like a hostile mpsd."""

ENVIRONMENT: Final = {"CUDA_VISIBLE_DEVICES": "GPU-1", "CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps"}


def lease(**environment: str) -> dict[str, Any]:
    """Return a lease in the API's format, with this environment added."""
    variables = {**ENVIRONMENT, **environment}
    return {
        "id": "lease-1",
        "state": "granted",
        "because": "",
        "gpus": ["GPU-1"],
        "env": variables,
        "shares": [{"env": variables}],
        "expires": None,
    }


@contextmanager
def listening(path: Path, uid: int, answers: dict[str, Any]) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-I", "-c", ANSWERS, str(path), str(uid), json.dumps(answers)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        path.chmod(0o666)
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


class TestAnother:
    """A user's own program at the socket that root was given."""

    @pytest.fixture
    def listener(self, short_tmp: Path) -> Iterator["subprocess.Popen[bytes]"]:
        with listening(short_tmp / "s", ANN, {"/v1/leases": lease(), "/v1/leases/lease-1": lease()}) as process:
            yield process

    @pytest.mark.parametrize(
        "arguments",
        [
            ["run", "--threads", "5", "--memory", "1GiB", "--", "true"],
            ["admit", "--threads", "5", "--memory", "1GiB", "-o", "env"],
            ["show", "lease-0000000001", "-o", "env"],
            ["release", "lease-1"],
            ["status"],
            ["events"],
            ["hold", "gpu0"],
        ],
        ids=lambda arguments: arguments[0],
    )
    def test_is_asked_nothing(self, listener: "subprocess.Popen[bytes]", short_tmp: Path, arguments: list[str]) -> None:
        """mpsctl sends nothing: it names the listener and its user, says how to trust it, and exits with 77."""
        done = run_mpsctl(short_tmp / "s", *arguments)
        assert done.returncode == 77, done
        assert f"uid {ANN}" in done.stderr
        assert "[untrusted_socket]" in done.stderr
        assert f"--trust-uid {ANN}" in done.stderr
        assert not done.stdout or done.stdout == "(exit 77)\n"
        listener.kill()
        assert listener.stdout is not None
        assert listener.stdout.read() == b""

    @pytest.mark.parametrize("how", ["option", "variable"])
    @pytest.mark.usefixtures("listener")
    def test_is_trusted_where_that_is_said(self, short_tmp: Path, how: str) -> None:
        """A user that an option or a variable names is trusted."""
        options = ("--trust-uid", str(ANN)) if how == "option" else ()
        environment = {**os.environ, **({"MPSD_TRUST_UID": f"17 {ANN}"} if how == "variable" else {})}
        arguments = ("run", "--threads", "5", "--memory", "1GiB", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
        done = run_mpsctl(short_tmp / "s", *options, *arguments, env=environment)
        assert (done.returncode, done.stdout) == (0, "GPU-1\n"), done.stderr

    @pytest.mark.usefixtures("listener")
    def test_a_user_at_his_own(self, short_tmp: Path) -> None:
        """A user trusts a listener of the same user: that is the user's own mpsd."""
        short_tmp.chmod(0o711)
        become = f"import os; os.setresgid(*[{ANN}] * 3); os.setresuid(*[{ANN}] * 3)"
        ask = f"print(Client({str(short_tmp / 's')!r}).get('/v1/leases/lease-1')['id'])"
        command = [sys.executable, "-c", f"from mpsd.client import Client; {become}; {ask}"]
        root = Path(__file__).parents[2]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=root)
        assert (done.returncode, done.stdout) == (0, "lease-1\n"), done.stderr


class TestEnvironment:
    """The variables that are taken from a lease, whichever mpsd granted it."""

    @pytest.mark.parametrize("name", ["LD_PRELOAD", "PATH", "BASH_ENV", "CUDA_INJECTION64_PATH", "CUDA\nX", "XCUDA_A"])
    @pytest.mark.parametrize("command", ["run", "admit", "show"])
    def test_other_names(self, short_tmp: Path, name: str, command: str) -> None:
        """A name that MPS, the driver and mpsd do not use is refused with a message, and with it the lease."""
        odd = lease(**{name: "/tmp/evil.so"})
        arguments = {
            "run": ("run", "--threads", "5", "--memory", "1GiB", "--", "true"),
            "admit": ("admit", "--threads", "5", "--memory", "1GiB", "-o", "env"),
            "show": ("show", "lease-0000000001", "-o", "env"),
        }[command]
        with listening(short_tmp / "s", 0, {"/v1/leases": odd, "/v1/leases/lease-0000000001": odd}):
            done = run_mpsctl(short_tmp / "s", *arguments)
        assert done.returncode == 1, done
        assert name.partition("\n")[0] in done.stderr
        assert "evil" not in done.stdout

    def test_names_of_mps(self, short_tmp: Path) -> None:
        """Names of CUDA, NVIDIA and mpsd are accepted."""
        odd = lease(NVIDIA_VISIBLE_DEVICES="0", MPSD_NEW="1")
        with listening(short_tmp / "s", 0, {"/v1/leases": odd}):
            done = run_mpsctl(short_tmp / "s", "run", "--threads", "5", "--memory", "1GiB", "--", "env")
        assert {"NVIDIA_VISIBLE_DEVICES=0", "MPSD_NEW=1"} <= {*done.stdout.splitlines()}


class TestDoctor:
    """`mpsctl doctor --fix` as root, where another user's mpsd describes the node."""

    def config(self, path: Path) -> dict[str, Any]:
        """Return the settings that this user's mpsd reports."""
        return {"config": {"paths": {"runtime_dir": str(path), "state_dir": f"{path}/s", "log_dir": f"{path}/l"}}}

    @pytest.mark.parametrize("trusted", [False, True])
    def test_opens_nothing_of_its_choice(self, short_tmp: Path, trusted: bool) -> None:  # noqa: FBT001 - a parameter
        """No path of its choice is opened, made or written, even where that mpsd is trusted."""
        secret = short_tmp / "secret"
        secret.mkdir(mode=0o700)
        own = short_tmp / "own.toml"
        own.write_text(
            f'[paths]\nruntime_dir = "{short_tmp}/r"\nstate_dir = "{short_tmp}/t"\nlog_dir = "{short_tmp}/g"\n'
        )
        status = {"version": "0", "healthy": True, "because": "", "headline": "", "simulated": True, "reasons": []}
        more: dict[str, object] = {"warnings": [], "violations": [], "gpus": [], "daemons": []}
        answers = {"/v1/status": {**status, **more}, "/v1/config": self.config(secret)}
        options = ("--trust-uid", str(ANN)) if trusted else ()
        with listening(short_tmp / "s", ANN, answers) as process:
            done = run_mpsctl(short_tmp / "s", *options, "doctor", "--fix", "--config", f"{own}", "-o", "json")
            process.kill()
            assert process.stdout is not None
            assert bool(process.stdout.read()) == trusted
        assert stat.S_IMODE(secret.stat().st_mode) == 0o700
        assert list(secret.iterdir()) == []
        if trusted:
            assert done.returncode == 77
            assert "--fix" in done.stderr
        else:
            (check,) = [each for each in json.loads(done.stdout)["checks"] if each["id"] == "mpsd"]
            assert (check["verdict"], f"uid {ANN}" in check["because"]) == ("fail", True)
