"""Faults of the machine: processes cannot start, the clock jumps, signals arrive in storms, a disk is full."""

import contextlib
import os
import shutil
import signal
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tests.daemon.conftest import Start
from tests.daemon.gpu.test_compute_mode import GPU_IS_LOST, HANG, TWO_GPUS
from tests.daemon.helpers import by_hand, event, kill, next_ready
from tests.harness import wait_until
from tests.node import Node
from tests.system.fake_nvml import FakeNvml
from tests.tools import compiler, lacking

pytestmark = [pytest.mark.real_daemon(535), pytest.mark.thorough]

CEILING: Final = "[limits]\nactive_thread_percentage = {}\n"
SMALL: Final = {"threads": 10, "memory": "1GiB"}


def leases(node: Node) -> dict[str, Any]:
    return {each["id"]: each for each in node.get("/v1/leases").json["leases"]}


# -- no process can be started -----------------------------------------------------------------------------------------

USER: Final = 61777
"""A uid that no user has."""

AS_USER: Final = ("setpriv", "--reuid", str(USER), "--regid", str(USER), "--clear-groups")


@dataclass
class AsUser(Node):
    """An mpsd that is not root, since limits on processes do not apply to root."""

    @property
    def command(self) -> list[str]:
        return [*AS_USER, *super().command]

    def most_processes(self, most: int) -> None:
        """Limit the number of processes of mpsd's user."""
        subprocess.run([*AS_USER, "prlimit", "--pid", str(self.pid), f"--nproc={most}:"], check=True)


@pytest.mark.root("be another user")
def test_no_process_can_be_started(short_tmp: Path, control: Path) -> None:
    """When mpsd cannot fork, it reports that, stops admission, gives no daemon up, and recovers later."""
    root = short_tmp / "n"
    root.mkdir()
    short_tmp.chmod(0o711)
    os.chown(root, USER, USER)
    mine = Path(shutil.copy(control, short_tmp))  # where every user has access
    # One death is followed by a start at once; if that failed start counted as a second death, the daemon would be
    # failed.
    node = AsUser(root=root, control=mine, config="[daemon]\nprobe_interval = 0.2\ndeaths = 2\n")
    try:
        before = node.start().daemons()
        node.most_processes(1)
        node.wait_for_state("gpu0", "unresponsive")
        for each in before.values():
            kill(each["pid"])
        for name in before:
            down = node.wait_for_state(name, "down")
            assert "cannot be started now: Resource temporarily unavailable" in down["because"]
            assert "only an operator can change it" in down["hint"]  # mpsd's own user is one, and root is not
        refused = node.request("POST", "/v1/leases", SMALL)
        assert (refused.status, refused.json["code"]) == (409, "daemon_not_ready")
        node.most_processes(1000)
        for name, each in before.items():
            next_ready(node, name, each["pid"])
        assert node.request("POST", "/v1/leases", SMALL).status == 201
        assert len(node.events("daemon_death")) == 2
    finally:
        node.clean_up()


# -- the clock ---------------------------------------------------------------------------------------------------------

DAY: Final = 86400


class Clock:
    """The time of day as one mpsd sees it (set_clock.c)."""

    def __init__(self, directory: Path) -> None:
        """Build the library; the clock begins with the real time."""
        self._library, self._offset = directory / "set_clock.so", directory / "offset"
        source = Path(__file__).parent / "set_clock.c"
        subprocess.run([compiler(), "-O1", "-shared", "-fPIC", "-o", self._library, source, "-ldl"], check=True)
        self._offset.write_bytes(bytes(8))
        self.variables = {"LD_PRELOAD": str(self._library), "SET_CLOCK": str(self._offset)}

    def set(self, seconds: int) -> None:
        """Set the clock to so many seconds from the real time."""
        with self._offset.open("r+b") as file:
            file.write(struct.pack("=q", seconds))


@pytest.mark.thorough
def test_clock(make_node: Start, short_tmp: Path) -> None:
    """A clock that jumps back and forth by a year changes dates in the log, and no deadline, lease or limit."""
    clock = Clock(short_tmp)
    node = make_node(simulate=1, config="[daemon]\ndeath_window = 0.1\n", env=clock.variables).start()
    year = int(node.log()[-1]["at"][:4])
    kept = node.request("POST", "/v1/leases", {"threads": 60, "memory": "1GiB", "ttl": 600}).json["id"]
    limits = by_hand(node, "gpu0")
    for years in (1, -2):
        clock.set(years * 366 * DAY)
        # Only leases whose time to live has passed end.
        short = node.request("POST", "/v1/leases", {**SMALL, "ttl": 0.5}).json["id"]
        over = event(node, "lease_ended", lease=short)
        assert int(over["at"][:4]) - year in {years - 1, years, years + 1}
        refused = node.request("POST", "/v1/leases", {**SMALL, "threads": 90, "wait": 0.3})
        assert refused.json["code"] == "does_not_fit", refused.json
        # The control daemon is still watched, and its limits are still enforced.
        pid = node.daemons()["gpu0"]["pid"]
        kill(pid)
        next_ready(node, "gpu0", pid)
        node.ask("gpu0", "set_default_active_thread_percentage 7")
        wait_until(lambda: by_hand(node, "gpu0") == limits, what="a stranger's limit to be put back")
        node.end(signal.SIGKILL)
        node.start()
        assert leases(node).keys() == {kept}


# -- signals, disks, and the driver ------------------------------------------------------------------------------------


def test_storm_of_reloads(make_node: Start) -> None:
    """However often SIGHUP comes, the last file applies, mpsd answers, and no daemon is affected."""
    node = make_node(simulate=1, config=CEILING.format(50)).start()
    before, used = node.daemons()["gpu0"], len([*Path(f"/proc/{node.pid}/fd").iterdir()])
    for number in range(2000):
        if number % 100 == 0:
            node.configuration.write_text(CEILING.format(10 + number / 100))
        node.hang_up()
    assert node.get("/healthz").status == 200
    node.reload("nonsense = [")
    node.reload(CEILING.format(70))
    wait_until(lambda: by_hand(node, "gpu0")[0] == ["70.0"], what="the last limit to hold")
    after = node.daemons()["gpu0"]
    assert (after["pid"], after["ready_since"]) == (before["pid"], before["ready_since"])
    wait_until(lambda: len([*Path(f"/proc/{node.pid}/fd").iterdir()]) <= used + 1, what="the descriptors to be closed")


@pytest.mark.root("mount a file system")
def test_full_log_directory(make_node: Start) -> None:
    """When no log can be written, mpsd's own included, limits are still enforced and leases granted."""
    node = make_node(simulate=1, config=CEILING.format(50) + "[daemon]\nprobe_interval = 0.3\n")
    logs = node.root / "log"
    logs.mkdir(mode=0o755)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "none", logs], check=False).returncode:
        lacking("mounting is not allowed here")
    try:
        node.stderr.symlink_to(logs / "mpsd.stderr")
        before = node.start().daemons()["gpu0"]["pid"]
        with (logs / "full").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        node.ask("gpu0", "set_default_active_thread_percentage 7")
        wait_until(lambda: by_hand(node, "gpu0")[0] == ["50.0"], what="a stranger's limit to be put back")
        assert node.request("POST", "/v1/leases", SMALL).status == 201
        kill(before)
        next_ready(node, "gpu0", before)
        assert node.request("POST", "/v1/leases", SMALL).status == 201
    finally:
        # Lazily, since mpsd and its control daemons end only after this.
        subprocess.run(["umount", "--lazy", logs], check=True)


@pytest.mark.thorough
def test_gpu_that_hangs_or_is_lost(make_node: Start, nvml: FakeNvml) -> None:
    """While NVML hangs, or has lost a GPU, mpsd reports that and grants no lease there; existing leases stay."""
    nvml.show(*TWO_GPUS)
    node = make_node(simulate=None, env=nvml.variables).start()
    pids = {name: each["pid"] for name, each in node.daemons().items()}
    kept, other = (node.request("POST", "/v1/leases", {**SMALL, "gpu": gpu}).json["id"] for gpu in "01")

    def health() -> str:
        # This request makes mpsd read its GPUs, which it does by itself every ten seconds.
        node.get(f"/v1/leases/{other}/verify")
        found: str = node.get("/v1/gpus").json["gpus"][0]["health"]
        return found

    for fault in (GPU_IS_LOST, HANG):
        nvml.show(*TWO_GPUS, f"fault nvmlDeviceGetMemoryInfo_v2 0 {fault}")
        wait_until(lambda: health() == "unknown", what="it to be unknown")
        refused = node.request("POST", "/v1/leases", {**SMALL, "gpu": "0"})
        assert (refused.status, refused.json["code"]) == (409, "daemon_not_ready")
        assert node.get("/readyz").status == 503
        nvml.show(*TWO_GPUS)
        wait_until(lambda: health() == "ok", what="it to be read again", deadline=30)
        assert node.request("POST", "/v1/leases", {**SMALL, "gpu": "0"}).status == 201
    assert leases(node).keys() >= {kept, other}
    assert {name: each["pid"] for name, each in node.daemons().items()} == pids
