"""A node with mpsd, simulated GPUs, and Slurm with mpsd's hooks."""

import contextlib
import json
import os
import select
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

from mpsd.simulator.client import program
from mpsd.simulator.devices import VARIABLE
from tests.fork_server import ForkServer
from tests.harness import remove_tree, wait_until
from tests.node import Node
from tests.slurm.cluster import USERS, Cluster

ROOT: Final = Path(__file__).parents[2]

HOOKS: Final = {"Prolog": "prolog", "Epilog": "epilog", "TaskProlog": "task-prolog"}

_DEADLINE: Final = 30.0

_numbers = count(1)

Start: TypeAlias = "Callable[..., contextlib.AbstractContextManager[Site]]"


class Driven:
    """A client of simulated GPUs in a job, with a pipe for each direction, which the test drives."""

    def __init__(self, site: "Site") -> None:
        self.directory = site.cluster.place / "out" / f"c{next(_numbers)}"
        self.directory.mkdir()
        self._ends = []
        for name in ("in", "out"):
            path = self.directory / name
            os.mkfifo(path)
            path.chmod(0o666)
            self._ends.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))  # the test waits for no process to open it
        self.directory.chmod(0o755)
        self._read = b""
        self.script = site.client(f'<"{self.directory}/in" >"{self.directory}/out"')

    def answer(self, deadline: float = _DEADLINE) -> dict[str, Any]:
        while b"\n" not in self._read:
            assert select.select([self._ends[1]], [], [], deadline)[0], "a client in a job does not answer"
            self._read += os.read(self._ends[1], 65536)
        line, _, self._read = self._read.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def do(self, line: str) -> dict[str, Any]:
        self.tell(line)
        return self.answer()

    def tell(self, line: str) -> None:
        os.write(self._ends[0], f"{line}\n".encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._ends:
            os.close(each)


class Site:
    """The node."""

    def __init__(self, node: Node, cluster: Cluster) -> None:
        self.node = node
        self.cluster = cluster

    @property
    def state_dir(self) -> Path:
        return self.cluster.place / "state"

    def client(self, streams: str = "") -> str:
        """Return a line of a job's script that becomes a client of simulated GPUs."""
        words = [f"{VARIABLE}={self.node.root}/run/simulated", f"PYTHONPATH={ROOT}"]
        return f"exec env {shlex.join([*words, *program()])} {streams}"

    def driven(self) -> Driven:
        return Driven(self)

    def leases(self, job: int | None = None) -> list[Any]:
        """Return the leases that have not ended, of a job or of all jobs."""
        found = [each for each in self.node.leases() if "slurm/job" in each["labels"]]
        return [each for each in found if job is None or each["labels"]["slurm/job"] == str(job)]

    def wait_until_clean(self, deadline: float = 30) -> None:
        """Wait until no lease and no record of a job is left."""
        jobs = self.state_dir / "jobs"

        def left() -> list[object]:
            return [*self.leases(), *(jobs.iterdir() if jobs.exists() else ())]

        try:
            wait_until(lambda: not left(), what="nothing of a job to be left", deadline=deadline)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{left()}\n{self.story()}") from None
        self.node.end_servers()

    def story(self) -> str:
        """Return what the daemons wrote, to be read where a test failed."""
        return f"{self.cluster.logs()}\n--- mpsd\n" + "\n".join(self.node.stderr.read_text().splitlines()[-20:])


def write_hooks(cluster: Cluster, settings: Mapping[str, object], *, project: Path = ROOT) -> None:
    """Write the hooks of a cluster, which run this checkout's mpsd-slurm with these settings."""
    configuration = cluster.place / "hooks" / "slurm.toml"
    configuration.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
    packages = next(each for each in sys.path if each.endswith("site-packages"))
    python = Path(sys.executable).resolve()
    for name in HOOKS.values():
        hook = cluster.place / "hooks" / name
        # As the installed program starts, without the packages that the machine's own Python may load by itself.
        start = f"import sys; sys.path[:0] = {str(project)!r}, {packages!r}; from mpsd.slurm.__main__ import main"
        hook.write_text(
            f"#!/bin/sh\nMPSD_SLURM_CONFIG={configuration} exec {python} -I -S -c"
            f" {shlex.quote(f'{start}; sys.exit(main([{name!r}]))')}\n"
        )
        hook.chmod(0o755)
    cluster.place.joinpath("hooks").chmod(0o755)


def start_service(site: Site) -> None:
    """Start `mpsd-slurm service` beside slurmd."""
    site.cluster.run_daemon("service", *hook_program(site, "service"))


def hook_program(site: Site, name: str) -> list[str]:
    """Return a command line of mpsd-slurm in the cluster's namespaces."""
    packages = next(each for each in sys.path if each.endswith("site-packages"))
    variables = {"MPSD_SLURM_CONFIG": f"{site.cluster.place}/hooks/slurm.toml", "PYTHONPATH": f"{ROOT}:{packages}"}
    words = [f"{key}={value}" for key, value in variables.items()]
    return ["env", *words, str(Path(sys.executable).resolve()), "-m", "mpsd.slurm", name]


def configured(place: Path, *, flags: str = "Contain") -> str:
    """Return the lines of slurm.conf with mpsd's hooks."""
    return "".join(f"{name}={place}/hooks/{hook}\n" for name, hook in HOOKS.items()) + f"PrologFlags={flags}\n"


@contextlib.contextmanager
def site(
    place: Path,
    fork_server: ForkServer,
    *,
    control: Path | None = None,
    config: str | None = None,
    settings: Mapping[str, object] = {},
    more: Callable[[Path], str] = lambda _: "",
    gpus: int = 2,
    **options: Any,
) -> Iterator[Site]:
    """Start mpsd and a cluster beside it; `settings` are those of slurm.toml, `more` lines of slurm.conf."""
    place.mkdir(mode=0o711)
    place.chmod(0o711)
    root = place / "n"
    root.mkdir(mode=0o711)
    node = Node(root=root, simulate=gpus, control=control, fork_server=fork_server, config=config)
    cluster = Cluster(place / "c", gpus=gpus, configuration=configured(place / "c") + more(place / "c"), **options)
    try:
        node.start()
        cluster.place.mkdir()
        cluster.write()
        own = {"socket": str(node.socket), "state_dir": str(cluster.place / "state")}
        write_hooks(cluster, {**own, **settings})
        cluster.start()
        yield Site(node, cluster)
    finally:
        cluster.close()
        node.clean_up()
        remove_tree(place)


__all__ = ["USERS", "Driven", "Site", "Start", "site", "start_service"]
