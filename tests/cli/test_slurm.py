"""mpsctl slurm: what it reads, and what it writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpsd.core.errors import ConfigurationError
from mpsd.core.slurm import settings
from mpsd.system.host import slurm
from tests.node import Node

SLURM = "GresTypes=gpu,mps\nInclude more.conf\nNodeName=n1 Gres=gpu:1,mps:100\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a directory with a slurm.conf that includes another file."""
    (tmp_path / "slurm.conf").write_text(SLURM)
    (tmp_path / "more.conf").write_text("PrologFlags=Contain\nProlog=/bin/true\nInclude more.conf\n")
    (tmp_path / "gres.conf").write_text("Name=mps Count=100 File=/dev/nvidia0\n")
    return tmp_path


def test_check_reads_what_slurm_reads(shared_node: Node, folder: Path) -> None:
    """Included files too, and without end where a file includes itself."""
    for config in (folder, folder / "slurm.conf"):
        done = shared_node.mpsctl("slurm", "check", "--config", str(config), "-o", "json")
        assert done.returncode == 1, done.stderr
        found = [each["because"] for each in json.loads(done.stdout)["findings"]]
        assert "Prolog=/bin/true does not call mpsd's prolog" in found
        assert "slurm.conf has no Epilog" in found
        assert not [each for each in found if "PrologFlags" in each or "GresTypes" in each]
    text = shared_node.mpsctl("slurm", "check", "--config", str(folder)).stdout
    assert "fail     slurm.conf has no Epilog\n         remedy: Epilog=/etc/mpsd/slurm/epilog" in text


def test_check_without_slurm(shared_node: Node, tmp_path: Path) -> None:
    done = shared_node.mpsctl("slurm", "check", "--config", str(tmp_path))
    assert done.returncode == 78
    assert f"there is no slurm.conf in {tmp_path}" in done.stderr


def test_install_shows_and_writes_nothing(shared_node: Node, folder: Path) -> None:
    before = sorted(folder.iterdir())
    text = shared_node.mpsctl("slurm", "install", "--config", str(folder)).stdout
    assert sorted(folder.iterdir()) == before
    assert f"# {folder}/mpsd-slurm.conf" in text
    assert "GresTypes=gpu,mps,gpumem" in text
    memory = shared_node.get("/v1/gpus").json["gpus"][0]
    granted = memory["memory_total"] - memory["memory_reserved"]
    assert f"mpsd.gpu_memory = {granted}" in text
    assert f"gpu:2,mps:200,gpumem:{2 * granted // 2**20}M" in text
    assert "Name=mps Count=100 File=/dev/nvidia1 Flags=all_sharing" in text
    shards = shared_node.mpsctl("slurm", "install", "--config", str(folder), "--share", "shard").stdout
    assert "Name=shard Count=4 File=/dev/nvidia0 Flags=all_sharing" in shards


def test_files_are_written_once_and_kept(tmp_path: Path) -> None:
    """What is mpsd's follows its version; what a site may change is kept, and hooks are mended."""
    texts, kept = {tmp_path / "a": "1\n"}, {tmp_path / "b": "2\n"}
    first = [*slurm.put(texts, kept, hooks=tmp_path / "hooks")]
    hooks = sorted(os.listdir(tmp_path / "hooks"))  # noqa: PTH208 - names are wanted
    assert hooks == ["epilog", "health", "prolog", "task-prolog"]
    assert len(first) == 2 + len(hooks)
    assert not [*slurm.put(texts, kept, hooks=tmp_path / "hooks")]
    for each in "ab":
        (tmp_path / each).write_text("changed\n")
    (tmp_path / "hooks" / "prolog").unlink()
    (tmp_path / "hooks" / "prolog").symlink_to("/bin/true")
    again = [*slurm.put(texts, kept, hooks=tmp_path / "hooks")]
    assert len(again) == 2
    assert [(tmp_path / each).read_text() for each in "ab"] == ["1\n", "changed\n"]
    assert not (tmp_path / "hooks" / "prolog").is_symlink()


def test_a_hook_in_a_user_s_environment(tmp_path: Path) -> None:
    """TaskProlog has the variables of the job, which may be for another Python, or have modules of the same names."""
    [*slurm.put({}, {}, hooks=tmp_path / "hooks")]
    (tmp_path / "json.py").write_text("raise SystemExit(3)\n")
    foreign = {"PYTHONHOME": str(tmp_path), "PYTHONPATH": str(tmp_path), "SLURM_JOB_GPUS": "0"}
    share = {"SLURM_JOB_ID": "4711", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}
    done = subprocess.run(
        [tmp_path / "hooks" / "task-prolog"], env=foreign | share, cwd=tmp_path,
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("print mpsd: job 4711 has a share of a GPU by Slurm, and no lease"), done.stderr
    assert done.returncode == 1


def test_the_settings_of_install_are_accepted() -> None:
    assert settings.parse('comment = true\nsocket = "/run/x.sock"\n').comment
    assert "mpsd.submit = " in slurm.script()


def test_a_hook_by_a_link_of_any_name(tmp_path: Path) -> None:
    """As in a directory of Prologs: slurmd says which hook it runs. An unknown name would drain the node."""
    link = tmp_path / "50-mpsd"
    link.symlink_to(Path(sys.executable).with_name("mpsd-slurm"))
    for context, status, said in (("epilog_slurmd", 0, ""), ("prolog_slurmd", 0, "mpsd: "), ("", 2, "usage: ")):
        job = {} if said else {"SLURM_JOB_ID": "4711", "SLURM_JOB_UID": "0"}
        variables = {"SLURM_SCRIPT_CONTEXT": context, **job}
        done = subprocess.run([link], env=variables, capture_output=True, text=True, timeout=30, check=False)
        assert (done.returncode, done.stderr[: len(said)]) == (status, said)


def test_a_program_that_users_cannot_run(tmp_path: Path) -> None:
    """TaskProlog runs as a job's user: what is installed in a closed directory is no hook."""
    slurm.check_open(Path("/usr/bin/env"))
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / "python3").touch(mode=0o755)
    with pytest.raises(ConfigurationError) as refused:
        slurm.check_open(closed / "python3")
    assert refused.value.hint.endswith(f"chmod o+rx {closed}")
