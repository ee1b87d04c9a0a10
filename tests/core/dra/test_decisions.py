"""The decisions of the driver: quantities, allocations, configurations, slices, and the next action for claims."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.core.containers.cdi import Program
from mpsd.core.dra import allocation, prepared, slices
from mpsd.core.dra.allocation import Configuration, Opaque
from mpsd.core.dra.prepared import request_id, share_of
from mpsd.core.dra.slices import Node, Steps
from mpsd.core.errors import InvalidRequestError
from mpsd.core.kubernetes.devices import Gpu

POD = "11111111-2222-3333-4444-555555555555"
GROUP = f"/kubepods/burstable/pod{POD}"
UID = "0af54f2c-0000-4000-8000-00000000beef"


class TestQuantities:
    """Quantities in the syntax of Kubernetes."""

    @pytest.mark.parametrize(
        ("text", "number"),
        [("25", 25), ("8Gi", 8 * 2**30), ("7936Mi", 7936 * 2**20), ("1500m", 1.5), ("12e6", 12_000_000), ("1k", 1000)],
    )
    def test_examples(self, text: str, number: float) -> None:
        """Each form is parsed."""
        assert allocation.parse_quantity(text) == Decimal(str(number))

    @pytest.mark.parametrize("text", ["", "8GiB", "Gi", "1e999", "-", "0x1", "٣", "1 Gi", True, None, [], "9" * 99])
    def test_others(self, text: object) -> None:
        """Any other text is refused."""
        with pytest.raises(InvalidRequestError, match="is not a quantity of Kubernetes"):
            allocation.parse_quantity(text)

    @given(st.integers(0, 2**24))
    def test_written_and_read(self, mebibytes: int) -> None:
        """A written quantity parses to the same value."""
        assert allocation.mebibytes_of(allocation.quantity_of(mebibytes)) == mebibytes


@given(
    mebibytes=st.integers(0, 400_000),
    percent=st.integers(1, 50),
    step=st.sampled_from([1, 16, 256, 1000, 1024, 4096]),
    tenths=st.integers(1000, 10**6),
    parts=st.integers(1, 512),
)
def test_each_published_range_is_one_that_kubernetes_takes(
    mebibytes: int, percent: int, step: int, tenths: int, parts: int
) -> None:
    """Kubernetes requires min <= default <= max <= value, min + step <= value, and multiples of the step."""
    gpu = Gpu("GPU-1", mebibytes, "/run", 550, "", 0, "M" * 200, "550.1", tenths)
    document: Any = slices.document(Node("n", "", "mpsd", "strict"), [gpu], Steps(percent, step, parts), taints=True)
    for device in document["spec"]["devices"]:
        for capacity in device["capacity"].values():
            value, policy = allocation.parse_quantity(capacity["value"]), capacity["requestPolicy"]
            least, most, size = (
                allocation.parse_quantity(policy["validRange"][each]) for each in ("min", "max", "step")
            )
            default = allocation.parse_quantity(policy["default"])
            assert 0 < least <= default <= most <= value
            assert least + size <= value
            assert (default - least) % size == (most - least) % size == 0
        threads = device["capacity"]["threads"]
        assert tenths // 10 - percent < int(threads["value"]) <= tenths // 10
        assert int(threads["requestPolicy"]["validRange"]["max"]) <= 100
        assert all(len(str(text)) <= 64 for each in device["attributes"].values() for text in each.values())
    assert len(document["spec"]["devices"]) == (mebibytes >= 2 * step)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(["apiVersion", "kind", "user", "stop", "processes", "priority", "strictness"])
                | st.text(),
                inner,
            )
        ),
    )
)
def test_any_parameters_are_read_or_refused(parameters: Any) -> None:
    """Any parameters result in a configuration, or in a sentence with a hint."""
    if isinstance(parameters, dict):
        parameters = {"apiVersion": "mpsd.internal/v1", "kind": "Share", **parameters}
    try:
        allocation.options_for([Configuration(None, Opaque("mpsd.internal", parameters))], "r", "mpsd.internal")
    except InvalidRequestError as refusal:
        said = refusal
    else:
        return
    assert said.hint


def test_a_subrequest_has_the_configuration_of_its_request() -> None:
    """A request that was allocated by one of its alternatives is named together with that alternative."""
    parameters = {"apiVersion": "mpsd.internal/v1", "kind": "Share", "user": 7}
    found = allocation.options_for(
        [Configuration(["r"], Opaque("mpsd.internal", parameters))], "r/small", "mpsd.internal"
    )
    assert found.user == 7


def test_which_leases_count() -> None:
    """The request_id of a share's lease names the share; any other stands for no share."""
    assert share_of(request_id(UID, 3)) == (UID, 3)
    assert (share_of("mine"), share_of(None)) == (None, None)


def test_devices() -> None:
    """The names of devices do not depend on leases, and the hook is present if it was requested."""
    variables = {"MPSD_LEASE": "lease-1", "MPSD_LEASE_TOKEN": "secret", "CUDA_MPS_PIPE_DIRECTORY": "/run/mps/gpu0"}
    raw = prepared.device_document(
        "mpsd.internal",
        UID,
        [variables],
        shared_memory=[True],
        more=[{"A": "b"}],
        socket="/run/mpsd.sock",
        hook=Program(["/usr/bin/mpsctl"]),
        root=Path("/kubelet"),
    )
    (device,) = json.loads(raw)["devices"]
    assert prepared.device_id("mpsd.internal", UID, 0) == f"mpsd.internal/share={device['name']}"
    assert "A=b" in device["containerEdits"]["env"]
    (hook,) = device["containerEdits"]["hooks"]
    assert hook["args"][1:] == ["--socket", "/run/mpsd.sock", "container", "hook", "--pod", "/kubelet", "lease-1"]
    assert "secret" not in " ".join(hook["args"])
    plain = prepared.device_document(
        "mpsd.internal", UID, [variables], shared_memory=[False], more=[{}], socket="/s", hook=None, root=Path("/")
    )
    assert "hooks" not in json.loads(plain)["devices"][0]["containerEdits"]
