"""A driver in its own root, as in a driver container, is used completely, and nothing else of that root is used."""

import shutil
from pathlib import Path

import pytest

from mpsd.system.processes import foreign_files
from tests import real
from tests.daemon.conftest import Start
from tests.daemon.helpers import event
from tests.harness import look_at
from tests.system.fake_nvml import LIBRARY, FakeNvml

pytestmark = pytest.mark.real_daemon(535)


def test_driver_root(make_node: Start, nvml: FakeNvml, short_tmp: Path) -> None:
    """NVML and the control program are those of the root."""
    root, control = short_tmp / "driver", real.real_daemons()[535]
    for folder in ("usr/bin", "usr/lib64"):
        (root / folder).mkdir(parents=True)
    shutil.copy(control, root / "usr/bin")
    shutil.copy(nvml.library / LIBRARY, root / "usr/lib64")
    for name in ("libcuda.so.1", "libc.so.6"):
        (root / "usr/lib64" / name).write_bytes(b"no library at all")
    nvml.show("driver 535.261.03", "gpu GPU-1111 9.0 0 85520809984 640000000 0 NVIDIA H100 80GB HBM3")
    node = make_node(
        simulate=None,
        control=None,
        config=f'[daemon]\ndriver_root = "{root}"\n',
        env={"FAKE_NVML": str(nvml.directory)},
    )
    node.start()
    started = event(node, "node_started")
    assert started["program"] == str(root / "usr/bin" / control.name)
    assert started["nvml"] == str(root / "usr/lib64" / LIBRARY)
    pid = node.daemons()["gpu0"]["pid"]
    found = look_at(pid)
    assert found is not None
    assert found.command.startswith(f"{root}/")
    links = node.root / "run" / "driver"
    variables = foreign_files.environment(pid, ["LD_LIBRARY_PATH"])
    assert isinstance(variables, dict)
    assert variables["LD_LIBRARY_PATH"].split(":")[0] == str(links)
    assert {each.name for each in links.iterdir()} == {LIBRARY, "libcuda.so.1"}
