"""Whose a program is, by the processes of its pod."""

import contextlib
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

import pytest

from mpsd.core.kubernetes.settings import Settings
from mpsd.core.model import Known
from mpsd.kubernetes.kubelet import User, user_of_program
from mpsd.kubernetes.pod_reader import PodReader
from tests.control_groups import mounted
from tests.harness import wait_until

P = ParamSpec("P")
T = TypeVar("T")


class _Reader(PodReader):
    """A reader in this process. Something happens after its answer, before its caller has it."""

    def __init__(self, then: Callable[[], object]) -> None:
        self._then = then

    def ask(self, pod: str, question: Callable[P, T], *arguments: P.args, **none: P.kwargs) -> Known[T]:  # noqa: ARG002 - as its base
        found = question(*arguments, **none)
        self._then()
        return Known(found)


@pytest.fixture
def pod() -> Iterator[tuple[str, Path]]:
    """Return the uid of a pod, and its control group."""
    top = next((each for each in map(mounted, ("pids", "cgroup2")) if each and os.access(each, os.W_OK)), None)
    if top is None:
        pytest.skip("no control group can be made here")
    uid = str(uuid.uuid4())
    group = top / "kubepods" / f"pod{uid}"
    group.mkdir(parents=True)
    yield uid, group
    wait_until(lambda: not (group / "cgroup.procs").read_text(), what="it to be empty")
    group.rmdir()


def user_in(pod: str, then: Callable[[], object] = lambda: None) -> User | None:
    return user_of_program(pod, "MARK", pod, settings=Settings(), held_by=None, reader=_Reader(then))


def marked(pod: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE, env={"MARK": pod, "PATH": os.environ["PATH"]})


def test_a_process_that_leaves_its_pod(pod: tuple[str, Path]) -> None:
    """A process that is no longer of the pod, as one that got the pid of another is not, shows no user."""
    uid, group = pod
    with marked(uid) as program:
        (group / "cgroup.procs").write_text(str(program.pid))
        assert wait_until(lambda: user_in(uid), what="it to be read") == User(os.geteuid(), os.getegid())
        top = group.parent.parent
        assert user_in(uid, lambda: (top / "cgroup.procs").write_text(str(program.pid))) is None
        program.communicate()


def test_a_pod_with_many_processes(pod: tuple[str, Path]) -> None:
    """However many processes a pod has, its control group is read as often: other pods wait for that."""
    uid, group = pod
    opened = list[object]()
    counting = threading.local()

    def count(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and getattr(counting, "on", False):
            opened.append(arguments[0])

    sys.addaudithook(count)

    def reads() -> int:
        opened.clear()
        counting.on = True
        assert user_in(uid) is not None
        counting.on = False
        return sum("cgroup.procs" in str(each) for each in opened)

    with contextlib.ExitStack() as running:
        found = []
        for number in (1, 8):
            for _ in range(number):
                program = running.enter_context(marked(uid))
                running.callback(program.communicate)
                (group / "cgroup.procs").write_text(str(program.pid))
            wait_until(lambda: user_in(uid), what="them to be read")
            found.append(reads())
    assert found[0] == found[1] > 0
