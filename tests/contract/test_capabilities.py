"""The capabilities that NVIDIA's control daemons need without a GPU: each is taken away in turn."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from mpsd.core.capabilities import DAEMON, Capability
from tests.contract.subjects import ANOTHER, Bench, Subject, as_root, subjects
from tests.harness import look_at, wait_until

pytestmark = [as_root, pytest.mark.thorough]

MakeBench = Callable[[Subject, frozenset[Capability]], Bench]


@pytest.fixture(params=subjects())
def real_subject(request: pytest.FixtureRequest) -> Subject:
    """Return each of NVIDIA's control programs in turn."""
    return cast("Subject", request.param)


@pytest.fixture
def make(short_tmp: Path) -> Iterator[MakeBench]:
    """Return a maker of a bench whose control daemon serves and, like its front-ends, has only some capabilities."""
    made: list[Bench] = []

    def make(subject: Subject, capabilities: frozenset[Capability]) -> Bench:
        names = ",".join(["-all", *(f"+{each.name.lower()}" for each in capabilities)])
        short_tmp.chmod(0o711)
        argv = ("setpriv", f"--bounding-set={names}", "--inh-caps=-all", *subject.argv)
        made.append(Bench(dataclasses.replace(subject, argv=argv), short_tmp))
        made[-1].put_server("exec sleep 1000")
        made[-1].start()
        return made[-1]

    yield make
    for bench in made:
        bench.close()


def ended(pid: int) -> bool:
    process = look_at(pid)
    return process is None or process.zombie


@pytest.mark.parametrize(
    "capabilities", [DAEMON, frozenset({Capability.SETUID, Capability.KILL})], ids=["ours", "least"]
)
def test_enough(real_subject: Subject, make: MakeBench, capabilities: frozenset[Capability]) -> None:
    """With these it starts another user's server as that user, with group 0 and without power, and ends it by force."""
    bench = make(real_subject, capabilities)
    server = bench.start_server(ANOTHER)
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{server}/status").read_text().splitlines() if ":\t" in line
    )
    assert status["Uid"].split() == [str(ANOTHER)] * 4
    assert status["Gid"].split() == ["0"] * 4
    assert int(status["CapPrm"], 16) == 0
    assert int(status["CapBnd"], 16) == sum(1 << each for each in capabilities)
    bench.front_end(f"shutdown_server {server} -f")
    wait_until(lambda: ended(server), what="the server to be shut down by force")
    another = bench.start_server(ANOTHER)
    bench.front_end("quit -t 1")
    bench.ended()
    wait_until(lambda: ended(another), what="the server to end with its control daemon")


def test_without_setuid(real_subject: Subject, make: MakeBench) -> None:
    """Without SETUID older branches silently start another user's server as root; newer ones start none."""
    bench = make(real_subject, DAEMON - {Capability.SETUID})
    if real_subject.branch < 550:
        assert Path(f"/proc/{bench.start_server(ANOTHER)}").stat().st_uid == 0
    else:
        bench.front_end(f"start_server -uid {ANOTHER}")
        wait_until(lambda: any(" exited with status 1" in line for line in bench.log()), what="its failure")


def test_without_kill(real_subject: Subject, make: MakeBench) -> None:
    """Without KILL no command ends another user's server."""
    bench = make(real_subject, DAEMON - {Capability.KILL})
    server = bench.start_server(ANOTHER)
    bench.front_end(f"shutdown_server {server} -f")
    bench.complete_log()
    assert not ended(server)
