"""The CDI device of a lease: the document as runtimes read it, and which files are recognised as mpsctl's own."""

from typing import Any, Final

import pytest

from mpsd.core.containers import cdi
from mpsd.core.errors import InvalidRequestError

LEASE: Final = "lease-0123456789"
DEVICE: Final = cdi.Device(LEASE, "/run/mpsd/mpsd.sock")
PROGRAM: Final = ("/usr/lib/mpsd/bin/python3", "-I", "-m", "mpsd.cli.main")
VARIABLES: Final = {
    "CUDA_MPS_PIPE_DIRECTORY": "/run/mpsd/mps/gpu0",
    "CUDA_VISIBLE_DEVICES": "GPU-5b1c",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25.0",
    "MPSD_LEASE": LEASE,
    "MPSD_LEASE_TOKEN": "5ec12e7",
}

GOLDEN: Final = """\
{
  "cdiVersion": "0.3.0",
  "kind": "mpsd/lease",
  "devices": [
    {
      "name": "lease-0123456789",
      "containerEdits": {
        "env": [
          "CUDA_MPS_PIPE_DIRECTORY=/run/mpsd/mps/gpu0",
          "CUDA_VISIBLE_DEVICES=GPU-5b1c",
          "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25.0",
          "MPSD_LEASE=lease-0123456789",
          "MPSD_LEASE_TOKEN=5ec12e7",
          "CUDA_MPS_CLIENT_PRIORITY=0",
          "CUDA_MPS_PROTOCOL_VERSION=2"
        ],
        "mounts": [
          {
            "hostPath": "/run/mpsd/mps/gpu0",
            "containerPath": "/run/mpsd/mps/gpu0",
            "options": [
              "bind",
              "ro",
              "nosuid",
              "nodev",
              "noexec"
            ]
          }
        ],
        "hooks": [
          {
            "hookName": "createRuntime",
            "path": "/usr/lib/mpsd/bin/python3",
            "args": [
              "/usr/lib/mpsd/bin/python3",
              "-I",
              "-m",
              "mpsd.cli.main",
              "--socket",
              "/run/mpsd/mpsd.sock",
              "container",
              "hook",
              "lease-0123456789"
            ],
            "env": [
              "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
              "MPSD_LEASE_TOKEN=5ec12e7"
            ],
            "timeout": 60
          }
        ]
      }
    }
  ]
}
"""


def document(*, shared_memory: bool = False) -> Any:
    return cdi.document(DEVICE, VARIABLES, program=PROGRAM, shared_memory=shared_memory)


class TestDocument:
    """The document that a container runtime reads."""

    def test_golden(self) -> None:
        """A container gets the lease's variables, its pipe directory and the hook, and nothing else of the node."""
        assert cdi.encode(document()).decode() == GOLDEN

    def test_shared_memory(self) -> None:
        """/dev/shm is mounted on request, and is writable."""
        (device,) = document(shared_memory=True)["devices"]
        directory, shared = device["containerEdits"]["mounts"]
        assert directory["containerPath"] == "/run/mpsd/mps/gpu0"
        assert (shared["hostPath"], shared["containerPath"]) == ("/dev/shm", "/dev/shm")
        assert "rw" in shared["options"]

    def test_the_token_is_no_argument(self) -> None:
        """Every user can read the arguments of a process, but only root and its own user can read its environment."""
        (device,) = document()["devices"]
        (hook,) = device["containerEdits"]["hooks"]
        assert not [each for each in hook["args"] if "5ec12e7" in each]


class TestFile:
    """The files that mpsctl recognises as its own."""

    def test_read_back(self) -> None:
        """A file that was written names its lease and its mpsd."""
        assert cdi.decode(cdi.file_name(LEASE), cdi.encode(document())) == DEVICE
        assert cdi.device_name(LEASE) == "mpsd/lease=lease-0123456789"

    @pytest.mark.parametrize("lease", ["", "../x", "a/b", "-x", "a b", "läse", "a\n", "."])
    def test_no_name(self, lease: str) -> None:
        """A text that is no lease id names no file, so that no file elsewhere is written or removed."""
        with pytest.raises(InvalidRequestError):
            cdi.file_name(lease)

    @pytest.mark.parametrize(
        ("change", "to"),
        [
            ('"mpsd/lease"', '"vendor.com/lease"'),
            ('"name": "lease-0123456789"', '"name": "lease-0000000000"'),
            ('"hook",', '"other",'),
            ('"--socket"', '"--sockets"'),
            ('"hooks"', '"hook"'),
            ('"/run/mpsd/mpsd.sock"', "5"),
            ("{", "["),
        ],
    )
    def test_of_somebody_else(self, change: str, to: str) -> None:
        """A file under such a name that another program made is not mpsctl's."""
        assert change in GOLDEN
        assert cdi.decode(cdi.file_name(LEASE), GOLDEN.replace(change, to).encode()) is None

    @pytest.mark.parametrize("name", ["nvidia.json", "mpsd-lease_lease-1.json", f".mpsd-lease_{LEASE}.json.17"])
    def test_under_another_name(self, name: str) -> None:
        """A device of mpsctl's under a wrong file name is not touched."""
        assert cdi.decode(name, GOLDEN.encode()) is None

    @pytest.mark.parametrize("raw", [b"", b"\xff", b"null", b"[]", b"{}", b'{"devices":[]}', b"[" * 100_000])
    def test_any_bytes(self, raw: bytes) -> None:
        """Reading a file never fails, whatever bytes it contains."""
        assert cdi.decode(cdi.file_name(LEASE), raw) is None
