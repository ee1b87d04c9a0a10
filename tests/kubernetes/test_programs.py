"""Whose a program is, by the processes of its pod."""

import os
import subprocess
import uuid
from collections.abc import Callable
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


def test_a_process_that_leaves_its_pod() -> None:
    """A process that is no longer of the pod, as one that got the pid of another is not, shows no user."""
    top = next((each for each in map(mounted, ("pids", "cgroup2")) if each and os.access(each, os.W_OK)), None)
    if top is None:
        pytest.skip("no control group can be made here")
    pod = str(uuid.uuid4())
    group = top / "kubepods" / f"pod{pod}"
    group.mkdir(parents=True)
    try:
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env={"MARK": pod, "PATH": os.environ["PATH"]}) as program:
            (group / "cgroup.procs").write_text(str(program.pid))

            def user(then: Callable[[], object] = lambda: None) -> User | None:
                return user_of_program(pod, "MARK", pod, settings=Settings(), held_by=None, reader=_Reader(then))

            assert wait_until(user, what="it to be read") == User(os.geteuid(), os.getegid())
            assert user(lambda: (top / "cgroup.procs").write_text(str(program.pid))) is None
            program.communicate()
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), what="it to be empty")
        group.rmdir()
