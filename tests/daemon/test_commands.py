"""`mpsd demo` and `mpsd check`, as a newcomer and an operator call them."""

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

from tests.harness import look_at, pids, wait_until
from tests.node import Node

_ROOT = Path(__file__).parents[2]
_MPSD = (sys.executable, "-m", "mpsd")


def check(path: Path | None, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run `mpsd check` on a configuration file."""
    command = [*_MPSD, "check", *(["--config", str(path)] if path else [])]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=30, check=False, **options)


class TestDemo:
    """A node that anybody can try, and that leaves nothing behind."""

    @staticmethod
    def read_until(output: IO[str], last: str) -> str:
        """Read lines until one begins so; the test's own time limit ends the wait for one that never comes."""
        lines: list[str] = []
        while not lines or not lines[-1].startswith(last):
            line = output.readline()
            assert line, "".join(lines)
            lines.append(line)
        return "".join(lines)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_demo(self, short_tmp: Path, number: signal.Signals) -> None:
        """It says what to try, its node is healthy, and at Ctrl-C it ends with 0 and takes everything with it."""
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
            # What it says to try is there to be tried.
            tried = [
                line.split("&")[0].split("|")[0].split()
                for line in said.splitlines()
                if " status" in line or " run " in line
            ]
            assert len(tried) == 5
            done = subprocess.run(
                [sys.executable, "-m", "mpsd.cli.main", *tried[1][1:]],
                env={**os.environ, "MPSD_SOCKET": socket},
                cwd=_ROOT, capture_output=True, text=True, timeout=30, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2G" in done.stdout
            # And doctor does not take it for a service: it has paths of its own, and is private, which is no failure.
            checks = ("--only", "reload", "--only", "traverse")
            examined = subprocess.run(
                [sys.executable, "-m", "mpsd.cli.main", "--socket", socket, "doctor", "-o", "json", *checks],
                cwd=_ROOT, capture_output=True, text=True, timeout=30, check=False,
            )  # fmt: skip
            verdicts = [(each["id"], each["verdict"]) for each in json.loads(examined.stdout)["checks"]]
            assert (examined.returncode, verdicts) == (0, [("reload", "ok"), ("traverse", "warn")]), examined.stdout
            demo.send_signal(number)
            assert demo.wait(timeout=30) == 0, (short_tmp / "log").read_text()
        finally:
            demo.kill()
            demo.communicate(timeout=10)
        assert not root.exists()
        left = [
            found
            for pid in pids()
            if (found := look_at(pid)) is not None and found.pipe_directory.startswith(str(short_tmp))
        ]
        assert left == []
        assert [path.name for path in short_tmp.iterdir()] == ["log"]


class TestCheck:
    """What an operator runs before a reload."""

    def test_it_prints_the_effective_settings(self, tmp_path: Path) -> None:
        """It exits with 0 and prints a configuration that asks for just what is in force, with its meaning."""
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

    def test_defaults(self, tmp_path: Path) -> None:
        """An empty file asks for the defaults."""
        path = tmp_path / "mpsd.toml"
        path.write_text("")
        done = check(path)
        assert done.returncode == 0
        assert tomllib.loads(done.stdout)["paths"]["runtime_dir"] == "/run/mpsd"

    def test_what_is_wrong(self, tmp_path: Path) -> None:
        """A file that cannot be meant, or is not there, ends it with 78, a sentence and a hint, and no output."""
        path = tmp_path / "mpsd.toml"
        path.write_text("[limits]\nactive_thread_percentage = 150\n")
        for each in (path, tmp_path / "absent.toml", tmp_path):
            done = check(each)
            assert (done.returncode, done.stdout) == (78 if each != tmp_path else done.returncode, "")
            assert done.returncode != 0
            assert done.stderr
        assert f"mpsd: {path}: limits.active_thread_percentage = 150" in check(path).stderr
        path.write_text(f'[paths]\nruntime_dir = "/run/{"x" * 80}"\n')
        refused = check(path)
        assert (refused.returncode, refused.stdout) == (78, "")
        assert "/mps/gpu0/control_privileged has 113 bytes" in refused.stderr
