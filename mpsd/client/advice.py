"""What to tell a framework under a lease: the table of frameworks, with the sizes of the lease and of its GPU."""

from typing import TYPE_CHECKING

from mpsd.core.errors import NotFoundError
from mpsd.core.programs import frameworks
from mpsd.core.programs.frameworks import Advice

if TYPE_CHECKING:
    from mpsd.client import answer_types
    from mpsd.client.client import Client


def advice_for(client: "Client", lease: "answer_types.Lease", framework: str) -> Advice:
    """Return what to tell a framework in a process of a lease, on the lease's first GPU.

    Raises InvalidRequestError for an unknown name, NotFoundError where the size of the GPU is unknown, and the errors
    of the connection.
    """
    frameworks.named(framework)  # before anything is asked
    return frameworks.advice(framework, *sizes(client, lease))


def sizes(client: "Client", lease: "answer_types.Lease") -> tuple[int, int]:
    """Return the memory that each process of a lease may have on its first GPU, and all of that GPU's, in bytes."""
    share = lease["shares"][0]
    total = next((each["memory_total"] for each in client.gpus()["gpus"] if each["uuid"] == share["gpu"]), None)
    if total is None:
        raise NotFoundError(
            f"the size of GPU {share['gpu']} is unknown, so there is no advice for a part of it",
            hint="find out why the driver does not report it: mpsctl gpus",
        )
    return share["pinned_device_mem_limit"] // max(lease["processes"], 1), total
