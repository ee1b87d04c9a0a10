"""Which leases, users and control groups belong to containers; kubelet's record, and the health of devices."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest

from mpsd.core.kubernetes import claims, devices, pods
from mpsd.core.kubernetes.claims import Held
from mpsd.core.kubernetes.devices import Container, Gpu, Kind
from mpsd.core.kubernetes.settings import Offer, Settings

NOW: Final = datetime(2026, 11, 23, tzinfo=UTC)
POD: Final = "0a1b2c3d-1111-2222-3333-444455556666"
GROUP: Final = f"/kubepods/burstable/pod{POD}"
NUMBERS: Final = {Kind.SLICE: frozenset({0, 1})}
CONTAINER: Final = Container(POD, "main", "GPU-1", NUMBERS, {Kind.SLICE: ""})


def answered(*holders: dict[str, object], claimed_for: int | None = 0) -> dict[str, object]:
    """Return a lease as mpsd answers it, which an administrator claimed unless `claimed_for` is None."""
    return {"id": "lease-1", "owner": {"uid": 7}, "claimed_for": claimed_for, "clients": [], "holders": [*holders]}


def held(lease: dict[str, object]) -> Held | None:
    return claims.held(lease, NOW, Settings())


@pytest.mark.parametrize(
    ("uids", "user"), [({0}, 0), ({1000}, 1000), ({0, 1000}, 1000), ({0, 1000, 1001}, 0), ({1000, 1001}, 1000)]
)
def test_user_of_a_container(uids: set[int], user: int) -> None:
    """A program that was started as root and became another user belongs to that user."""
    assert claims.user_of(uids) == user


class TestWhose:
    """Which leases belong to containers."""

    def test_a_claim(self) -> None:
        """A claim has its remaining time."""
        until = (NOW + timedelta(seconds=200)).isoformat()
        assert held(answered({"kind": "claim", "deadline": until})) == Held("lease-1", None, "", 200, 7, False)
        assert held(answered({"kind": "claim"})) == Held("lease-1", None, "", 0, 7, False)

    def test_a_pod(self) -> None:
        """The control group that holds the lease names the pod."""
        lease = answered({"kind": "process", "pid": 7}, {"kind": "cgroup", "cgroup": GROUP})
        assert held(lease) == Held("lease-1", POD, GROUP, 0, 7, False)

    @pytest.mark.parametrize(
        "holder",
        [
            {"kind": "process", "pid": 7},
            {"kind": "cgroup", "cgroup": "/user.slice/user-1000.slice/x.scope"},
            {"kind": "cgroup", "cgroup": f"{GROUP}/{'0' * 64}"},
            {"kind": "cgroup", "cgroup": f"{GROUP}/{'0' * 64}/mine"},
            {"kind": "cgroup", "cgroup": f"/user.slice/user-1000.slice/pod{POD}"},
            {"kind": "cgroup", "cgroup": f"/user.slice/user-1000.slice{GROUP}"},
            {"kind": "cgroup", "cgroup": f"/kubelet{GROUP}"},
        ],
    )
    def test_of_others(self, holder: dict[str, object]) -> None:
        """A lease with a holder that is not a pod of this kubelet does not count."""
        assert held(answered(holder)) is None

    @pytest.mark.parametrize("holder", [{"kind": "claim"}, {"kind": "cgroup", "cgroup": GROUP}])
    def test_made_by_others(self, holder: dict[str, object]) -> None:
        """A lease that no administrator claimed does not count, whatever holds it now."""
        assert held(answered(holder, claimed_for=None)) is None

    def test_labels(self) -> None:
        """The labels of a lease name its devices."""
        assert claims.devices_of(claims.labels(NUMBERS)) == NUMBERS

    @pytest.mark.parametrize("labels", [{}, {"kubernetes/slice": ""}, {"kubernetes/slice": "zz"}, {"a": "b"}])
    def test_other_labels(self, labels: dict[str, str]) -> None:
        """A lease without devices does not count."""
        assert claims.devices_of(labels) is None


class TestPods:
    """The control groups of pods."""

    @pytest.mark.parametrize("root", ["/", "/kubelet", "/a/b"])
    @pytest.mark.parametrize("uid", [POD, "0123456789abcdef0123456789abcdef"])
    def test_round_trip(self, root: str, uid: str) -> None:
        """Each possible path of a pod's group names the pod."""
        paths = pods.groups(uid, root)
        assert len(paths) == 6
        assert {pods.pod_of(path, root) for path in paths} == {uid}

    def test_paths(self) -> None:
        """The paths are kubelet's, for both drivers."""
        paths = pods.groups(POD, "/")
        assert f"/kubepods/besteffort/pod{POD}" in paths
        name = POD.replace("-", "_")
        assert f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{name}.slice" in paths
        below = pods.groups(POD, "/kubelet")
        assert f"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{name}.slice" in below

    @pytest.mark.parametrize("uid", ["", "..", "../../x", "a b", POD.upper(), f"{POD}/x"])
    def test_no_uid(self, uid: str) -> None:
        """A text that is no uid of a pod makes no path."""
        assert pods.groups(uid, "/") == []


def record(ids: Any, resource: str = "nvidia.com/gpu.mps-slice") -> dict[str, Any]:
    return {"PodUID": POD, "ContainerName": "main", "ResourceName": resource, "DeviceIDs": ids, "AllocResp": "eA=="}


def written(*entries: dict[str, Any]) -> bytes:
    return json.dumps({"Data": {"PodDeviceEntries": [*entries], "RegisteredDevices": {}}, "Checksum": 1}).encode()


class TestCheckpoint:
    """kubelet's record."""

    @pytest.mark.parametrize("ids", [["GPU-1::0", "GPU-1::1"], {"-1": ["GPU-1::0"], "1": ["GPU-1::1"]}])
    def test_both_forms(self, ids: Any) -> None:
        """The devices are a list, or by NUMA node since 1.20."""
        (found,) = devices.parse_checkpoint(written(record(ids)), Settings())
        assert found == CONTAINER._replace(answers={Kind.SLICE: "eA=="})

    def test_both_resources(self) -> None:
        """A container is one entry, whatever number of resources it has; resources of other plugins are left out."""
        core, memory = record(["GPU-1::3"], "nvidia.com/mps-core"), record(["GPU-1::4"], "nvidia.com/mps-memory")
        others = record(["nic0"], "example.com/nic")
        settings = Settings(resources=Offer.THREADS_AND_MEMORY)
        (found,) = devices.parse_checkpoint(written(core, others, memory), settings)
        assert found.numbers == {Kind.CORE: frozenset({3}), Kind.MEMORY: frozenset({4})}

    def test_of_another_plugin(self) -> None:
        """Devices that an earlier plugin had under the same name do not count as this one's containers."""
        assert devices.parse_checkpoint(written(record(["gpu-0-slot-1"])), Settings()) == []

    def test_empty(self) -> None:
        """A node without pods has no entries."""
        assert devices.parse_checkpoint(b'{"Data": {"PodDeviceEntries": null}, "Checksum": 1}', Settings()) == []

    @pytest.mark.parametrize(
        "raw", [b"", b"{", b"[]", b"{}", b'{"Data": []}', b'{"Data": {"PodDeviceEntries": [1]}}', written(record(5))]
    )
    def test_no_record(self, raw: bytes) -> None:
        """A record in another format raises an error that says so, and no other."""
        with pytest.raises(ValueError, match=r"."):
            devices.parse_checkpoint(raw, Settings())


class TestHealth:
    """The health of devices."""

    SEEN: Final = Gpu("GPU-1", 81408, "/run/mpsd/mps/gpu0", 555)

    def test_gone(self) -> None:
        """A GPU that mpsd no longer lists stays, unhealthy: otherwise kubelet would forget its devices."""
        before: dict[str, Gpu] = devices.offered([self.SEEN], {})
        after = devices.offered([], before)
        assert after["GPU-1"].because
        assert devices.unreachable(before, "no socket")["GPU-1"].because == "mpsd does not answer: no socket"
