"""The fixtures of every test: a directory with a short path, and the check that nothing was left behind."""

import contextlib
import gc
import importlib
import os
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Final

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests import browser, cluster, launchers, real, systemd
from tests.fork_server import ForkServer, running_fork_server
from tests.gpu import machine
from tests.harness import Watch, kill, remove_tree


def pytest_xdist_auto_num_workers() -> int:
    """Run four more files at a time than there are processors: most tests wait for two thirds of their time."""
    return (os.cpu_count() or 1) + 4


_GATES_WITH_PROGRAMS: Final = {"test_harness.py", "test_leaks.py", "test_lint.py", "test_shell.py", "test_types.py"}
"""The gates that run a program; all others parse mpsd's source."""


class _Scheduling(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives one file after the other to each worker, and all gates that parse the source to one: it parses it once."""

    def _split_scope(self, nodeid: str) -> str:
        directory, _, file = super()._split_scope(nodeid).rpartition("/")
        parses = directory.startswith("tests/gate") and file not in _GATES_WITH_PROGRAMS
        return "tests/gate" if parses else f"{directory}/{file}"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _Scheduling | None:
    """Return the scheduler of a usual run."""
    return _Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


HEAVY: Final = ("thorough", "browser", "machine", "container", "cluster", "clients", "launchers", "chaos", "measuring")
"""Marks of the tests that take minutes together, boot or build something, try random steps, or measure.

A run that names neither a path nor a mark leaves them out. `.ci/run` runs each of them.
"""

_LIGHT: Final = " and ".join(f"not {mark}" for mark in HEAVY)


def pytest_configure(config: pytest.Config) -> None:
    """Leave out the heavy suites and most examples of properties if nothing was chosen; let tests be interrupted."""
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.markexpr:
        config.option.markexpr = _LIGHT
    if config.option.markexpr == _LIGHT:  # in each worker too, which gets the options of the run
        hypothesis.settings.load_profile("light")
    _start_as_from_a_terminal()
    # Where it is set, every program that a test starts would compile mpsd anew, twice as long as it runs.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_collection(session: pytest.Session) -> None:
    """Import the tests, in each worker from another one on, so that the workers compile each module once.

    In a new checkout they would otherwise all compile the same modules at the same time.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    root = Path(__file__).parent
    names = [
        ".".join(path.with_suffix("").parts)
        for path in sorted(each.relative_to(root.parent) for each in root.rglob("test_*.py"))
    ]
    first = len(names) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for name in (*names[first:], *names[:first]):
        # pytest imports a faulty module again when it collects it, and reports the error then.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(name)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Return a line that names the suites left out."""
    left_out = [mark for mark in HEAVY if f"not {mark}" in config.option.markexpr]
    return [f"left out: tests with the marks {', '.join(left_out)}; to run them too: pytest tests"] if left_out else []


def _start_as_from_a_terminal() -> None:
    """Reset signals to their defaults: signals that `nohup`, or an `&`, ignores would be ignored in all tests."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


# A property is not a measurement: a slow example on a busy machine is no failure. A failing example is printed for
# replay.
hypothesis.settings.register_profile("mpsd", hypothesis.settings(), deadline=None, print_blob=True)
hypothesis.settings.register_profile("light", hypothesis.settings.get_profile("mpsd"), max_examples=20)
hypothesis.settings.load_profile("mpsd")

_numbers = count(1)
_reported: set[str] = set()


@pytest.fixture(scope="session", autouse=True)
def private_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make a private directory of this run with a short path, and use it for temporary files.

    Programs that the tests start inherit it as TMPDIR, so files in it were left by this run only. Other users may
    traverse it (0711): an MPS client runs as another user.
    """
    kept_by_pytest = tmp_path_factory.getbasetemp()  # decided now, while TMPDIR is still the user's
    parent = "/tmp" if os.access("/tmp", os.W_OK | os.X_OK) else None
    root = Path(tempfile.mkdtemp(prefix="mt-", dir=parent))
    root.chmod(0o711)
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"], tempfile.tempdir = str(root), None
    watch = Watch((root, kept_by_pytest), root)
    yield root
    try:
        _fail_on_leaks(watch, "the fixtures of this run")
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
        tempfile.tempdir = None
        remove_tree(root)


@pytest.fixture(scope="session")
def fork_server(private_root: Path) -> Iterator[ForkServer]:  # noqa: ARG001 - it ends before what is left behind is looked for
    """Yield a process that forks mpsd."""
    with running_fork_server() as started:
        yield started


@pytest.fixture(autouse=True)
def nothing_left_behind(private_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail a test that leaves a process, a file descriptor or a file behind; end the processes that it left."""
    watch = Watch((private_root, tmp_path_factory.getbasetemp()), private_root)
    yield
    _fail_on_leaks(watch, "this test")


def _fail_on_leaks(watch: Watch, who: str) -> None:
    __tracebackhide__ = True
    lines, processes = watch.leaks()
    for process in processes:
        kill(process)
    watch.remove_private_files()
    lines = [line for line in lines if line not in _reported]  # a descriptor stays open forever: one report is enough
    _reported.update(lines)
    if lines:
        pytest.fail(f"{who} left behind:\n  " + "\n  ".join(lines), pytrace=False)


@pytest.fixture
def short_tmp(private_root: Path, nothing_left_behind: None) -> Iterator[Path]:  # noqa: ARG001 - it must outlast this one
    """Yield a private directory with a path short enough for unix sockets below it (107 bytes); removed afterwards."""
    path = private_root / f"{next(_numbers)}"
    path.mkdir(mode=0o700)
    yield path
    remove_tree(path)


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    """Yield an idle process, which can hold leases."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


# -- what is not on every machine --------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)  # before -m selects among them
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the mark that follows from other marks, and have files with heavy tests begin first.

    A machine takes root to boot, a container and a cluster take root to run (here), and all take long.

    At the end of a run each worker then has short files left, and none waits for another's long one. Machines come
    second, since their file systems may still be in the making when the run begins (`.ci/run`).
    """
    ranks: dict[Path, int] = {}
    for item in items:
        machine = item.get_closest_marker("machine") is not None
        for mark, what in (
            ("machine", "boot a machine"),
            ("container", "run containers"),
            ("cluster", "run a cluster"),
        ):
            if item.get_closest_marker(mark) is not None:
                item.add_marker(pytest.mark.root(what))
        rank = 1 if machine else 0 if any(item.get_closest_marker(mark) is not None for mark in HEAVY) else 2
        ranks[item.path] = min(rank, ranks.get(item.path, rank))
    items.sort(key=lambda item: ranks[item.path])


def pytest_collection_finish() -> None:
    """Exclude permanent objects from garbage collection: the tests, and their imports."""
    gc.collect()
    gc.freeze()


_MISSING: Final[dict[str, Callable[..., str | None]]] = {
    "real_daemon": real.missing,
    "browser": browser.missing,
    "launchers": launchers.missing,
    "machine": systemd.missing,
    "cluster": cluster.missing,
}
"""By mark, the function that returns what a test with it lacks on this machine."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that cannot run here, or fail it if it is required.

    A test that needs root is required for root alone.
    """
    if (root := item.get_closest_marker("root")) is not None and os.geteuid() != 0:
        pytest.skip(f"only root can {root.args[0]}")
    if item.get_closest_marker("cluster") is not None and cluster.unwanted():
        pytest.skip(f"{cluster.CACHE}=no")
    for name, missing in _MISSING.items():
        for mark in item.iter_markers(name):
            absent = missing(*mark.args)
            if absent is not None and real.required():
                pytest.fail(f"{absent}, and {real.REQUIRE} is set", pytrace=False)
            elif absent is not None:
                pytest.skip(absent)
    if item.get_closest_marker("gpu") is not None:
        _need_gpu(item.config.getoption("-m"))


def _need_gpu(wanted: str) -> None:
    __tracebackhide__ = True
    if not machine.required() and "gpu" not in wanted:
        # These tests cause a fault, which must not happen to other users of a developer's GPU.
        pytest.skip("the tests of a real GPU are run by: pytest -m gpu tests/gpu")
    if (missing := machine.missing()) is not None:
        if machine.required():
            pytest.fail(f"{missing}, and {machine.REQUIRE} is set", pytrace=False)
        pytest.skip(missing)


_LOUDLY = {
    "browser": "NOT TESTED IN A REAL BROWSER",
    "cluster": "NOT TESTED ON A REAL CLUSTER",
    "gpu": "NOT TESTED ON A REAL GPU",
    "launchers": "NOT TESTED WITH REAL LAUNCHERS",
    "machine": "NOT TESTED ON A REAL SYSTEMD",
    "real_daemon": "NOT TESTED AGAINST NVIDIA'S OWN CONTROL DAEMON",
}
"""The text before the reason of a skip, by the mark of the test."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report how many tests did not run, once for each reason."""
    skipped = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", []))
    if skipped:
        terminalreporter.section(f"{skipped.total()} SKIPPED", sep="!", red=True, bold=True)
        for reason, count in sorted(skipped.items()):
            terminalreporter.line(f"{count:5}  {reason}")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return why a test was skipped."""
    assert isinstance(report.longrepr, (tuple, list))
    reason = f"{report.longrepr[2]}".removeprefix("Skipped: ")
    loudly = next((loudly for name, loudly in _LOUDLY.items() if name in report.keywords), None)
    return reason if loudly is None else f"{loudly}: {reason}"
