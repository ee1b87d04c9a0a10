"""Nodes with mpsd, simulated GPUs, and Slurm with mpsd's hooks."""

import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeAlias

from mpsd.simulator.client import program
from mpsd.simulator.devices import VARIABLE
from tests.driven import Driven
from tests.fork_server import ForkServer
from tests.harness import look_at, remove_tree, wait_until
from tests.node import Node
from tests.slurm.cluster import USERS, Cluster

ROOT: Final = Path(__file__).parents[2]

ROLES: Final = '[roles]\nusers = []\nobservers = ["*"]\n'
"""Those of mpsd's profile for Slurm: users take the leases of their jobs, and no others."""

HOOKS: Final = {"Prolog": "prolog", "Epilog": "epilog", "TaskProlog": "task-prolog"}

_numbers = count(1)

Start: TypeAlias = "Callable[..., contextlib.AbstractContextManager[Site]]"


class Client(Driven):
    """A client of simulated GPUs in a job; `script` is the job's."""

    def __init__(self, site: "Site") -> None:
        directory = site.directory()
        super().__init__(directory)
        self.script = site.client(f'<"{directory}/in" >"{directory}/out"')


class Site:
    """A node of a cluster whose configuration is written, with its mpsd."""

    def __init__(self, node: Node, cluster: Cluster, number: int = 0) -> None:
        self.node = node
        self.cluster = cluster
        self.machine = cluster.machines[number]
        (self.machine.own / "hooks" / "simulated").symlink_to(node.root / "run" / "simulated")

    @property
    def state_dir(self) -> Path:
        return self.machine.own / "state"

    def client(self, streams: str = "") -> str:
        """Return a line of a job's script that becomes a client of the simulated GPUs of the node it runs on."""
        words = [f"{VARIABLE}={self.cluster.place}/hooks/simulated", f"PYTHONPATH={ROOT}"]
        return f"exec env {shlex.join([*words, *program()])} {streams}"

    def directory(self) -> Path:
        """Make a directory for pipes to a job."""
        made = self.cluster.place / "out" / f"c{next(_numbers)}"
        made.mkdir(mode=0o755)
        made.chmod(0o755)
        return made

    def driven(self) -> Client:
        return Client(self)

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


def write_hooks(site: Site, settings: Mapping[str, object]) -> None:
    """Write the hooks of a node, which run this checkout's mpsd-slurm with these settings."""
    hooks, place = site.machine.own / "hooks", site.cluster.place / "hooks"
    every = {"socket": str(site.node.socket), "state_dir": str(site.state_dir), **settings}
    (hooks / "slurm.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in every.items()))
    packages = next(each for each in sys.path if each.endswith("site-packages"))
    python = Path(sys.executable).resolve()
    for name in HOOKS.values():
        # As the installed program starts, without the packages that the machine's own Python may load by itself.
        start = f"import sys; sys.path[:0] = {str(ROOT)!r}, {packages!r}; from mpsd.slurm.__main__ import main"
        (hooks / name).write_text(
            f"#!/bin/sh\nMPSD_SLURM_CONFIG={place}/slurm.toml exec {python} -I -S -c"
            f" {shlex.quote(f'{start}; sys.exit(main([{name!r}]))')}\n"
        )
        (hooks / name).chmod(0o755)
    hooks.chmod(0o755)


def start_service(site: Site) -> None:
    """Start `mpsd-slurm service` beside slurmd."""
    site.cluster.pids[f"service{site.machine.number}"] = site.machine.run_daemon(
        "service", *hook_program(site, "service")
    )


def stop_service(site: Site) -> None:
    pid = site.cluster.pids.pop(f"service{site.machine.number}")
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: look_at(pid) is None, what="the service to end")


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
def sites(
    place: Path,
    fork_server: ForkServer,
    *,
    control: Path | None = None,
    config: str = ROLES,
    settings: Mapping[str, object] = {},
    more: Callable[[Path], str] = lambda _: "",
    gpus: int = 2,
    **options: Any,
) -> Iterator[list[Site]]:
    """Start a cluster, and mpsd on each of its nodes.

    `settings` are those of slurm.toml, `more` lines of slurm.conf, and `options` those of the cluster.
    """
    place.mkdir(mode=0o711)
    place.chmod(0o711)
    cluster = Cluster(place / "c", gpus=gpus, configuration=configured(place / "c") + more(place / "c"), **options)
    nodes = []
    for each in cluster.machines:
        root = place / f"n{each.number}"
        root.mkdir(mode=0o711)
        nodes.append(Node(root=root, simulate=gpus, control=control, fork_server=fork_server, config=config))
    try:
        for node in nodes:
            node.start()
        cluster.place.mkdir()
        cluster.write()
        found = [Site(node, cluster, number) for number, node in enumerate(nodes)]
        for each_site in found:
            write_hooks(each_site, settings)
        cluster.start()
        yield found
    finally:
        cluster.close()
        for node in nodes:
            node.clean_up()
        remove_tree(place)


@contextlib.contextmanager
def site(place: Path, fork_server: ForkServer, **options: Any) -> Iterator[Site]:
    """Start a cluster of one node with mpsd; the options are those of `sites`."""
    with sites(place, fork_server, **options) as (started,):
        yield started


__all__ = ["USERS", "Client", "Site", "Start", "site", "sites", "start_service", "stop_service"]
