"""`mpsd.spawn`: a program holds its lease, a refusal leaves neither, and both end together, whatever is killed."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.client.scripts import Script, is_gone, told, wait_until_free, wait_until_gone
from tests.daemon.conftest import Start
from tests.harness import wait_until
from tests.node import Node

SHOWS_ITSELF = "echo $$ $MPSD_LEASE; tr '\\\\0' '\\\\n' </proc/$$/environ; cat /proc/$$/status; kill $$"


def test_a_program_holds_its_lease(node: Node, short_tmp: Path) -> None:
    """The program has the lease's variables and none of another job's, and ends with the status of a program."""
    (answer,) = told(
        short_tmp,
        node,
        f"""
        own = {{"PATH": os.environ["PATH"], "A": "\\udcff", "CUDA_MPS_CLIENT_PRIORITY": "1"}}
        program = mpsd.spawn(["sh", "-c", "{SHOWS_ITSELF}"], env=own, stdout=-1, fraction="25%", name="shown")
        output, _ = program.communicate()
        lease = program.lease
        tell(program.pid, output.decode(errors="surrogateescape"), program.returncode, program.args[0], lease.id,
             lease.holder, lease.is_held_here, lease.environment, lease.answer["name"], "MPSD_LEASE" in os.environ)
        """,
    )
    pid, output, status, first, lease, holder, is_held_here, variables, name, in_parent = answer
    shown, *lines = output.splitlines()
    assert shown == f"{pid} {lease}"
    assert (holder, is_held_here, name, first, status) == (pid, False, "shown", "sh", -signal.SIGTERM)
    assert not in_parent
    found = dict(line.split("=", 1) for line in lines if "=" in line)
    assert found == {**variables, "PATH": os.environ["PATH"], "A": "\udcff"}
    ignored = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn"))
    assert not ignored & 1 << (signal.SIGPIPE - 1)
    wait_until_free(node)


def test_the_streams_and_the_directory_are_those_of_popen(node: Node, short_tmp: Path) -> None:
    """A program reads and writes what `subprocess.Popen` would give it, and the end of its `with` block ends it."""
    (short_tmp / "below").mkdir()
    answers = told(
        short_tmp,
        node,
        """
        with mpsd.spawn(["sh", "-c", "pwd; read line; echo $line >&2; cat"], cwd="below", stdin=-1, stdout=-1,
                        stderr=-2, fraction=0.25) as program:
            program.stdin.write(b"a word\\n")
            program.stdin.flush()
            tell(program.stdout.readline().decode(), program.stdout.readline().decode(), program.poll())
        tell(program.returncode, program.stdout.closed, program.lease.state)
        """,
    )
    assert answers == [[f"{short_tmp / 'below'}\n", "a word\n", None], [-signal.SIGTERM, True, "ended"]]
    assert not node.leases()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        pytest.param('["no-such-program"], fraction=0.25', "FileNotFoundError", id="not found"),
        pytest.param('["./no-such-program"], fraction=0.25', "FileNotFoundError", id="no file"),
        pytest.param('["/etc/passwd"], fraction=0.25', "PermissionError", id="not executable"),
        pytest.param('["true"], fraction=0.25, cwd="no-such-directory"', "FileNotFoundError", id="no directory"),
        pytest.param('["true"], fraction=2', "InvalidRequestError", id="invalid"),
        pytest.param('["true"], threads=10, memory="8000GiB"', "NeverFitsError", id="never fits"),
        pytest.param('["true"], fraction=0.25, pid=1', "InvalidRequestError", id="pid"),
        pytest.param('["true"], fracton=0.25', "TypeError", id="misspelled"),
        pytest.param('"true", fraction=0.25', "TypeError", id="text"),
    ],
)
def test_refusals(node: Node, short_tmp: Path, call: str, error: str) -> None:
    """A refusal is the error that mpsd, or the kernel, gave; nothing ran, and no lease and no process is left."""
    (answer,) = told(
        short_tmp,
        node,
        f"""
        try:
            mpsd.spawn({call})
        except Exception as error:
            tell(type(error).__name__, str(error), getattr(error, "hint", ""), getattr(error, "limit", None))
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            pass
        """,
    )
    assert answer[0] == error
    assert not node.leases()


def test_a_full_node_refuses(node: Node, short_tmp: Path) -> None:
    """The error of a request that does not fit has the limit and the hint that mpsd gave."""
    for gpu in range(2):
        node.lease(fraction=1, threads=None, memory=None, gpu=f"{gpu}")
    (answer,) = told(
        short_tmp,
        node,
        """
        try:
            mpsd.spawn(["true"], fraction=0.25)
        except mpsd.errors.DoesNotFitError as error:
            tell(error.code, error.limit, error.hint, error.retryable, error.is_answer)
        """,
    )
    assert answer[:2] == ["does_not_fit", "threads"]
    assert "mpsctl" in answer[2]
    assert answer[3:] == [True, True]


def test_a_wait_is_interrupted(node: Node, short_tmp: Path) -> None:
    """Ctrl-C ends the wait of the caller, gives up its place, and leaves no process."""
    held = [node.lease(fraction=1, threads=None, memory=None, gpu=f"{gpu}") for gpu in range(2)]
    text = """
        try:
            mpsd.spawn(["true"], fraction=0.25, wait="forever", name="waits")
        except KeyboardInterrupt:
            tell("interrupted")
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            tell("no child")
        """
    with Script(short_tmp, node, text) as script:
        wait_until(lambda: any(each["name"] == "waits" for each in node.leases()), what="the request to wait")
        script.process.send_signal(signal.SIGINT)
        assert script.end()[:2] == (0, [["interrupted"], ["no child"]])
    wait_until(lambda: len(node.leases()) == len(held), what="its place to be given up")


@pytest.mark.parametrize("detached", [False, True], ids=["", "detached"])
def test_the_caller_is_killed_in_a_wait(node: Node, short_tmp: Path, *, detached: bool) -> None:
    """The place of a caller that is killed is given up, and its program never runs."""
    held = [node.lease(fraction=1, threads=None, memory=None, gpu=f"{gpu}") for gpu in range(2)]
    text = f'mpsd.spawn(["touch", "ran"], fraction=0.25, wait="forever", name="waits", detached={detached})'
    with Script(short_tmp, node, text) as script:
        (pid,) = wait_until(
            lambda: [each["owner"]["pid"] for each in node.leases() if each["name"] == "waits"], what="the request"
        )
        script.process.kill()
        wait_until_gone(pid)
    wait_until(lambda: len(node.leases()) == len(held), what="its place to be given up")
    assert not (short_tmp / "ran").exists()


def test_a_grant_after_a_wait(node: Node, short_tmp: Path) -> None:
    """A program starts as soon as its request fits."""
    held = [node.lease(fraction=1, threads=None, memory=None, gpu=f"{gpu}") for gpu in range(2)]
    with Script(
        short_tmp, node, 'tell(mpsd.spawn(["true"], fraction=0.25, wait="10m", name="waits").wait())'
    ) as script:
        wait_until(lambda: any(each["name"] == "waits" for each in node.leases()), what="the request to wait")
        node.request("DELETE", f"/v1/leases/{held[0]['id']}")
        assert script.hear() == [0]


def test_without_mpsd(short_tmp: Path) -> None:
    """Where there is no mpsd, a program is refused, or has the whole GPU if it asked for that, and this is said."""
    answers = told(
        short_tmp,
        None,
        """
        import warnings
        try:
            mpsd.spawn(["true"], fraction=0.25)
        except mpsd.errors.UnreachableError as error:
            tell(error.socket, "whole-gpu" in error.hint)
        with warnings.catch_warnings(record=True) as said:
            with mpsd.spawn(["sh", "-c", "echo $MPSD_LEASE; exec cat"], fraction=0.25, otherwise="whole-gpu", stdin=-1,
                            stdout=-1) as program:
                tell(program.stdout.readline().decode(), program.lease.is_whole_gpu, len(said))
        tell(program.returncode)
        """,
    )
    assert answers == [[f"{short_tmp}/no-mpsd", True], ["\n", True, 1], [-signal.SIGTERM]]


# -- the end -----------------------------------------------------------------------------------------------------------

SLEEPS = 'program = mpsd.spawn([sys.executable, "-c", "import time; time.sleep(1000)"], fraction=0.25)'


@pytest.mark.parametrize("killed", ["caller", "program"])
def test_one_is_killed(node: Node, short_tmp: Path, killed: str) -> None:
    """A program ends with its caller, whatever kills that, and its lease ends with it."""
    with Script(short_tmp, node, f"{SLEEPS}\ntell(program.pid)\ntell(program.wait())") as script:
        (pid,) = script.hear()
        assert [each["holders"][0]["pid"] for each in node.leases()] == [pid]
        if killed == "caller":
            script.process.kill()
        else:
            os.kill(pid, signal.SIGKILL)
            assert script.hear() == [-signal.SIGKILL]
        wait_until_gone(pid)
        wait_until_free(node)


def test_the_exit_of_the_caller(node: Node, short_tmp: Path) -> None:
    """A caller that exits ends its programs as `Process.end` does: by SIGTERM first."""
    shell = '["sh", "-c", "trap \'echo [1]; exit\' TERM; echo [0]; while :; do sleep 0.01; done"]'
    with Script(short_tmp, node, f"program = mpsd.spawn({shell}, fraction=0.25)\nsys.stdin.read(1)") as script:
        assert script.hear() == [0]
        assert script.process.stdin is not None
        script.process.stdin.write(b".")
        assert script.end()[:2] == (0, [[1]])
    assert not node.leases()


def test_a_detached_program(node: Node, short_tmp: Path) -> None:
    """A detached program and its lease outlive the caller."""
    with Script(short_tmp, node, f"{SLEEPS[:-1]}, detached=True)\ntell(program.pid)\ntime.sleep(1000)") as script:
        (pid,) = script.hear()
        script.process.kill()
        script.process.wait()
        try:
            (lease,) = node.leases()
            assert lease["holders"][0]["pid"] == pid
            assert not is_gone(pid)
        finally:
            os.kill(pid, signal.SIGKILL)
        wait_until_free(node)


def test_a_forked_child_ends_nothing(node: Node, short_tmp: Path) -> None:
    """A forked child of the caller leaves the blocks of programs and pools, and exits, and they go on."""
    text = """
        import sys
        others = [mpsd.spawn(["cat"], fraction=0.1, stdin=-1, stdout=-1)]
        with mpsd.spawn(["cat"], fraction=0.1, stdin=-1, stdout=-1) as program, mpsd.Pool(1, fraction=0.1) as pool:
            pool.submit(abs, 1).result()
            pid = os.fork()
            if pid:
                status = os.waitpid(pid, 0)[1]
                tell(status, others[0].poll(), program.poll(), pool.submit(abs, -2).result())
                tell(len(mpsd.Client().leases()["leases"]))
        if not pid:
            sys.exit()
        """
    assert told(short_tmp, node, text) == [[0, None, None, 2], [3]]
    assert not node.leases()


def test_a_time_to_live(node: Node, short_tmp: Path) -> None:
    """The lease of a program is renewed while its caller lives."""
    text = """
        with mpsd.spawn(["cat"], fraction=0.1, stdin=-1, ttl=2) as program:
            sys.stdin.read(1)
            tell(program.poll())
        """
    with Script(short_tmp, node, text) as script:
        (lease,) = wait_until(node.leases, what="the lease")
        wait_until(lambda: node.leases()[0]["expires"] > lease["expires"], what="the lease to be renewed")
        assert script.process.stdin is not None
        script.process.stdin.write(b".")
        assert script.hear() == [None]


def test_the_thread_that_started_it_ends(node: Node, short_tmp: Path) -> None:
    """The kernel ends a program with the *thread* that started it, so a program is not started by the caller's."""
    text = """
        def start():
            programs.append(mpsd.spawn(["sh", "-c", "read x; echo lives"], fraction=0.25, stdin=-1, stdout=-1))
        programs = []
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        while os.listdir("/proc/self/task").__len__() > 2:
            pass
        tell(programs[0].communicate(b"\\n")[0].decode())
        """
    assert told(short_tmp, node, text) == [["lives\n"]]


def test_a_program_that_ignores_sigterm(node: Node, short_tmp: Path) -> None:
    """`end` kills a program that does not exit on SIGTERM."""
    text = """
        program = mpsd.spawn(["sh", "-c", "trap '' TERM; echo; while :; do sleep 0.01; done"], fraction=0.25, stdout=-1)
        program.stdout.readline()
        tell(program.end(within=0.1))
        program.stdout.close()
        """
    assert told(short_tmp, node, text) == [[-signal.SIGKILL]]


def test_the_work_on_the_gpu_ends_first(make_node: Start, short_tmp: Path) -> None:
    """The end of a program has the MPS server end its work before a signal does, which spares its neighbours."""
    node = make_node(control=None).start()
    text = """
        from mpsd.simulator.client import program
        with mpsd.spawn(program(), fraction=0.25, stdin=-1, stdout=-1) as client:
            client.stdout.readline()
            client.stdin.write(b"loop 0.1\\n")
            client.stdin.flush()
            client.stdout.readline()
        tell(client.pid)
        """
    ((pid,),) = told(short_tmp, node, text)
    events = [json.loads(line) for line in node.get("/v1/events?after=0").body.splitlines()]
    steps = [each["step"] for each in events if each["event"] == "client_forced" and each["pid"] == pid]
    assert steps[0].startswith("terminate_client"), steps
