"""How many users a control daemon serves: by default several, where the control program, the GPUs and mpsd can."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.daemon.caller import calling, needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import GIB, branches, limits_for
from tests.daemon.test_machine import USER, AsUser
from tests.fork_server import ForkServer
from tests.harness import wait_until
from tests.node import Node
from tests.real import RealDaemon, real_daemons
from tests.system.fake_nvml import FakeNvml

pytestmark = pytest.mark.thorough

MANY: Final = '{limits}\n[daemon]\nusers = "many"\n'

OLD: Final = branches(470, 535, 550)
NEW: Final = branches(555)

ANN, BOB = 2701, 2702

UUID: Final = "GPU-11111111-2222-4333-8444-555555555555"


def check(real: RealDaemon, folder: Path) -> "subprocess.CompletedProcess[str]":
    path = folder / "mpsd.toml"
    path.write_text(f'[daemon]\nusers = "many"\ncontrol = "{real.control}"\n')
    command = (sys.executable, "-m", "mpsd", "check", "--config", str(path))
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)


def restarted(node: Node) -> dict[str, Any]:
    before = node.daemons()["gpu0"]["pid"]
    assert node.request("POST", "/v1/daemons/gpu0/restart", {}).status == 202
    found: dict[str, Any] = wait_until(
        lambda: (now := node.daemons()["gpu0"])["state"] == "ready" and now["pid"] != before and now,
        what="the next control daemon",
    )
    return found


@pytest.mark.parametrize("real", OLD)
def test_refused(make_node: Start, short_tmp: Path, real: RealDaemon) -> None:
    """mpsd refuses it with a remedy, in check, at a start and in a reload, which changes nothing."""
    checked = check(real, short_tmp)
    assert checked.returncode == 78
    assert 'daemon.users = "one"' in checked.stderr
    node = make_node(simulate=1, control=real.control, config=limits_for(real)).start()
    before, config = node.unharmed(), node.get("/v1/config").json
    answer = node.reload(MANY.format(limits=limits_for(real)))
    assert answer["event"] == "settings_refused"
    assert node.mpsctl("reload").returncode == 78
    assert node.get("/v1/config").json == config
    # A restart of the control daemon still works.
    assert node.unharmed() == before
    assert restarted(node)["restart_for"] == []
    other = make_node(simulate=1, control=real.control, config=MANY.format(limits=limits_for(real)))
    other.launch()
    assert other.process is not None
    assert other.process.wait(20) == 78


@pytest.mark.root("have a control daemon serve several users")
@pytest.mark.parametrize("real", NEW)
def test_accepted(make_node: Start, short_tmp: Path, real: RealDaemon) -> None:
    """The reload says that it takes effect with the next control daemon, and how to have that."""
    assert check(real, short_tmp).returncode == 0
    one = f'{limits_for(real)}\n[daemon]\nusers = "one"\n'
    node = make_node(simulate=1, control=real.control, config=one).start()
    before = node.daemons()["gpu0"]["pid"]
    node.configuration.write_text(MANY.format(limits=limits_for(real)))
    assert "mpsctl restart gpu0" in node.mpsctl("reload").stdout
    found = node.daemons()["gpu0"]
    assert (found["pid"], found["restart_for"]) == (before, ["daemon.users"])
    assert restarted(node)["restart_for"] == []


@needs_root
@pytest.mark.parametrize("real", branches(535, 555))
def test_proposed(make_node: Start, real: RealDaemon) -> None:
    """The refusal of a second user proposes it only where it would work, and a restart where that is missing."""
    node = make_node(simulate=1, control=real.control, config='[daemon]\nusers = "one"\n').start()
    with calling(node.socket, uid=ANN) as ann, calling(node.socket, uid=BOB) as bob:
        assert ann.admit(threads=25, memory=GIB).status == 201

        def hint() -> str:
            refused = bob.admit(threads=25, memory=GIB)
            assert (refused.status, refused.json["limit"]) == (409, "user")
            said: str = refused.json["hint"]
            return said

        if real.branch >= 555:
            wait_until(lambda: "daemon.users" in hint(), what="the program to be asked")
            node.reload(MANY.format(limits=limits_for(real)))
            assert "mpsctl restart gpu0" in hint()
        else:
            assert "daemon.users" not in hint()


@needs_root
@pytest.mark.parametrize("real", branches(535, 555))
def test_where_it_can(make_node: Start, real: RealDaemon) -> None:
    """By default, it serves several users where the control program can, at a start and in a reload, or else one."""
    node = make_node(simulate=1, control=real.control, config=limits_for(real)).start()
    can = real.branch >= 555
    assert node.get("/v1/config").json["config"]["daemon"]["users"] == ("many" if can else "one")
    with calling(node.socket, uid=ANN) as ann, calling(node.socket, uid=BOB) as bob:
        assert ann.admit(threads=25, memory=GIB).status == 201
        assert bob.admit(threads=25, memory=GIB).status == (201 if can else 409)
    node.reload(limits_for(real))
    assert node.daemons()["gpu0"]["restart_for"] == []


@needs_root
@pytest.mark.parametrize(("capability", "users"), [("6.1", "one"), ("7.0", "many")])
def test_gpus_before_volta(
    make_node: Start, nvml: FakeNvml, nvml_fork_server: ForkServer, capability: str, users: str
) -> None:
    """MPS serves one user at a time there, whatever the control program knows."""
    nvml.show("driver 555.58.02", f"gpu {UUID} {capability} 0 {8 * GIB} 0 0 NVIDIA GPU")
    options = {"control": real_daemons()[555], "config": "", "env": nvml.variables, "fork_server": nvml_fork_server}
    node = make_node(simulate=None, **options).start()
    assert node.get("/v1/config").json["config"]["daemon"]["users"] == users
    node.reload("[api]\nopen = true\n")
    assert node.get("/v1/config").json["config"]["daemon"]["users"] == users


@pytest.mark.root("be another user")
def test_of_another_user_than_root(short_tmp: Path) -> None:
    """Only a control daemon of root can serve several users."""
    root = short_tmp / "n"
    root.mkdir()
    short_tmp.chmod(0o711)
    os.chown(root, USER, USER)
    control = Path(shutil.copy(real_daemons()[555], short_tmp))  # where every user has access
    node = AsUser(root=root, simulate=1, control=control, config="")
    try:
        assert node.start().get("/v1/config").json["config"]["daemon"]["users"] == "one"
    finally:
        node.clean_up()
