"""`mpsd demo` and `mpsd check`, as new users and operators call them."""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import IO, Any

import pytest

from mpsd.demo import STEPS
from tests.harness import below, wait_until
from tests.node import Node
from tests.terminals import Terminal
from tests.tools import needed

pytestmark = pytest.mark.thorough

_ROOT = Path(__file__).parents[2]
_MPSD = (sys.executable, "-m", "mpsd")


def check(path: Path | None, **options: Any) -> "subprocess.CompletedProcess[str]":
    command = [*_MPSD, "check", *(["--config", str(path)] if path else [])]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=30, check=False, **options)


class TestDemo:
    """A node that every user can try, and that leaves nothing behind."""

    @staticmethod
    def read_until(output: IO[str], last: str) -> str:
        """Read lines until one begins with `last`.

        The test's own time limit ends a wait for a line that never comes.
        """
        lines: list[str] = []
        while not lines or not lines[-1].startswith(last):
            line = output.readline()
            assert line, "".join(lines)
            lines.append(line)
        return "".join(lines)

    def test_demo(self, short_tmp: Path) -> None:
        """The demo prints what to try, its node is healthy, and at Ctrl-C it exits with 0 and removes everything."""
        with (short_tmp / "log").open("w") as log:
            demo = subprocess.Popen(
                [*_MPSD, "demo"],
                cwd=_ROOT,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "TMPDIR": str(short_tmp)},
            )
        try:
            assert demo.stdout is not None
            said = self.read_until(demo.stdout, "Ctrl-C")
            (socket,) = re.findall(r"export MPSD_SOCKET=(\S+)", said)
            root = Path(socket).parents[1]
            assert short_tmp in root.parents
            node = Node(root=root, simulate=None)
            assert node.socket == Path(socket)
            wait_until(lambda: node.get("/v1/status").json["healthy"], what="the demo to be healthy")
            assert [
                (daemon["state"], Path(f"/proc/{daemon['pid']}").exists()) for daemon in node.daemons().values()
            ] == [
                ("ready", True),
                ("ready", True),
            ]
            # The suggested commands work.
            environment = dict(os.environ)
            for name, value in re.findall(r"(MPSD_SOCKET|PATH)=(\S+)", said):
                environment[name] = value.replace("$PATH", os.environ["PATH"])
            tried = re.findall(r"^ \d\. (mpsctl .*)$", said, re.MULTILINE)
            assert tried == [*STEPS]
            statuses = []
            for each in tried:
                done = subprocess.run(
                    ["sh", "-c", each.replace("sleep 600 &", "true")], env=environment, cwd="/", text=True,
                    stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False,
                )  # fmt: skip
                statuses.append(done.returncode)
            assert statuses == [0] * 5, tried
            # Doctor does not take it for a service: the node has its own paths and is private, which is no failure.
            checks = ("--only", "configuration", "--only", "directories")
            examined = subprocess.run(
                [sys.executable, "-m", "mpsd.cli.main", "--socket", socket, "doctor", "-o", "json", *checks],
                cwd=_ROOT, capture_output=True, text=True, timeout=30, check=False,
            )  # fmt: skip
            verdicts = [(each["id"], each["verdict"]) for each in json.loads(examined.stdout)["checks"]]
            assert (examined.returncode, verdicts) == (0, [("configuration", "ok"), ("directories", "ok")]), (
                examined.stdout
            )
            demo.send_signal(signal.SIGINT)
            assert demo.wait(timeout=30) == 0, (short_tmp / "log").read_text()
        finally:
            demo.kill()
            demo.communicate(timeout=10)
        assert not root.exists()
        assert below(short_tmp) == []
        assert [path.name for path in short_tmp.iterdir()] == ["log"]

    @staticmethod
    def environment(short_tmp: Path, shell: str) -> dict[str, str]:
        """Return an environment with a home directory of the test, in which a user has this shell."""
        (short_tmp / "home").mkdir()
        (short_tmp / "home" / ".zshrc").touch()
        home = str(short_tmp / "home")
        own = {"TMPDIR": str(short_tmp), "HOME": home, "XDG_RUNTIME_DIR": home, "SHELL": needed(shell, shell)}
        return {**os.environ, **own}

    @pytest.mark.thorough
    def test_a_shell(self, short_tmp: Path) -> None:
        """On a terminal the demo opens a shell, in which each suggested step works; the node ends with the shell."""
        environment = self.environment(short_tmp, "bash")
        (short_tmp / "home" / ".bashrc").write_text("PATH=/usr/bin:/bin PS1='mine> '")
        with Terminal.running([*_MPSD, "demo"], environment, cwd=_ROOT) as terminal:
            start = terminal.wait_for(r"\(mpsd demo\) mine> $").end()
            shown = terminal.text.splitlines()
            assert len(shown) < 24
            assert max(map(len, shown)) < 80
            assert "[" not in terminal.text, "its log is shown"
            terminal.type("mpsctl status\n")
            start = terminal.wait_for(r"^healthy.*", behind=start).end()
            terminal.type("mpsctl run --fraction 0.25 -- gpu-client\n")
            start = terminal.wait_for(
                r"^pid \d+ is a client of MPS server .*25 % of.*20352MiB\ngpu> ", behind=start
            ).end()
            for typed, answer in (
                ("alloc 1GiB", "1GiB of device memory allocated"),
                ("alloc 40GiB", "CUDA error 2: CUDA_ERROR_OUT_OF_MEMORY"),
                ("frobnicate", ".*try: help"),
                ("help", "alloc SIZE .*"),
            ):
                terminal.type(f"{typed}\n")
                start = terminal.wait_for(f"^{answer}\n(?s:.*?)gpu> ", behind=start).end()
            terminal.type("exit\n")
            start = terminal.wait_for("mine> $", behind=start).end()
            terminal.type("mpsctl run --fraction 0.5 --name job -- sleep 600 &\n")
            terminal.wait_for(r"^\[1\] \d+", behind=start)
            terminal.type("until mpsctl leases | grep ' job$'; do :; done\n")
            start = terminal.wait_for(r"^lease-\w+ +granted +0 +50% .* job$", behind=start).end()
            terminal.type("mpsctl release jo\t; kill %1\n")  # Tab completes the name
            start = terminal.wait_for(r"^lease-\w+ is released", behind=start).end()
            terminal.type("exit 3\n")
            assert terminal.wait_for_the_end() == 3
            assert "sudo mpsd run" in terminal.text[start:]
        assert [path.name for path in short_tmp.iterdir()] == ["home"]

    @pytest.mark.thorough
    @pytest.mark.parametrize(("shell", "typed"), [("dash", "mpsctl leases\n"), ("zsh", "mpsctl lea\t\n")])
    def test_other_shells(self, short_tmp: Path, shell: str, typed: str) -> None:
        """In every supported shell, mpsctl finds the node, and the prompt shows the demonstration; zsh completes it."""
        with Terminal.running([*_MPSD, "demo"], self.environment(short_tmp, shell), cwd=_ROOT) as terminal:
            start = terminal.wait_for(r"\(mpsd demo\)").end()
            terminal.type(typed)
            terminal.wait_for(r"no leases", behind=start)
            terminal.type("exit\n")
            terminal.wait_for_the_end()
        assert list(short_tmp.glob("mpsd-demo-*")) == []

    def test_no_such_shell(self, short_tmp: Path) -> None:
        """A shell that cannot be started is named, with what to do, and the node is gone."""
        environment = {**os.environ, "TMPDIR": str(short_tmp), "SHELL": "/no/such/shell"}
        with Terminal.running([*_MPSD, "demo"], environment, cwd=_ROOT) as terminal:
            assert terminal.wait_for_the_end() == 78
            assert "the shell /no/such/shell cannot be started: No such file or directory" in terminal.text
        assert list(short_tmp.iterdir()) == []

    @pytest.mark.thorough
    @pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL], ids=lambda number: number.name)
    def test_a_terminal_that_goes(self, short_tmp: Path, number: signal.Signals) -> None:
        """When its terminal closes, or the demo is killed, the node ends too, with its control daemons."""
        with Terminal.running([*_MPSD, "demo"], self.environment(short_tmp, "bash"), cwd=_ROOT) as terminal:
            terminal.wait_for(r"\(mpsd demo\)")
            (socket,) = short_tmp.glob("mpsd-demo-*/run/mpsd.sock")
            if number is signal.SIGKILL:
                terminal.process.kill()
        wait_until(lambda: not socket.exists(), what="the node to end")
        wait_until(
            lambda: not below(short_tmp),
            what="its control daemons to end",
        )
        wait_until(lambda: [path.name for path in short_tmp.iterdir()] == ["home"], what="its files to go")


class TestStop:
    """The state that Ctrl-C leaves behind on `mpsd run`, and the command that removes it."""

    @pytest.mark.thorough
    def test_what_is_left(self, short_tmp: Path) -> None:
        """On a terminal mpsd names what it leaves running and the command that stops it; that command works."""
        root = short_tmp / "n"
        command = [*_MPSD, "run", "--root", f"{root}", "--simulate", "1"]
        node = Node(root=root, simulate=None)
        with Terminal.running(command, os.environ, cwd=_ROOT) as terminal:
            wait_until(lambda: node.socket.exists() and node.get("/v1/status").json["healthy"], what="the node")
            (daemon,) = node.daemons().values()
            terminal.type("\x03")
            assert terminal.wait_for_the_end() == 0
            said = terminal.wait_for(
                r"^mpsd: 1 of 1 control daemons keep running.*\n  to stop them .*: mpsd (stop .*)$"
            )
        assert Path(f"/proc/{daemon['pid']}").exists()
        done = subprocess.run(
            [*_MPSD, *said.group(1).split()], cwd=_ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        wait_until(lambda: not Path(f"/proc/{daemon['pid']}").exists(), what="the control daemon to end")

    @pytest.mark.thorough
    def test_one_that_runs(self, short_tmp: Path) -> None:
        """A running mpsd is ended first, with all its processes, which is no death; without one, it succeeds too."""
        root = short_tmp / "n"
        options = ["--root", f"{root}", "--simulate", "1"]
        node = Node(root=root, simulate=None)
        with Terminal.running([*_MPSD, "run", *options], os.environ, cwd=_ROOT) as terminal:
            wait_until(lambda: node.socket.exists() and node.get("/v1/status").json["healthy"], what="the node")
            (daemon,) = node.daemons().values()
            done = subprocess.run(
                [*_MPSD, "stop", *options], cwd=_ROOT, capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, done.stderr
            assert terminal.wait_for_the_end() == 0
        logged = [json.loads(line) for line in done.stderr.splitlines()]
        (down,) = (each for each in logged if each["event"] == "daemon_state" and each["state"] == "down")
        assert down["on"] == "ended"
        wait_until(lambda: not Path(f"/proc/{daemon['pid']}").exists(), what="the control daemon to end")
        assert not node.socket.exists()
        done = subprocess.run(
            [*_MPSD, "stop", *options], cwd=_ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr


class TestCheck:
    """The check that an operator runs before a reload."""

    def test_unknown_names(self, tmp_path: Path) -> None:
        """A user or group that does not exist on this machine fails the check, which names it."""
        path = tmp_path / "mpsd.toml"
        for text, names in (
            ('[roles]\nadmins = ["nobody-by-this-name"]\n', "nobody-by-this-name"),
            ('[roles]\nusers = ["%nogroup-by-this-name", "root"]\n', "%nogroup-by-this-name"),
            ('[api]\ngroup = "nogroup-by-this-name"\n', "%nogroup-by-this-name"),
        ):
            path.write_text(text)
            done = check(path)
            assert (done.returncode, done.stdout) == (78, "")
            assert f"the user database has no {names}: " in done.stderr
            assert "hint: correct the names" in done.stderr
        path.write_text('[roles]\nadmins = ["root", "12345"]\n[api]\ngroup = "root"\n')
        assert check(path).returncode == 0

    def test_it_prints_the_effective_settings(self, tmp_path: Path) -> None:
        """The check exits with 0 and prints a configuration equal to the settings in force, with their meaning."""
        path, again = tmp_path / "mpsd.toml", tmp_path / "again.toml"
        path.write_text(
            '[limits]\nactive_thread_percentage = 12.5\npinned_device_mem_limit = "1.5GiB"\n'
            "[admission]\nmemory_reserve = 1000000\n"
        )
        done = check(path)
        assert (done.returncode, done.stderr) == (0, "")
        printed = tomllib.loads(done.stdout)
        assert printed["limits"]["active_thread_percentage"] == 12.5
        assert printed["api"]["mode"] == "0666"
        again.write_text(done.stdout)
        assert check(again).stdout == done.stdout

    def test_what_is_wrong(self, tmp_path: Path) -> None:
        """An invalid or missing file ends the check with 78, a sentence and a hint, and no output."""
        path = tmp_path / "mpsd.toml"
        path.write_text("[limits]\nactive_thread_percentage = 150\n")
        for each in (path, tmp_path / "absent.toml", tmp_path):
            done = check(each)
            assert (done.returncode, done.stdout) == (78 if each != tmp_path else done.returncode, "")
            assert done.returncode != 0
            assert done.stderr
        path.write_text(f'[paths]\nruntime_dir = "/run/{"x" * 80}"\n')
        refused = check(path)
        assert (refused.returncode, refused.stdout) == (78, "")
        assert "/mps/gpu0/control_privileged has 113 bytes" in refused.stderr


def test_mpsd_imports_no_library_of_top(short_tmp: Path) -> None:
    """A running mpsd has imported nothing that draws, not even what structlog would import of it."""
    node = Node(root=short_tmp, simulate=1, arguments=("--stop-daemons-on-exit",))
    program = [sys.executable, "-X", "importtime", *node.command[1:]]
    with node.stderr.open("wb") as log, subprocess.Popen(program, cwd=_ROOT, stderr=log) as mpsd:
        wait_until(lambda: node.socket.exists() and node.get("/healthz").status == 200, what="mpsd to answer")
        node.get("/metrics")
        mpsd.terminate()
    imported = re.findall(r"^import time:.*\| +([\w.]+)$", node.stderr.read_text(), re.MULTILINE)
    assert "structlog" in imported
    assert [
        each for each in imported if each.startswith(("textual", "rich.", "pygments"))
    ] == []  # rich itself: refused
