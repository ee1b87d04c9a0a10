"""docs/slurm.md from nothing to two users on one GPU: its commands, as they stand there, on a real cluster."""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fork_server import ForkServer
from tests.harness import remove_tree, wait_until
from tests.node import Node
from tests.slurm.cluster import Cluster
from tests.slurm.site import ROOT, Site

pytestmark = [pytest.mark.launchers("slurmctld", "slurmd", "srun", "munged"), pytest.mark.root("run slurmd")]

PAGE = ROOT / "docs" / "slurm.md"

MOST = 10
"""Commands from nothing to two users on one GPU."""


def commands() -> list[str]:
    """Return the commands of the page's setup."""
    text = PAGE.read_text(encoding="utf-8").partition('<a id="setup"></a>')[2].partition("\n## What happens")[0]
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


@pytest.fixture
def bare(place: Path, fork_server: ForkServer) -> Iterator[Site]:
    """Start mpsd, and Slurm without GPUs, where /etc and /run are the cluster's own."""
    place.mkdir(mode=0o711)
    root = place / "n"
    root.mkdir(mode=0o711)
    node = Node(root=root, simulate=1, fork_server=fork_server)
    cluster = Cluster(place / "c", gpus=1)
    try:
        node.start()
        cluster.place.mkdir()
        cluster.write()
        slurm = cluster.place / "etc" / "slurm"
        without(slurm / "slurm.conf", r"^GresTypes=.*\n", r" Gres=\S+")
        without(slurm / "cgroup.conf", r"^ConstrainDevices=.*\n")
        (slurm / "gres.conf").write_text("")
        cluster.start()
        own_system(cluster, node)
        yield Site(node, cluster)
    finally:
        cluster.close()
        node.clean_up()
        remove_tree(place)


def without(path: Path, *patterns: str) -> None:
    text = path.read_text()
    for each in patterns:
        text, count = re.subn(each, "", text, flags=re.MULTILINE)
        assert count == 1, (path, each)
    path.write_text(text)


def own_system(cluster: Cluster, node: Node) -> None:
    """Let the cluster's namespaces have an /etc and a /run of their own, and mpsctl among their programs."""
    place = cluster.place
    shutil.copytree("/etc", place / "all", symlinks=True, ignore_dangling_symlinks=True)
    for each in ("mpsd", "slurm"):  # without what this machine has there
        shutil.rmtree(place / "all" / each, ignore_errors=True)
        (place / "all" / each).mkdir()
    binds = [
        (place / "all", "/etc"),
        *((place / "etc" / each, f"/etc/{each}") for each in ("slurm", "passwd", "group", "hosts")),
    ]
    script = [f"mount --bind {source} {target}" for source, target in binds]
    script += ["mount -t tmpfs -o mode=755 tmpfs /run", "mkdir /run/munge /run/mpsd"]
    script += [f"mount --bind {place}/munge /run/munge", f"mount --bind {node.root}/run /run/mpsd"]
    cluster.root_run("sh", "-ec", "\n".join(script))
    programs = place / "bin"
    programs.mkdir()
    for each in ("mpsctl", "mpsd-slurm"):
        (programs / each).symlink_to(Path(sys.executable).with_name(each))


def restart(cluster: Cluster, name: str) -> None:
    cluster.kill(name)
    getattr(cluster, f"start_{name}")()


def run(site: Site, command: str) -> str:
    """Run a command of the page as root, and return its output."""
    cluster = site.cluster
    if command.startswith("systemctl restart "):
        for each in command.split()[2:]:
            restart(cluster, each)
        wait_until(lambda: cluster.node_state() == "idle", what="the node to be idle", deadline=30)
        return ""
    if command == "systemctl enable --now mpsd-slurm.service":
        unit = (ROOT / "systemd" / "mpsd-slurm.service").read_text(encoding="utf-8")
        (program,) = re.findall(r"^ExecStart=/usr/bin/(.*)$", unit, re.MULTILINE)
        cluster.run_daemon("service", *f"{cluster.place}/bin/{program}".split())
        return ""
    done = cluster.root_run(
        "env", f"PATH={cluster.place}/bin:/usr/sbin:/usr/bin:/sbin:/bin", "bash", "-c", command, check=False
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


def test_the_page(bare: Site) -> None:
    """Two users are on one GPU after at most ten commands."""
    found = commands()
    assert len(found) <= MOST
    place = bare.cluster.place
    with bare.driven() as first, bare.driven() as second:
        for user, each in (("ann", first), ("bert", second)):
            program = place / "bin" / f"train-{user}"
            program.write_text(f"#!/bin/bash\n{each.script}\n")
            program.chmod(0o755)
        for line in found:
            command, is_users, of = line.partition("# as ")
            if is_users:
                command = command.replace("srun train", f"srun {place}/bin/train-{of}")
                command = command.replace("sbatch ", f"sbatch -o {place}/out/%u ")
                bare.cluster.run(of, "bash", "-c", command)
            else:
                run(bare, line)
            if line.startswith("mpsctl slurm install"):  # the simulated GPUs have device files elsewhere
                gres = place / "etc" / "slurm" / "mpsd-gres.conf"
                gres.write_text(gres.read_text().replace("/dev/nvidia", f"{place}/dev/nvidia"))
        try:
            answers = [first.answer(), second.answer()]
        except AssertionError as error:
            outputs = [bare.cluster.output(user) for user in ("ann", "bert")]
            raise AssertionError(f"{error}\n{outputs}\n{bare.story()}") from None
        assert [each["active_thread_percentage"] for each in answers] == [60, 40]
        assert answers[0]["gpu"] == answers[1]["gpu"]
        assert len(run(bare, "mpsctl leases -o name").splitlines()) == len(bare.leases()) == 2
        for each in (first, second):
            each.tell("exit")
    bare.wait_until_clean()
    assert run(bare, "mpsctl slurm check").count("fail") == 0
    assert "Include" in run(bare, "mpsctl slurm install --apply")


@pytest.mark.parametrize("most", [1200])
def test_it_stays_short(most: int) -> None:
    assert len(PAGE.read_text(encoding="utf-8").split()) <= most
