"""What to tell a framework under a lease, by the sizes that mpsd reports."""

import pytest

from mpsd.client import Client
from mpsd.client.advice import advice_for
from mpsd.core.errors import InvalidRequestError, NotFoundError
from mpsd.core.programs import frameworks
from tests.node import Node


def test_advice_for_a_lease(node: Node) -> None:
    """It is for the part of the lease's first GPU that one of its processes may have."""
    total = node.get("/v1/gpus").json["gpus"][0]["memory_total"]
    with Client(str(node.socket)) as client:
        lease = client.admit({"threads": 10, "memory": "8GiB", "processes": 4})
        several = client.admit({"threads": 10, "memory": "4GiB", "gpus": 2, "processes": "any"})
        assert advice_for(client, lease, "vllm") == frameworks.advice("vllm", 2 << 30, total)
        assert advice_for(client, several, "JAX") == frameworks.advice("jax", 4 << 30, total)
        for each in (lease, several):
            client.release(each["id"])


def test_no_advice(node: Node) -> None:
    """An unknown framework is refused before mpsd is asked; an unknown GPU has no size."""
    with Client(str(node.socket)) as client:
        lease = client.admit({"threads": 10, "memory": "8GiB"})
        client.release(lease["id"])
        lease["shares"][0]["gpu"] = "GPU-gone"
        with pytest.raises(NotFoundError, match="the size of GPU GPU-gone is unknown"):
            advice_for(client, lease, "vllm")
    with Client(f"{node.root}/nobody") as nobody, pytest.raises(InvalidRequestError, match="no advice for 'vlm'"):
        advice_for(nobody, lease, "vlm")
