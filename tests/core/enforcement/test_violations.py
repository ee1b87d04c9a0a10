"""What a client can use at most, and what of it breaks its lease."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from mpsd.core.admission.admission import Amount, Offer, share
from mpsd.core.enforcement import attribution
from mpsd.core.enforcement.verification import verify
from mpsd.core.enforcement.violations import (
    AttributedClient,
    Violation,
    in_force,
    of_client,
    of_lingering,
    of_memory,
    of_outside,
)
from mpsd.core.model import (
    Client,
    GpuProcess,
    Known,
    Lease,
    LeaseRequest,
    LeaseState,
    Owner,
    ProcessIdentity,
    ReadBack,
    Unknown,
    ViolationKind,
)
from mpsd.core.mps.limits import ACTIVE_THREAD_PERCENTAGE, EVERYTHING, PINNED_DEVICE_MEM_LIMIT
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.settings import Settings
from mpsd.core.units import GIB, MIB
from mpsd.simulator.cuda import Pinned, pinned

GPU: Final = "GPU-00000000-0000-4000-8000-000000000000"
OFFER: Final = Offer(GPU, "gpu0", "/run/mpsd/mps/gpu0", 1000, 80 * GIB, 48, Settings().default_limits, many_users=False)
HOLDER, OTHER, THIRD = (ProcessIdentity(pid, 1) for pid in (100, 200, 300))
CLOSED: Final = ReadBack(1, MIB)


def lease(
    percent: int = 25, gibibytes: int = 2, *, processes: int = 1, clients: tuple[ProcessIdentity, ...] = ()
) -> Lease:
    """Return a granted lease of this much."""
    request = LeaseRequest(
        ActiveThreadPercentage(percent * 10), PinnedDeviceMemLimit(gibibytes * 1024), processes=processes
    )
    need = Amount(percent * 10, gibibytes * GIB, processes)
    return Lease(
        id=f"lease-{percent}",
        state=LeaseState.ACTIVE if clients else LeaseState.GRANTED,
        because="",
        owner=Owner(0, 0, HOLDER.pid, None),
        holder=HOLDER,
        request=request,
        arrival=percent,
        created=datetime.now(UTC),
        shares=(share(OFFER, need),),
        clients=clients,
    )


def client(
    identity: ProcessIdentity = HOLDER,
    *,
    of: Lease | None = None,
    ceiling: ReadBack | None = CLOSED,
    environment: dict[str, str] | None = None,
    uid: int = 0,
) -> Client:
    """Return a client with the environment of a lease, or with this one."""
    own = environment if environment is not None else dict(of.shares[0].env) if of is not None else {}
    return Client(identity, "gpu0", GPU, 7, ceiling, own, uid)


# -- what a client can use ---------------------------------------------------------------------------------------------

_PERCENTAGES = st.sampled_from(["", "0", "25", "25.0", "12.34", "100", "101", "-5", "0.05", "abc", "1e1", "\u0663"])
_ENTRIES = st.sampled_from(
    ["", "0=1G", "0=512M", f"{GPU}=2G", "GPU-0000=3G", "0=0", "0=x", "0=0G", "0=\u0663M", "1=1G", "GPU-ffff=1G"]
)


@given(
    tenths=st.integers(1, 1000),
    memory=st.sampled_from([None, MIB, GIB, 80 * GIB]),
    percentage=_PERCENTAGES,
    entries=st.lists(_ENTRIES, max_size=2).map(",".join),
)
def test_as_mps_decides(tenths: int, memory: int | None, percentage: str, entries: str) -> None:
    """What is said of a client is what MPS gives it: never less, and more by rounding alone."""
    environment = {ACTIVE_THREAD_PERCENTAGE.variable: percentage, PINNED_DEVICE_MEM_LIMIT.variable: entries}
    found = in_force(client(ceiling=ReadBack(tenths, memory), environment=environment))
    really = pinned([GPU], tenths / 10, {} if memory is None else {0: memory}, environment)
    assert isinstance(really, Pinned)
    assert 0 <= found.active_thread_percentage_tenths / 10 - really.percentage < 0.1
    assert found.pinned_device_mem_limit == really.memory


def test_what_nobody_saw() -> None:
    """Of one that connected before mpsd could see it, everything was open but what its own environment closes."""
    assert in_force(client(ceiling=None)) == EVERYTHING
    assert in_force(client(of=lease(), ceiling=None)) == ReadBack(250, 2 * GIB)


# -- whose a client is -------------------------------------------------------------------------------------------------


def test_nearest_with_room() -> None:
    """A client belongs to its nearest ancestor's lease that has room; if none has, it is the nearest's all the same."""
    near, far = lease(25, clients=(OTHER,)), lease(50)
    leases = {OTHER: [near], HOLDER: [far]}
    family = [THIRD, OTHER, HOLDER]
    found = attribution.by_family(client(THIRD), family, lambda each: leases.get(each, []))
    assert (found.lease, found.counted) == (far, True)
    full = {OTHER: [near]}
    found = attribution.by_family(client(THIRD), family, lambda each: full.get(each, []))
    assert (found.lease, found.counted) == (near, False)
    assert attribution.by_family(client(THIRD), family, lambda _: []).lease is None


def test_by_its_environment() -> None:
    """Where a holder has several leases, a client belongs to the one whose environment it has, else to the oldest."""
    old, new = lease(25), lease(50)
    for own, expected in ((dict(new.shares[0].env), new), (dict(old.shares[0].env), old), ({}, old)):
        found = attribution.by_family(client(HOLDER, environment=own), [HOLDER], lambda _: [new, old])
        assert found.lease is expected


@pytest.mark.parametrize(
    ("cgroup", "telling"),
    [
        ("/system.slice/train.service", True),
        ("/kubepods/pod1/abc", True),
        ("/user.slice/user-1000.slice/session-3.scope", False),
        ("/user.slice/user-1000.slice/user@1000.service", False),
        ("/init.scope", False),
        ("/", False),
        ("", False),
    ],
)
def test_control_groups(cgroup: str, *, telling: bool) -> None:
    """The control group of a job says whose a process is, that of a login session or of everything does not."""
    assert attribution.is_telling(cgroup) is telling


def test_only_one_in_the_control_group() -> None:
    """A client without a family is that lease's which alone has processes in its control group."""
    one, other = lease(25), lease(50)
    assert attribution.by_cgroup(client(OTHER), [one]).lease is one
    assert attribution.by_cgroup(client(OTHER), [one, other]).lease is None
    assert not attribution.by_cgroup(client(OTHER), [lease(clients=(HOLDER,))]).counted


def test_another_uid_has_no_part_in_a_lease() -> None:
    """A client of another uid is no lease's, in its family or in its control group; and one lease hides no other."""
    near, far = lease(25), lease(50)
    bobs = structs.replace(far, owner=Owner(1000, 1000, THIRD.pid, None))
    assert attribution.by_family(client(THIRD, uid=1000), [THIRD, OTHER], lambda _: [near]).lease is None
    family = attribution.by_family(client(THIRD, uid=1000), [THIRD, OTHER], lambda _: [near, bobs])
    assert (family.lease, family.counted) == (bobs, True)
    assert attribution.by_cgroup(client(THIRD, uid=1000), [near]).lease is None
    assert attribution.by_cgroup(client(THIRD, uid=1000), [near, bobs]).lease is bobs
    assert attribution.by_cgroup(client(THIRD), [near, bobs]).lease is near


# -- what is a violation -----------------------------------------------------------------------------------------------


def kind(attached: AttributedClient, *, denied: bool = True, memory: bool = True) -> ViolationKind | None:
    """Return which violation a client is, if any."""
    found = of_client(attached, EVERYTHING, denied=denied, memory=memory)
    return found.kind if found is not None else None


@pytest.mark.parametrize(
    ("ceiling", "opened", "environment", "own"),
    [
        (ReadBack(1000, None), ReadBack(500, 4 * GIB), {}, True),
        (ReadBack(1000, None), ReadBack(250, 2 * GIB), {}, False),
        (ReadBack(1000, None), ReadBack(250, 2 * GIB), {PINNED_DEVICE_MEM_LIMIT.variable: "GPU-ffff=1G"}, True),
        (ReadBack(1000, None), ReadBack(500, 4 * GIB), None, False),
    ],
)
def test_what_a_stranger_opened(
    ceiling: ReadBack,
    opened: ReadBack,
    environment: dict[str, str] | None,
    own: bool,  # noqa: FBT001 - a row of the table
) -> None:
    """A client that can use too much by a stranger's command alone is told of, and is not ended for it."""
    attached = AttributedClient(replace(client(ceiling=ceiling), environment=environment), lease(), counted=True)
    found = of_client(attached, opened, denied=True, memory=True)
    assert found is not None
    assert (found.kind, found.own) == (ViolationKind.LIMITS, own)


def test_fault_that_a_log_tells() -> None:
    """A fault that stands in a server's log alone may be anybody's writing; what its daemon says is not."""
    attached = AttributedClient(client(), None, counted=False)
    assert [of_lingering(attached, 1, proven=each).own for each in (False, True)] == [False, True]


def test_clients() -> None:
    """A client is a violation without a lease, beyond its number, and when it can use more than its part."""
    granted, wide = lease(), ReadBack(1000, None)
    assert kind(AttributedClient(client(of=granted, ceiling=wide), granted, counted=True)) is None
    assert kind(AttributedClient(client(ceiling=wide), granted, counted=True)) is ViolationKind.LIMITS
    # Without an environment of its own it is held all the same where no more than its part was open.
    assert kind(AttributedClient(client(ceiling=ReadBack(250, 2 * GIB)), granted, counted=True)) is None
    assert kind(AttributedClient(client(ceiling=ReadBack(250, 3 * GIB)), granted, counted=True)) is ViolationKind.LIMITS
    # A driver without memory limits cannot hold anybody to one, and mpsd says so elsewhere.
    assert kind(AttributedClient(client(ceiling=ReadBack(250, None)), granted, counted=True), memory=False) is None
    # What nobody saw is not held against anybody.
    assert kind(AttributedClient(client(ceiling=None), granted, counted=True)) is None
    assert kind(AttributedClient(client(of=granted), granted, counted=False)) is ViolationKind.PROCESSES
    assert kind(AttributedClient(client(), None, counted=False)) is ViolationKind.NO_LEASE
    assert kind(AttributedClient(client(), None, counted=False), denied=False) is None


def test_memory() -> None:
    """The processes of a lease hold its memory together; the one that holds most is named."""
    granted = lease(gibibytes=2, processes=2)
    held = {HOLDER: GpuProcess(Known(GIB), mps=True), OTHER: GpuProcess(Known(GIB), mps=True)}
    assert of_memory(granted, held, granted.shares[0], {}) is None
    held[THIRD] = GpuProcess(Unknown("NVML does not say"), mps=True)
    assert of_memory(granted, held, granted.shares[0], {}) is None
    held[THIRD] = GpuProcess(Known(2 * GIB), mps=True)
    found = of_memory(granted, held, granted.shares[0], {THIRD: 7})
    assert found is not None
    assert (found.kind, found.process, found.server) == (ViolationKind.MEMORY, THIRD, 7)
    assert "4GiB" in found.because


def test_outside() -> None:
    """Whoever has a lease and runs outside MPS is a violation."""
    granted = lease()
    (found,) = of_outside(granted, granted.shares[0], [OTHER])
    assert (found.kind, found.process, found.lease) == (ViolationKind.OUTSIDE, OTHER, granted.id)


# -- whether a lease is well -------------------------------------------------------------------------------------------


def test_verify() -> None:
    """A lease is well when a process of it is attached and none of them is wrong."""
    granted = lease(clients=(HOLDER,))
    held = {GPU: {HOLDER: GpuProcess(Known(GIB), mps=True)}}
    well = verify(granted, [client(of=granted)], held, (), memory=True)
    assert (well.ok, [each.held for each in well.processes]) == (True, [GIB])
    # It is well whatever was open, as long as its own environment holds it; and nobody knows where that does not.
    assert verify(granted, [client(of=granted, ceiling=None)], held, (), memory=True).ok
    unknown = verify(granted, [client(ceiling=None)], held, (), memory=True)
    assert (unknown.ok, unknown.processes[0].in_force) == (False, None)
    assert "limits are unknown" in unknown.because

    assert not verify(granted, [client(ceiling=ReadBack(1000, None))], held, (), memory=True).ok
    outside = {GPU: {OTHER: GpuProcess(Known(GIB))}}
    assert "outside MPS" in verify(granted, [], outside, (), memory=True).because
    assert not verify(granted, [client(of=granted)], {GPU: {**held[GPU], **outside[GPU]}}, (), memory=True).ok
    found = Violation(ViolationKind.MEMORY, HOLDER, granted.id, "gpu0", "too much")
    assert verify(granted, [client(of=granted)], held, (found,), memory=True).because == "too much"


def test_verify_what_is_not_known() -> None:
    """What could not be asked now is not well, and what is wrong all the same is told first."""
    granted = lease(clients=(HOLDER,))
    told = verify(granted, [client(of=granted)], {}, (), memory=True, unknown=["gpu0 is unresponsive"])
    assert (told.ok, told.because) == (False, "gpu0 is unresponsive")
    wrong = verify(granted, [client(ceiling=ReadBack(1000, None))], {}, (), memory=True, unknown=["gpu0 is silent"])
    assert "instead of 25 %" in wrong.because


def test_verify_without_processes() -> None:
    """One that nobody is attached to is not well, and says how far it is."""
    granted = lease()
    verdict = verify(granted, [], {}, (), memory=True)
    assert (verdict.ok, [each.mps for each in verdict.processes]) == (False, [None])
    assert "is a client of MPS yet" in verdict.because
    for state, word in ((LeaseState.ENDED, "has ended: it was revoked"), (LeaseState.WAITING, "is waiting")):
        other = structs.replace(granted, state=state, because="it was revoked")
        verdict = verify(other, [client(of=granted)], {}, (), memory=True)
        assert (verdict.ok, verdict.processes) == (False, ())
        assert word in verdict.because
