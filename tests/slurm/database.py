"""slurmdbd beside a cluster, on a MariaDB that knows no users and ends with it."""

from typing import TYPE_CHECKING, Final

from tests.harness import wait_until

if TYPE_CHECKING:
    from tests.slurm.cluster import Cluster

_CONFIGURATION: Final = """\
AuthType=auth/munge
AuthInfo=socket=/run/munge/munge.socket.2
DbdHost=slurmnode
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StorageUser=root
StorageLoc=slurm
LogFile={place}/log/slurmdbd.log
PidFile={place}/slurmdbd.pid
"""


def write(cluster: "Cluster", slurm_conf: str) -> None:
    """Write slurm.conf, and slurmdbd.conf for a cluster with slurmdbd."""
    place = cluster.place / "etc" / "slurm"
    if cluster.slurmdbd:
        path = place / "slurmdbd.conf"
        path.write_text(_CONFIGURATION.format(place=cluster.place))
        path.chmod(0o600)
        there = "AccountingStorageType=accounting_storage/"
        slurm_conf = slurm_conf.replace(f"{there}none", f"{there}slurmdbd\nAccountingStorageHost=slurmnode")
    (place / "slurm.conf").write_text(slurm_conf)


def start(cluster: "Cluster") -> None:
    """Start MariaDB and slurmdbd, which then knows the cluster; slurmctld does not start before."""
    place = cluster.place / "mariadb"
    place.mkdir()
    options = ["--no-defaults", "--user=root", "--skip-grant-tables", f"--datadir={place}", f"--socket={place}/socket"]
    options += [f"--pid-file={place}/pid", "--bind-address=127.0.0.1", "--innodb-flush-log-at-trx-commit=0"]
    cluster.run_daemon("mariadbd", "mariadbd", *options, "--innodb-buffer-pool-size=16M", "--innodb-log-file-size=8M")
    wait_until((place / "socket").exists, what="MariaDB to listen")
    start_slurmdbd(cluster)
    cluster.root_run("sacctmgr", "--immediate", "add", "cluster", "toy")


def start_slurmdbd(cluster: "Cluster") -> None:
    """Start slurmdbd, and wait until it answers."""
    cluster.run_daemon("slurmdbd", "slurmdbd", "-D")
    wait_until(
        lambda: cluster.root_run("sacctmgr", "--noheader", "list", "cluster", check=False).returncode == 0,
        what="slurmdbd to answer",
    )
