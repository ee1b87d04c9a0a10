"""`mpsd.Pool`: workers share one lease from their first instruction to their last, whatever process is killed."""

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import mpsd
from tests.cli.conftest import ROOT
from tests.client.scripts import Script, told, wait_until_free, wait_until_gone
from tests.daemon.conftest import Start
from tests.harness import wait_until
from tests.node import Node

BEFORE = """
AT_IMPORT = {name: value for name, value in os.environ.items() if name.startswith(("CUDA_", "MPSD_"))}

def show(folder, workers):
    '''Return what a worker has, once this many run.'''
    open(f"{folder}/{os.getpid()}", "w").close()
    while len(os.listdir(folder)) < workers:
        time.sleep(0.005)
    with open("/proc/self/environ") as file:
        executed = dict(line.split("=", 1) for line in file.read().split("\\0") if line)
    same = AT_IMPORT.items() <= executed.items()
    return os.getpid(), AT_IMPORT, same

def hold_everything():
    '''Hold the interpreter's lock for ever.'''
    os.write(1, f"[{os.getpid()}]\\n".encode())
    sum(range(10**15))

def wait():
    os.write(1, f"[{os.getpid()}]\\n".encode())
    time.sleep(1000)
"""


def test_workers_share_a_lease(node: Node, short_tmp: Path) -> None:
    """Each worker is executed in the environment of the one lease, and this process never has it."""
    (short_tmp / "seen").mkdir()
    (before, found, after), state = told(
        short_tmp,
        node,
        """
        own = dict(os.environ)
        with mpsd.Pool(2, fraction=0.5, name="shared", max_tasks_per_child=1) as pool:
            futures = [pool.submit(show, "seen", 2) for _ in range(2)]
            found = [each.result() for each in futures]
            tell([each["processes"] for each in mpsd.Client().leases()["leases"]], found, own == dict(os.environ))
        tell(pool.lease.state, pool.lease.environment)
        """,
        before=BEFORE,
    )
    assert before == [2]
    assert after
    assert state[0] == "ended"
    assert len({pid for pid, _, _ in found}) == 2
    for _, variables, is_executed_so in found:
        assert is_executed_so
        assert state[1].items() <= variables.items()
        assert variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25.0"
    assert not node.leases()


def test_workers_of_several_gpus(node: Node, short_tmp: Path) -> None:
    """The workers are divided over the GPUs of the lease, which has a place for each."""
    (short_tmp / "seen").mkdir()
    ((processes, found),) = told(
        short_tmp,
        node,
        """
        with mpsd.Pool(4, fraction=0.5, gpus=2) as pool:
            found = [each.result() for each in [pool.submit(show, "seen", 4) for _ in range(4)]]
            tell(pool.lease.answer["processes"], found)
        """,
        before=BEFORE,
    )
    assert processes == 2
    seen = [variables["CUDA_VISIBLE_DEVICES"] for _, variables, _ in found]
    assert sorted(map(seen.count, set(seen))) == [2, 2]


def test_refusals(node: Node, short_tmp: Path) -> None:
    """A refused pool raises mpsd's error where it is made, and leaves no lease and no process."""
    answers = told(
        short_tmp,
        node,
        """
        wrong = ({"fraction": 2}, {"processes": 3}, {"pid": 1}, {"gpus": "two"}, {"max_tasks_per_child": 0})
        for options in (*wrong, {"max_workers": "2"}):
            try:
                mpsd.Pool(**{"max_workers": 2, "fraction": 0.5, **options})
            except Exception as error:
                tell(type(error).__name__, str(error))
        """,
    )
    kinds = [kind for kind, _ in answers]
    assert kinds == [*4 * ["InvalidRequestError"], "ValueError", "TypeError"]
    assert answers[-1][1] == "'str' object cannot be interpreted as an integer"
    assert not node.leases()


@pytest.mark.parametrize("end", ["pool.shutdown(wait=False)", "del pool; import gc; gc.collect()"])
def test_an_end_in_the_background(node: Node, short_tmp: Path, end: str) -> None:
    """The lease of a pool that nobody waits for ends after its last worker."""
    text = f"""
        pool = mpsd.Pool(1, fraction=0.5)
        future = pool.submit(abs, 1)
        future.result()
        {end}
        del future
        tell()
        sys.stdin.read(1)
        """
    with Script(short_tmp, node, text) as script:
        assert script.hear() == []
        wait_until_free(node)


@pytest.mark.parametrize("is_released", [False, True], ids=["killed", "released"])
def test_a_worker_is_killed(node: Node, short_tmp: Path, *, is_released: bool) -> None:
    """The error about a worker that is gone says how it ended, and what mpsd knows about its lease."""
    text = """
        with mpsd.Pool(2, fraction=0.5) as pool:
            future = pool.submit(wait)
            try:
                future.result()
            except Exception as error:
                tell(type(error).__name__, str(error), pool.lease.id)
            try:
                pool.submit(wait)
            except Exception as error:
                tell(type(error).__name__, str(error))
        tell(str(future.exception()))
        """
    with Script(short_tmp, node, text, before=BEFORE) as script:
        (pid,) = script.hear()
        if is_released:
            node.request("DELETE", f"/v1/leases/{node.leases()[0]['id']}")
        os.kill(pid, signal.SIGKILL)
        kind, said, lease = script.hear()
        assert kind == "BrokenProcessPool"
        of_mpsd = f" did not end it, and {lease} lives"
        if is_released:
            of_mpsd = f": {lease} has ended: uid {os.getuid()} released it"
        known = f" What is known: process {pid} was ended by SIGKILL; mpsd{of_mpsd}"
        assert said.endswith(known)
        assert script.hear()[1].endswith(known)
        assert script.hear() == [said]
        assert script.end()[0] == 0
    assert not node.leases()


def test_an_initializer_fails(node: Node, short_tmp: Path) -> None:
    """The workers then exit without an error of theirs, and the error of the pool says so."""
    text = """
        with mpsd.Pool(1, fraction=0.5, initializer=os.open, initargs=("no-file", 0)) as pool:
            tell(str(pool.submit(abs, 1).exception()))
        """
    with Script(short_tmp, node, text) as script:
        (said,) = script.hear()
    assert "What is known: no worker exited with another status than 0, as after an initializer that failed;" in said


def test_an_interrupt(node: Node, short_tmp: Path) -> None:
    """Ctrl-C in the block ends the work that was submitted, and the lease, at once."""
    text = """
        try:
            with mpsd.Pool(1, fraction=0.5) as pool:
                [each.result() for each in [pool.submit(wait), pool.submit(wait)]]
        except KeyboardInterrupt:
            tell(pool.lease.state)
        """
    with Script(short_tmp, node, text, before=BEFORE) as script:
        (pid,) = script.hear()
        script.process.send_signal(signal.SIGINT)
        assert script.hear() == ["ended"]
        assert script.end()[0] == 0
        wait_until_gone(pid)
    assert not node.leases()


@pytest.mark.parametrize("work", ["wait", "hold_everything"])
def test_the_caller_is_killed(node: Node, short_tmp: Path, work: str) -> None:
    """The workers of a process that is killed end at once, even in the midst of a call, and the lease ends."""
    with Script(
        short_tmp, node, f"pool = mpsd.Pool(2, fraction=0.5)\npool.submit({work})\npool.submit({work})", before=BEFORE
    ) as script:
        workers = [script.hear()[0] for _ in range(2)]
        script.process.kill()
        wait_until_gone(*workers)
        wait_until_free(node)


def test_an_interactive_session(node: Node, short_tmp: Path) -> None:
    """In an interactive session a pool calls functions of modules, as the standard one does."""
    lines = (
        "import mpsd",
        "pool = mpsd.Pool(1, fraction=0.25)",
        "import os",
        "print(pool.submit(abs, -7).result(), pool.submit(os.getenv, 'MPSD_LEASE').result() == pool.lease.id)",
        "pool.shutdown()",
    )
    done = subprocess.run(
        [sys.executable, "-i", "-q"],
        input="\n".join(lines) + "\n",
        env={**os.environ, "PYTHONPATH": f"{ROOT}", "MPSD_SOCKET": f"{node.socket}"},
        cwd=short_tmp,
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    assert done.stdout.splitlines() == ["7 True"], done.stderr
    assert not node.leases()


def test_a_module(node: Node, short_tmp: Path) -> None:
    """A program may be a module that `python -m` runs, whose functions a worker finds."""
    (short_tmp / "work.py").write_text(
        "import mpsd, os\ndef work(x):\n    return x, os.environ['MPSD_LEASE']\nif __name__ == '__main__':\n"
        "    with mpsd.Pool(1, fraction=0.25) as pool:\n"
        "        print(pool.submit(work, 3).result() == (3, pool.lease.id))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "work"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{short_tmp}", "MPSD_SOCKET": f"{node.socket}"},
        cwd=short_tmp,
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    assert done.stdout == "True\n", done.stderr


@pytest.mark.thorough
def test_mpsd_ends_a_worker(make_node: Start, short_tmp: Path) -> None:
    """The error about a worker that mpsd ended has mpsd's reason."""
    node = make_node(control=None).start()
    before = """
        def use():
            from mpsd.simulator.cuda_process import CudaProcess
            cuda = CudaProcess()
            cuda.context()
            os.write(1, f"[{os.getpid()}]\\n".encode())
            time.sleep(1000)
        """
    text = """
        with mpsd.Pool(1, fraction=0.5) as pool:
            try:
                pool.submit(use).result()
            except Exception as error:
                tell(type(error).__name__, str(error))
        """
    with Script(short_tmp, node, text, before=before) as script:
        (pid,) = script.hear()
        assert node.request("POST", f"/v1/clients/{pid}/end", {}).status == 202
        name, said = script.hear()
    assert name == "BrokenProcessPool"
    reasons = [json.loads(line) for line in node.get("/v1/events?after=0").body.splitlines()]
    (because,) = [each["because"] for each in reasons if each["event"] == "client_ended" and each["pid"] == pid]
    assert f"mpsd: {because}" in said


def test_a_loop_of_asyncio(node: Node, short_tmp: Path) -> None:
    """A pool is an executor of an event loop, and its futures are as good as those of the standard one."""
    text = """
        import asyncio
        async def main():
            with mpsd.Pool(1, fraction=0.5) as pool:
                loop = asyncio.get_running_loop()
                tell(await asyncio.wait_for(loop.run_in_executor(pool, abs, -1), 30))
                try:
                    await loop.run_in_executor(pool, os._exit, 3)
                except Exception as error:
                    tell("exited with 3; mpsd did not end it" in str(error))
        asyncio.run(main())
        """
    assert told(short_tmp, node, text) == [[1], [True]]


def test_without_mpsd(short_tmp: Path) -> None:
    """Where there is no mpsd, and the program asked for that, the workers have the whole GPU."""
    text = """
        import warnings
        with warnings.catch_warnings(record=True) as said, mpsd.Pool(1, fraction=0.5, otherwise="whole-gpu") as pool:
            tell(pool.submit(os.getenv, "MPSD_LEASE").result(), pool.lease.is_whole_gpu)
            tell([each.filename == __file__ for each in said])
        """
    assert told(short_tmp, None, text) == [[None, True], [[True]]]


# -- functions ---------------------------------------------------------------------------------------------------------


async def coroutine() -> None:
    """Do nothing."""


FUNCTIONS = """
@mpsd.process(fraction="25%", wait=20)
def work(x, *, y=1):
    '''Work.'''
    if x < 0:
        raise ValueError("negative")
    return x + y, os.getpid(), mpsd.current().id, os.environ["MPSD_LEASE"]

@mpsd.process(fraction=0.25)
def never():
    os.write(1, f"[{os.getpid()}]\\n".encode())
    time.sleep(1000)

@mpsd.process(fraction=2)
def refused():
    print("[0]", flush=True)

def outer():
    @mpsd.process(fraction=0.25)
    def inner():
        pass
    return inner

class Class:
    @staticmethod
    @mpsd.process(fraction=0.25)
    def method(x):
        return work.__doc__, x, os.environ["MPSD_LEASE"] != ""
"""


def test_functions(node: Node, short_tmp: Path) -> None:
    """Each call has a process and a lease of its own, which end with it; threads call at once."""
    answers = told(
        short_tmp,
        node,
        """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(2) as threads:
            tell(*threads.map(work, [1, 2]))
        tell(work(1, y=4)[0], Class.method(3), os.getpid(), mpsd.current(), len(mpsd.Client().leases()["leases"]))
        try:
            work(-1)
        except ValueError as error:
            tell(str(error), "in work" in str(error.__cause__), error.__cause__ is not None)
        """,
        before=FUNCTIONS,
    )
    (first, second), (five, method, pid, current, leases), raised = answers
    assert (first[0], second[0], five) == (2, 3, 5)
    assert first[2] == first[3]
    assert len({first[1], second[1], pid}) == 3
    assert first[2] != second[2]
    assert method == ["Work.", 3, True]
    assert (current, leases) == (None, 0)
    assert raised == ["negative", True, True]


def test_functions_are_refused(node: Node, short_tmp: Path) -> None:
    """A refusal is raised by the call before anything ran, and so is a function that a process cannot find."""
    answers = told(
        short_tmp,
        node,
        """
        for function in (refused, outer()):
            try:
                function()
            except mpsd.MpsdError as error:
                tell(error.code, "outermost" in error.hint)
        """,
        before=FUNCTIONS,
    )
    assert answers == [["invalid_request", False], ["invalid_request", True]]
    for odd in (coroutine, functools.partial(print, 1)):
        with pytest.raises(
            TypeError, match=r"@mpsd\.process is for a function that has a name and is no coroutine, not"
        ):
            mpsd.process(fraction=0.25)(odd)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'wiat'\. Did you mean 'wait'\?"):
        mpsd.process(fraction=0.25, wiat="10m")  # type: ignore[call-arg]
    assert not node.leases()


@pytest.mark.parametrize("how", ["interrupted", "caller killed", "process killed"])
def test_a_call_ends_early(node: Node, short_tmp: Path, how: str) -> None:
    """Ctrl-C, and the death of either process, end a call with its process and its lease."""
    text = """
        try:
            never()
        except BaseException as error:
            tell(type(error).__name__, str(error))
        """
    with Script(short_tmp, node, text, before=FUNCTIONS) as script:
        (pid,) = script.hear()
        assert len(node.leases()) == 1
        if how == "interrupted":
            script.process.send_signal(signal.SIGINT)
            assert script.hear()[0] == "KeyboardInterrupt"
            assert not node.leases()
        elif how == "process killed":
            os.kill(pid, signal.SIGKILL)
            name, said = script.hear()
            assert name == "BrokenProcessPool"
            assert f"process {pid} was ended by SIGKILL; mpsd did not end it" in said
            assert not node.leases()
        else:
            script.process.kill()
        wait_until_gone(pid)
        wait_until_free(node)
    wait_until(lambda: script.process.poll() is not None, what="the caller to end")
