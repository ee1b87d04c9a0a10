"""The examples in the client's own descriptions work as they stand."""

from textwrap import dedent

import mpsd.client
import mpsd.client.lease
from tests.client.programs import printed
from tests.node import Node


def example(documented: str | None) -> str:
    """Return the program in a description."""
    assert documented is not None
    return dedent("\n".join(line for line in documented.splitlines() if line.startswith("    ") or not line))


def test_example(node: Node) -> None:
    """It takes out a lease, gives the process its environment, and releases it; MPSD_SOCKET names the mpsd."""
    program = example(mpsd.client.__doc__) + "\nprint(lease['id'], os.environ['CUDA_VISIBLE_DEVICES'])"
    (line,) = printed(node, program)
    lease, gpu = line.split()
    (found,) = (each for each in node.get("/v1/leases?ended=true").json["leases"] if each["id"] == lease)
    assert (found["state"], found["gpus"]) == ("ended", [gpu])
    assert found["because"].endswith("released it")


def test_lease(node: Node) -> None:
    """The other one takes a lease for a block."""
    first, verified, last = printed(node, example(mpsd.client.lease.__doc__))
    uuid, memory = first.split()
    (ended,) = node.events("lease_ended", lease=verified.split("lease ")[1].split()[0])
    (granted,) = node.events("lease_granted", lease=ended["lease"])
    assert (granted["gpus"], granted["pinned_device_mem_limit"]) == ([uuid], int(memory))
    assert last == "ended"
    assert ended["because"].endswith("released it")
