"""The readable names in the paths of control groups."""

import pytest

from mpsd.core.holders import GroupName, group_name

ID = "3f5c0d2e9a" + "0" * 54
SHORT = ID[:12]
POD = "6b1d5c1e-0c1f-4a7d-9a3e-2f6d7c8b9a01"
UNDERSCORED = POD.replace("-", "_")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/system.slice/train.service", GroupName(unit="train.service")),
        ("/system.slice/system-train.slice/train@7.service", GroupName(unit="train@7.service")),
        ("/system.slice/train.service/worker", GroupName(unit="train.service")),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/job.scope", GroupName(unit="job.scope")),
        ("/user.slice/user-1000.slice/session-3.scope", GroupName(unit="session-3.scope")),
        ("/machine.slice", GroupName(unit="machine.slice")),
        (f"/system.slice/docker-{ID}.scope", GroupName(container=SHORT)),
        (f"/docker/{ID}", GroupName(container=SHORT)),
        (f"/docker/{ID}/system.slice/inside.service", GroupName(container=SHORT)),
        (f"/machine.slice/libpod-{ID}.scope/container", GroupName(container=SHORT)),
        (f"/libpod_parent/libpod-{ID}", GroupName(container=SHORT)),
        (
            f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope",
            GroupName(container=SHORT),
        ),
        (
            f"/kubepods.slice/kubepods-burstable-pod{UNDERSCORED}.slice/cri-containerd-{ID}.scope",
            GroupName(container=SHORT, pod=POD),
        ),
        (f"/kubepods/besteffort/pod{POD}/{ID}", GroupName(container=SHORT, pod=POD)),
        (f"/kubepods.slice/kubepods-pod{UNDERSCORED}.slice/crio-{ID}.scope", GroupName(container=SHORT, pod=POD)),
        (f"/kubepods.slice/kubepods-pod{UNDERSCORED}.slice", GroupName(pod=POD)),
        (f"/kubelet/kubepods/pod{POD}/crio-{ID}", GroupName(container=SHORT, pod=POD)),
        ("/slurm/uid_1000/job_7/step_0", GroupName()),
        (f"/system.slice/docker-{ID[:-1]}.scope", GroupName(unit=f"docker-{ID[:-1]}.scope")),
        (f"/system.slice/docker-{ID.upper()}.scope", GroupName(unit=f"docker-{ID.upper()}.scope")),
        ("/poddle", GroupName()),
        ("/a b.service", GroupName()),
        ("/x\x1b[31m.service", GroupName()),
        ("/", GroupName()),
        ("", GroupName()),
    ],
)
def test_names(path: str, name: GroupName) -> None:
    """Units, containers of each runtime and pods are recognised by their paths, and nothing else is."""
    assert group_name(path) == name


def test_facts() -> None:
    """An event contains only the facts that exist."""
    assert group_name(f"/kubepods/pod{POD}/{ID}").facts() == {"container": SHORT, "pod": POD}
    assert group_name("/slurm/job_7").facts() == {}
