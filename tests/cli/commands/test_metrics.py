"""`mpsctl metrics`: the text, and the file for node_exporter."""

import os
import stat
from pathlib import Path

import pytest

from tests.cli.conftest import run_mpsctl
from tests.daemon.caller import NOBODY, needs_root
from tests.metrics_story import parsed
from tests.node import Node


def test_text(node: Node) -> None:
    """The command prints the answer of GET /metrics, with users unless --no-users is given."""
    lease = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB"}).json["id"]
    shown, sums = node.mpsctl("metrics"), node.mpsctl("metrics", "--no-users")
    node.request("DELETE", f"/v1/leases/{lease}")
    assert (shown.returncode, sums.returncode) == (0, 0)
    assert {*parsed(sums.stdout)} < {*parsed(shown.stdout)}
    assert lease in shown.stdout
    assert lease not in sums.stdout


class TestFile:
    def test_is_whole_and_readable(self, node: Node, tmp_path: Path) -> None:
        """It replaces the previous file atomically, is readable for every user, and has sums only without --users."""
        lease = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB"}).json["id"]
        file = tmp_path / "mpsd.prom"
        file.write_text("older")
        earlier = file.stat().st_ino
        assert node.mpsctl("metrics", "--textfile", str(file)).returncode == 0
        assert file.stat().st_ino != earlier
        assert stat.S_IMODE(file.stat().st_mode) == 0o644
        assert parsed(file.read_text())["mpsd_node_healthy"] == 1
        assert lease not in file.read_text()
        assert node.mpsctl("metrics", "--textfile", str(file), "--users").returncode == 0
        assert lease in file.read_text()
        assert [each.name for each in tmp_path.iterdir()] == ["mpsd.prom"]
        node.request("DELETE", f"/v1/leases/{lease}")

    @needs_root
    def test_planted_link(self, node: Node, tmp_path: Path) -> None:
        """A link that another user planted in the path is not followed; root's links, and others' directories, are."""
        real, mine, victim = (tmp_path / name for name in ("real", "mine", "victim"))
        for each in (real, mine, victim):
            each.mkdir()
        os.chown(mine, NOBODY, NOBODY)
        (mine / "planted").symlink_to(victim)
        os.lchown(mine / "planted", NOBODY, NOBODY)
        refused = node.mpsctl("metrics", "--textfile", str(mine / "planted" / "mpsd.prom"))
        assert refused.returncode == 78
        assert "symbolic link" in refused.stderr
        assert [*victim.iterdir()] == []
        (real / "absolute").symlink_to(mine)
        (real / "relative").symlink_to("../real/absolute/./")
        assert (
            node.mpsctl("metrics", "--textfile", str(real / "relative" / ".." / "mine" / "mpsd.prom")).returncode == 0
        )
        assert parsed((mine / "mpsd.prom").read_text())["mpsd_node_healthy"] == 1

    def test_mpsd_is_away(self, tmp_path: Path) -> None:
        """Without mpsd, the file does not change: its age shows that."""
        file = tmp_path / "mpsd.prom"
        file.write_text("older")
        done = run_mpsctl(tmp_path / "mpsd.sock", "metrics", "--textfile", str(file))
        assert done.returncode == 69
        assert file.read_text() == "older"

    @pytest.mark.parametrize(
        ("name", "status", "said"),
        [("mpsd.txt", 2, "only files whose names end with .prom"), ("no/mpsd.prom", 78, "No such file")],
    )
    def test_refused(self, node: Node, tmp_path: Path, name: str, status: int, said: str) -> None:
        """The command refuses a name that node_exporter ignores, and a missing directory, with the reason."""
        done = node.mpsctl("metrics", "--textfile", str(tmp_path / name))
        assert done.returncode == status
        assert said in done.stderr
