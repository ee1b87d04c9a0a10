"""The search for NVIDIA's driver, in roots as the container toolkit, the GPU operator and GKE make them."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from mpsd.core.errors import ConfigurationError
from mpsd.system.gpus import driver
from mpsd.system.processes import process
from tests.system.fake_nvml import LIBRARY, FakeNvml

CONTROL, SERVER = "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"


def make(
    root: Path, programs: str, libraries: str | None = None, *, names: tuple[str, ...] = (CONTROL, SERVER)
) -> Path:
    """Make a root with programs, and with libraries if their directory is given."""
    (root / programs).mkdir(parents=True, exist_ok=True)
    for name in names:
        (root / programs / name).write_text("#!/bin/sh\n")
        (root / programs / name).chmod(0o755)
    if libraries is not None:
        (root / libraries).mkdir(parents=True, exist_ok=True)
        for name in (LIBRARY, "libcuda.so.1", "libcuda.so.535.1", "libc.so.6"):
            (root / libraries / name).write_bytes(b"")
    return root


@pytest.fixture(autouse=True)
def _no_driver_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide this machine's own driver, if it has one."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


class TestHere:
    """A driver among the system's own files: on the machine itself, by the container toolkit, or by CDI."""

    def test_in_path(self, tmp_path: Path) -> None:
        """The program in PATH comes first, with the libraries that the loader finds."""
        make(tmp_path, "bin")
        operators = make(tmp_path / "driver", "usr/bin", "usr/lib64")
        found = driver.find(CONTROL, roots=[operators], here=tmp_path / "none")
        assert found == driver.Driver(tmp_path / "bin" / CONTROL, tmp_path / "bin" / SERVER, None)
        assert found.directories == (str(tmp_path / "bin"),)
        assert found.facts()["nvml"] == f"{LIBRARY}, found by the dynamic loader"

    def test_of_another_distribution(self, tmp_path: Path) -> None:
        """Libraries in the host's directories, where CDI puts them, are found where this system's loader skips them."""
        make(tmp_path, "bin")
        (tmp_path / "here").mkdir()
        here = make(tmp_path / "here", "usr/bin", "usr/lib64")
        found = driver.find(CONTROL, roots=[], here=here)
        try:
            ctypes.CDLL(LIBRARY)
        except OSError:
            assert (found.control, found.libraries) == (tmp_path / "bin" / CONTROL, here / "usr/lib64")
        else:
            assert found.libraries is None  # a machine with its own driver

    def test_by_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A path means exactly that program."""
        make(tmp_path, "bin")
        make(tmp_path, "opt", names=(CONTROL,))
        found = driver.find(str(tmp_path / "opt" / CONTROL))
        assert (found.control, found.server) == (tmp_path / "opt" / CONTROL, tmp_path / "bin" / SERVER)
        monkeypatch.chdir(tmp_path)
        assert driver.find(f"./opt/{CONTROL}").control == tmp_path / "opt" / CONTROL

    def test_no_server(self, tmp_path: Path) -> None:
        """A missing server is reported, since no client would get one."""
        make(tmp_path, "bin", names=(CONTROL,))
        found = driver.find(CONTROL)
        assert found.server is None
        assert found.facts()["server"] == f"not found: {SERVER}"

    def test_none(self, tmp_path: Path) -> None:
        """Without a driver, the refusal lists the directories that were searched, and the remedies."""
        with pytest.raises(ConfigurationError) as refused:
            driver.find(CONTROL, roots=[tmp_path / "driver"])
        assert str(tmp_path / "driver") in refused.value.detail
        assert "daemon.driver_root" in refused.value.hint
        with pytest.raises(ConfigurationError) as refused:
            driver.find("/there/is/none")
        assert refused.value.limit == "daemon.control"


class TestRoot:
    """A driver in its own root, as in a driver container."""

    @pytest.mark.parametrize(
        ("programs", "libraries"),
        [
            ("usr/bin", "usr/lib/x86_64-linux-gnu"),  # a driver container on Ubuntu, /driver-root
            ("usr/bin", "usr/lib64"),  # on RHEL
            ("usr/bin", "usr/lib/aarch64-linux-gnu"),  # Grace
            ("bin", "lib64"),  # GKE's /usr/local/nvidia
            ("bin", "lib"),  # NixOS's /run/opengl-driver
            ("usr/bin", "usr/lib"),  # Talos
        ],
    )
    def test_found(self, tmp_path: Path, programs: str, libraries: str) -> None:
        """A driver's programs and libraries are found in the first root that has any."""
        root = make(tmp_path / "driver", programs, libraries)
        later = make(tmp_path / "later", programs, libraries)
        found = driver.find(CONTROL, roots=[tmp_path / "not there", root, later])
        assert found == driver.Driver(root / programs / CONTROL, root / programs / SERVER, root / libraries)
        assert found.nvml == root / libraries / LIBRARY
        assert found.facts() == {
            "program": str(root / programs / CONTROL),
            "server": str(root / programs / SERVER),
            "nvml": str(root / libraries / LIBRARY),
        }

    def test_setting(self, tmp_path: Path) -> None:
        """The setting overrides both this system and the usual roots; the server may be in another directory of it."""
        make(tmp_path, "bin")
        root = make(tmp_path / "driver", "usr/bin", "usr/lib64", names=(CONTROL,))
        make(root, "usr/sbin", names=(SERVER,))
        found = driver.find(CONTROL, root, roots=[])
        assert (found.control, found.server) == (root / "usr/bin" / CONTROL, root / "usr/sbin" / SERVER)
        assert found.directories == (str(root / "usr/bin"), str(root / "usr/sbin"))
        with pytest.raises(ConfigurationError) as refused:
            driver.find(CONTROL, tmp_path / "empty")
        assert refused.value.limit == "daemon.driver_root"

    @pytest.mark.parametrize("by_path", [False, True])
    def test_without_libraries(self, tmp_path: Path, nvml: FakeNvml, *, by_path: bool) -> None:
        """A root without NVML is refused by name, with the directories that were searched; the loader may have it."""
        root = make(tmp_path / "driver", "usr/bin")
        control = str(root / "usr/bin" / CONTROL) if by_path else CONTROL
        program = (
            "import sys; from pathlib import Path; from mpsd.system.gpus import driver\n"
            "try: print(driver.find(sys.argv[1], Path(sys.argv[2])).libraries)\n"
            "except driver.ConfigurationError as error: print(error.limit, error.detail, error.hint)\n"
        )
        argv = [sys.executable, "-c", program, control, str(root)]
        environment = {"PYTHONPATH": str(Path(__file__).parents[3])}
        without, with_it = (
            subprocess.run(argv, env=environment | more, capture_output=True, text=True, check=True, timeout=30).stdout
            for more in ({}, {"LD_LIBRARY_PATH": str(nvml.library)})
        )
        assert with_it == "None\n"
        try:
            ctypes.CDLL(LIBRARY)
        except OSError:
            assert without.startswith(f"daemon.driver_root the driver in {root} has no {LIBRARY}")
            assert "usr/lib, lib" in without
        else:
            assert without == "None\n"  # a machine with its own driver


class TestLink:
    """Only the driver's libraries are linked, not the rest of its root, whose C library would not fit."""

    def test_links(self, tmp_path: Path) -> None:
        """Missing links are made, links follow an upgrade, and correct links are left alone."""
        root = make(tmp_path / "driver", "usr/bin", "usr/lib64")
        found = driver.find(CONTROL, root)
        links = tmp_path / "links"
        driver.link(found, links)
        assert {each.name for each in links.iterdir()} == {LIBRARY, "libcuda.so.1", "libcuda.so.535.1"}
        kept = (links / LIBRARY).lstat()
        (root / "usr/lib64/libcuda.so.535.1").rename(root / "usr/lib64/libcuda.so.550.2")
        driver.link(found, links)
        assert {each.name for each in links.iterdir()} == {LIBRARY, "libcuda.so.1", "libcuda.so.550.2"}
        left = (links / LIBRARY).lstat()
        assert (left.st_ino, left.st_mtime_ns) == (kept.st_ino, kept.st_mtime_ns)
        assert (links / "libcuda.so.1").readlink() == root / "usr/lib64/libcuda.so.1"

    def test_none_needed(self, tmp_path: Path) -> None:
        """A driver that the loader finds needs no links."""
        make(tmp_path, "bin")
        driver.link(driver.find(CONTROL), tmp_path / "links")
        assert not (tmp_path / "links").exists()

    def test_in_the_way(self, tmp_path: Path) -> None:
        """A file that is no link of mpsd's is not removed; mpsd refuses to continue."""
        found = driver.find(CONTROL, make(tmp_path / "driver", "usr/bin", "usr/lib64"))
        (tmp_path / "links" / "a").mkdir(parents=True)
        with pytest.raises(ConfigurationError, match="cannot link"):
            driver.link(found, tmp_path / "links")

    def test_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A control daemon searches these libraries first, then mpsd's own search path."""
        monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
        assert process.environment({}, libraries=tmp_path)["LD_LIBRARY_PATH"] == f"{tmp_path}:/mine"
        monkeypatch.delenv("LD_LIBRARY_PATH")
        assert process.environment({}, libraries=tmp_path)["LD_LIBRARY_PATH"] == str(tmp_path)


def test_nvml_of_a_root(nvml: FakeNvml) -> None:
    """NVML is loaded from the driver that was found, even if the loader would not find it there."""
    nvml.show("driver 535.0")
    program = (
        "import asyncio, sys; from pathlib import Path; from mpsd.system.gpus.gpu import NvmlGpus\n"
        "source = NvmlGpus(Path(sys.argv[1]))\n"
        "try: asyncio.run(source.inventory())\n"
        "finally: source.close()\n"
    )
    environment = {"FAKE_NVML": str(nvml.directory), "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", program, str(nvml.library / LIBRARY)],
        env=environment, capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert "NVIDIA's driver finds no GPU" in done.stderr
    assert "nvmlInitWithFlags" in nvml.functions()
    done = subprocess.run(
        [sys.executable, "-c", program, str(nvml.library / "missing.so")],
        env=environment, capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert "NVML cannot be loaded" in done.stderr
