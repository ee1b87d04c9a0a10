"""The fixtures fail leaking tests: a run of pytest with tests that leak, and the reports about each."""

import re
import uuid
from pathlib import Path
from typing import Final

import pytest

from tests.gate.inner import inner_pytest
from tests.harness import look_at, wait_until

pytestmark = pytest.mark.thorough

LEAKING: Final = '''
    import os
    import socket
    import subprocess
    import sys
    import tempfile
    from pathlib import Path
    from textwrap import dedent

    import pytest

    SLEEP = "import time; print(flush=True); time.sleep(60)"

    def start(*arguments, **environment):
        pipe = subprocess.Popen(
            [sys.executable, "-c", *arguments], env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
        )
        pipe.stdout.readline()
        pipe.stdout.close()
        return pipe

    def orphan(*arguments, **environment):
        # A child starts a grandchild and exits: the grandchild then has another parent.
        program = (
            "import os, subprocess, sys;"
            "child = subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], stdout=-1, start_new_session=True);"
            "child.stdout.readline(); print(child.pid, flush=True); os._exit(0)"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, SLEEP, *arguments], env={**os.environ, **environment},
            stdout=subprocess.PIPE, check=True,
        )
        record(int(done.stdout))

    def record(pid):
        with open("PIDS", "a") as file:
            print(pid, file=file)

    KEPT = []

    def test_child():
        child = start(SLEEP)
        record(child.pid)
        KEPT.append(child)

    def test_zombie():
        child = subprocess.Popen(["true"])
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        KEPT.append(child)

    def test_orphan_by_environment(short_tmp):
        orphan(CUDA_MPS_PIPE_DIRECTORY=str(short_tmp / "pipe"))

    def test_orphan_by_argument(tmp_path):
        orphan(str(tmp_path / "pipe"))

    def test_descriptor(short_tmp):
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(short_tmp / "leaked.sock"))
        KEPT.append(listening)

    def test_file_in_known_place():
        Path("/tmp/KNOWN").mkdir()

    def test_temporary_file():
        tempfile.mkdtemp(prefix="forgotten-")

    def test_clean(short_tmp, tmp_path):
        (short_tmp / "folder").mkdir(mode=0o500)
        (tmp_path / "file").write_text("kept by pytest")
        assert len(str(short_tmp)) < 30
        child = start(SLEEP, CUDA_MPS_PIPE_DIRECTORY=str(short_tmp))
        child.kill()
        child.wait()

    REAPS = """
    import os, subprocess, time
    input()
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    print(flush=True)
    time.sleep(0.1)
    child.wait()
    """

    @pytest.fixture(scope="module")
    def reaper():
        with subprocess.Popen([sys.executable, "-c", dedent(REAPS)], stdin=-1, stdout=-1) as process:
            yield process

    def test_reaped_by_another(reaper):
        # A process has ended, and its parent is about to reap it.
        reaper.stdin.write(b"\\n")
        reaper.stdin.flush()
        reaper.stdout.readline()

    def test_last():
        # The leaks of other tests are not reported a second time.
        pass
'''

EXPECTED: Final = {
    "test_child": r"process \d+ \(a child\): .*time\.sleep",
    "test_zombie": r"process \d+ \(a child, ended and never waited for\): true",
    "test_orphan_by_environment": r"process \d+ \(re-parented to \d+, pipe directory /.*/pipe\): .*time\.sleep",
    "test_orphan_by_argument": r"process \d+ \(re-parented to \d+\): .*time\.sleep.*/pipe",
    "test_descriptor": r"file descriptor \d+: socket:\[\d+\] \(a unix socket at /.*/leaked\.sock\)",
    "test_file_in_known_place": r"file /tmp/mpsd-leaked-\w+",
    "test_temporary_file": r"file /.*/forgotten-\w+",
}
"""The report about each leaking test."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Run the leaking tests in a separate pytest; return its output, and the file with the leaked pids."""
    folder = tmp_path_factory.mktemp("leaking")
    known, leaked = Path(f"/tmp/mpsd-leaked-{uuid.uuid4().hex}"), folder / "pids"
    text = LEAKING.replace("/tmp/KNOWN", str(known)).replace("PIDS", str(leaked))
    try:
        return inner_pytest(folder, text, "-vv", planted=known.name), leaked
    finally:
        if known.exists():
            known.rmdir()


@pytest.mark.parametrize("test", EXPECTED)
def test_a_leaking_test_is_red(run: tuple[str, Path], test: str) -> None:
    """A test that passes and leaves something behind is an error, which names what it left."""
    said, _ = run
    section = re.search(rf"_ ERROR at teardown of {test} _.*?(?=\n___|\n===)", said, re.DOTALL)
    assert section is not None, said
    assert "this test left behind:" in section.group()
    assert re.search(EXPECTED[test], section.group()), section.group()


def test_nothing_else_is(run: tuple[str, Path]) -> None:
    """A test that ends what it started passes, even after leaking tests, and what those left is ended."""
    said, leaked = run
    assert f" {len(EXPECTED) + 3} passed, {len(EXPECTED)} errors" in said, said
    left = [int(line) for line in leaked.read_text(encoding="utf-8").split()]
    assert len(left) == 3
    for pid in left:
        wait_until(lambda: (process := look_at(pid)) is None or process.zombie, what=f"{pid} to be gone")  # noqa: B023
