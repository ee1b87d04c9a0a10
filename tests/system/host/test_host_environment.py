"""mpsd detects from within what a container lacks; the tests make containers of namespaces, without an engine."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mpsd.core.capabilities import DAEMON
from mpsd.core.model import Known, Unknown
from mpsd.system.processes import foreign_files, namespaces, proc, process
from tests.daemon.caller import needs_root

pytestmark = pytest.mark.thorough

ROOT = str(Path(__file__).parents[3])

LOOK = """
import json, sys
from mpsd.core.configuration.document import parse
from mpsd.system.host import host_environment
print(json.dumps([[each.name, each.because, each.remedy] for each in host_environment.missing(parse(sys.argv[1]))]))
"""

MOUNTED = """
import os, sys
print(flush=True)
sys.stdin.read()
"""


def missing(prefix: Sequence[str], config: str = "") -> dict[str, tuple[str, str]]:
    """Return what is missing to a process that this command starts: reason and remedy by name."""
    done = subprocess.run(
        [*prefix, sys.executable, "-c", LOOK, config],
        capture_output=True, text=True, check=False, timeout=30, env={**os.environ, "PYTHONPATH": ROOT},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {name: (because, remedy) for name, because, remedy in json.loads(done.stdout)}


@needs_root
class TestMissing:
    def test_own_pid_namespace(self) -> None:
        """Without the host's pid namespace mpsd cannot identify its callers."""
        found = missing(["unshare", "--pid", "--fork", "--mount-proc"])
        assert "hostPID: true" in found["pid namespace"][1]

    def test_own_user_namespace(self) -> None:
        """Without the host's user namespace several uids look the same."""
        found = missing(["unshare", "--user", "--map-root-user"])
        assert "65534" in found["user namespace"][0]

    def test_own_root(self) -> None:
        """A runtime directory on the container's own root is reported; one on a volume is not."""
        make = "mount -t tmpfs none /mnt; cd /mnt; mkdir lower upper work root;"
        make += " mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work none root;"
        make += " for each in /*; do case $each in /mnt) continue; esac;"
        make += ' if [ -L "$each" ]; then cp -a "$each" root; elif [ -d "$each" ]; then mkdir "root$each";'
        make += ' mount --rbind "$each" "root$each"; fi; done; exec chroot root "$@"'
        container = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", make, "sh"]
        found = missing(container, '[paths]\nruntime_dir = "/own/run"\n')
        assert "/own/run is on the root file system of mpsd's own container" in found["runtime directory"][0]
        assert "runtime directory" not in missing(container, '[paths]\nruntime_dir = "/run/mpsd"\n')
        assert "runtime directory" not in missing([], '[paths]\nruntime_dir = "/own/run"\n')

    def test_capabilities(self) -> None:
        """Each missing capability is named, with what fails without it; two of them only where a setting needs them."""
        bounded = ["setpriv", "--bounding-set=-all,+setuid,+setgid,+setpcap,+sys_ptrace", "--inh-caps=-all"]
        here = missing([])
        assert set(missing(bounded)) - set(here) == {"CAP_DAC_READ_SEARCH", "CAP_KILL"}
        assert "cannot be ended" in missing(bounded)["CAP_KILL"][0]
        config = '[api]\ngroup = "daemon"\n[daemon]\ncompute_mode = "exclusive-process"\n'
        assert set(missing(bounded, config)) - set(here) == {
            "CAP_DAC_READ_SEARCH", "CAP_KILL", "CAP_CHOWN", "CAP_SYS_ADMIN",
        }  # fmt: skip

    def test_giving_less(self) -> None:
        """mpsd reports when control daemons have more capabilities than they need because it cannot remove them."""
        setpriv, one = ["setpriv", "--inh-caps=-all", "--bounding-set"], '[daemon]\nusers = "one"\n'
        assert "CAP_SETPCAP" in missing([*setpriv, "-setpcap"], one)
        assert "CAP_SETPCAP" not in missing([*setpriv, "-setpcap"], '[daemon]\nusers = "many"\n')
        kept = "-all," + ",".join(f"+{each.name.lower()}" for each in DAEMON)
        assert "CAP_SETPCAP" not in missing([*setpriv, kept], one)
        assert "CAP_SETPCAP" not in missing([*setpriv, f"{kept},+sys_ptrace,+setpcap"], one)

    def test_any_other_user(self) -> None:
        """An mpsd that is not root serves its own uid, and needs no capability."""
        found = missing(["setpriv", "--reuid=65534", "--clear-groups"])
        assert not [name for name in found if name.startswith("CAP_")]


@needs_root
class TestHidden:
    @pytest.fixture
    def directories(self, short_tmp: Path) -> list[Path]:
        """Make two directories."""
        made = [short_tmp / "run" / "a", short_tmp / "run" / "b"]
        for each in made:
            each.mkdir(parents=True)
        return made

    def hidden(self, script: str, directories: list[Path]) -> list[Path]:
        """Return which directories are hidden from a process after these mounts."""
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", f'{script}; exec "$@"', "sh"]
        with subprocess.Popen(
            [*command, sys.executable, "-c", MOUNTED], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"\n"
            try:
                return foreign_files.hidden(child.pid, directories)
            finally:
                child.communicate(timeout=10)

    def test_nothing(self, directories: list[Path]) -> None:
        """Nothing is hidden from a process in this file system, or where the whole of it is also mounted elsewhere."""
        assert foreign_files.hidden(os.getpid(), directories) == []
        assert self.hidden("true", directories) == []

    def test_one(self, directories: list[Path]) -> None:
        """A directory with a foreign mount over it is hidden; one that was mounted back is not."""
        first, second = directories
        run = first.parent
        script = (
            f"mount --bind {second} /mnt && mount -t tmpfs none {run} && mkdir {second} && mount --bind /mnt {second}"
        )
        assert self.hidden(script, directories) == [first]

    def test_another_root(self, directories: list[Path], short_tmp: Path) -> None:
        """For a process that has changed its root all are hidden, though it is in mpsd's own mount namespace."""
        command = [sys.executable, "-c", f"import os, sys; os.chroot({str(short_tmp)!r}){MOUNTED}"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"\n"
            assert Path(f"/proc/{child.pid}/ns/mnt").readlink() == Path("/proc/self/ns/mnt").readlink()
            assert foreign_files.hidden(child.pid, directories) == directories
            child.communicate(timeout=10)

    def test_not_there_yet(self, directories: list[Path]) -> None:
        """A directory that does not exist yet is hidden where its nearest parent is, and nowhere else."""
        run = directories[0].parent
        to_come = run / "mps" / "gpu0"
        assert self.hidden(f"mount -t tmpfs none {run}", [to_come]) == [to_come]
        assert self.hidden("mount -t tmpfs none /mnt", [to_come]) == []

    def test_not_to_be_told(self, directories: list[Path], short_tmp: Path) -> None:
        """Neither directories of an ended process nor those behind a link are reported as hidden."""
        first, _ = directories
        (short_tmp / "link").symlink_to(first)
        assert self.hidden(f"mount -t tmpfs none {first}", [short_tmp / "link"]) == []
        child = subprocess.Popen(["true"])
        child.wait()
        assert foreign_files.hidden(child.pid, directories) == []


def test_cgroup_namespace() -> None:
    """In a cgroup namespace the host's root group looks like `/../..`, and identifies no group."""
    assert proc._within("/../..") == ""
    assert proc._within("/") == ""
    assert proc._within("/../other") == "/../other"


def test_what_cannot_be_told_is_not_kept() -> None:
    """A process whose paths cannot be resolved is unknown, and checked again the next time."""
    assert namespaces.sees_alike(os.getpid()) == Known(value=True)
    with subprocess.Popen(["sleep", "infinity"]) as child:
        seen = process.find(child.pid)
        assert seen is not None
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert isinstance(seen.sees_alike(), Unknown)  # an ended process has no root any more
        assert not seen._alike
        seen.close()


@pytest.mark.root("mount a file system")
@pytest.mark.parametrize("name", ["a\rb", "a\u2028b", "a\x0cb", "a\x85b", "a b - tmpfs c"])
def test_mounts_with_odd_names(short_tmp: Path, name: str) -> None:
    """Foreign mounts decide nothing, whatever their names contain."""
    (short_tmp / name).mkdir()
    script = 'mount -t tmpfs none "$0" && exec "$@"'
    asks = (
        "import pathlib; from mpsd.system.host import host_environment; "
        "print(host_environment.file_system(pathlib.Path('/proc')))"
    )
    command = ["unshare", "-m", "--propagation", "private", "sh", "-c", script, f"{short_tmp / name}"]
    done = subprocess.run([*command, sys.executable, "-c", asks], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("proc\n", "")
