"""The most that a client can use, and which of it violates its lease."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from mpsd.core.admission.admission import Amount, Offer, share
from mpsd.core.enforcement import attribution
from mpsd.core.enforcement.attribution import AttributedClient
from mpsd.core.enforcement.ceiling import ANYTHING, any_of, between, continued, opened, widened
from mpsd.core.enforcement.verification import Verdict, verify
from mpsd.core.enforcement.violations import (
    Violation,
    can_use,
    is_unlimited,
    of_client,
    of_lingering,
    of_memory,
    of_outside,
    unknown,
)
from mpsd.core.model import (
    AttachedProcess,
    Client,
    GpuProcess,
    HoldingProcess,
    Known,
    Lease,
    LeaseRequest,
    LeaseState,
    Owner,
    ProcessIdentity,
    ReadBack,
    Reading,
    Unknown,
    ViolationKind,
)
from mpsd.core.mps.limits import ACTIVE_THREAD_PERCENTAGE, EVERYTHING, NOTHING, PINNED_DEVICE_MEM_LIMIT, Limit
from mpsd.core.mps_facts import MAX_CONNECTIONS
from mpsd.core.quantities import ActiveThreadPercentage, Bounds, Opened, PinnedDeviceMemLimit
from mpsd.core.settings import OnViolation, Settings
from mpsd.core.units import GIB, MIB
from mpsd.simulator.cuda import Pinned, pinned

GPU: Final = "GPU-00000000-0000-4000-8000-000000000000"
OFFER: Final = Offer(GPU, "gpu0", "/run/mpsd/mps/gpu0", 1000, 80 * GIB, 48, Settings().default_limits, many_users=False)
HOLDER, OTHER, THIRD = (ProcessIdentity(pid, 1) for pid in (100, 200, 300))
CLOSED: Final = ReadBack(1, MIB)
PART: Final = ReadBack(250, 2 * GIB)
WIDE: Final = ReadBack(1000, None)
HIDDEN: Final = Unknown("its environment cannot be read")


def lease(
    percent: int = 25, gibibytes: int = 2, *, processes: int = 1, clients: tuple[ProcessIdentity, ...] = ()
) -> Lease:
    request = LeaseRequest(
        ActiveThreadPercentage(percent * 10), PinnedDeviceMemLimit(gibibytes * 1024), processes=processes
    )
    need = Amount(percent * 10, gibibytes * GIB, processes)
    return Lease(
        id=f"lease-{percent}",
        state=LeaseState.ACTIVE if clients else LeaseState.GRANTED,
        because="",
        owner=Owner(0, 0, HOLDER.pid, None),
        holders=(HoldingProcess(HOLDER),),
        request=request,
        arrival=percent,
        created=datetime.now(UTC),
        shares=(share(OFFER, need, request),),
        attached=tuple(AttachedProcess(each, GPU) for each in clients),
    )


def client(
    identity: ProcessIdentity = HOLDER,
    *,
    of: Lease | None = None,
    ceiling: ReadBack | None = PART,
    since: ReadBack | None = None,
    environment: dict[str, str] | None = None,
    uid: int = 0,
) -> Client:
    """Return a client with the environment of a lease, or with this one.

    `ceiling` is what was open when it connected, and `since` what was open later as well.
    """
    variables = environment if environment is not None else dict(of.shares[0].env) if of is not None else {}
    own: Reading[Mapping[str, str]] = Known(variables)
    if ceiling is None:
        return Client(identity, "gpu0", GPU, 7, None, own, uid)
    at = Bounds(ceiling, ceiling)
    there = Opened(at, at if since is None else widened(at, Bounds(since, since)))
    return Client(identity, "gpu0", GPU, 7, there, own, uid)


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
    """The bounds computed for a client include MPS's own values: never less, and more by rounding alone."""
    environment = {ACTIVE_THREAD_PERCENTAGE.variable: percentage, PINNED_DEVICE_MEM_LIMIT.variable: entries}
    bounds = can_use(client(ceiling=ReadBack(tenths, memory), environment=environment))
    found = bounds.most
    really = pinned([GPU], tenths / 10, {} if memory is None else {0: memory}, environment)
    assert isinstance(really, Pinned)
    assert 0 <= found.active_thread_percentage_tenths / 10 - really.percentage < 0.1
    assert found.pinned_device_mem_limit == really.memory
    assert widened(bounds, Bounds(found, found)) == bounds  # the least is no more than the most


def test_what_nobody_saw() -> None:
    """For a client that connected before mpsd could see it, everything but its own environment's limits was open."""
    assert can_use(client(ceiling=None)) == ANYTHING
    assert can_use(client(of=lease(), ceiling=None)) == Bounds(NOTHING, PART)


def test_both_readings() -> None:
    """Limits that opened after a client connected count too: MPS may apply them with each further context."""
    assert can_use(client(ceiling=PART, since=WIDE)) == Bounds(PART, WIDE)
    assert can_use(client(ceiling=PART, since=CLOSED)) == Bounds(CLOSED, PART)
    assert can_use(client(of=lease(), ceiling=PART, since=WIDE)) == Bounds(PART, PART)


def test_what_was_open() -> None:
    """The limits that were open combine two readings and the foreign commands in between."""
    nobody, fixed, wide = Bounds(EVERYTHING, NOTHING), Bounds(PART, PART), Bounds(CLOSED, WIDE)
    assert between(None, PART, nobody) is None
    assert between(fixed, CLOSED, nobody) == Bounds(CLOSED, PART)
    assert between(wide, PART, nobody) == wide
    assert between(fixed, PART, Bounds(CLOSED, ReadBack(800, 0))) == Bounds(CLOSED, ReadBack(800, 2 * GIB))
    assert any_of([]) is None
    assert any_of([PART, CLOSED, WIDE]) == wide
    first = opened(None, fixed, new=True)
    assert first == Opened(fixed, fixed)
    assert first is not None
    later = opened(first, wide, new=False)
    assert later == Opened(fixed, wide)
    assert opened(first, None, new=False) == Opened(fixed, ANYTHING)
    assert opened(None, wide, new=False) is None
    assert later is not None
    assert continued(first, later, has_context=False) == later


def test_first_context() -> None:
    """A client's first context has at least what was open until it was seen; a later one may have more, or less."""
    fixed, wide, anything = Bounds(PART, PART), Bounds(CLOSED, WIDE), Bounds(PART, EVERYTHING)
    first = Opened(fixed, fixed)
    later = continued(first, Opened(fixed, wide), has_context=True)
    assert later == Opened(fixed, Bounds(PART, WIDE), CLOSED)
    assert continued(later, first, has_context=True) == later
    assert later is not None
    assert continued(None, first, has_context=True) is None
    assert continued(later, None, has_context=True) == Opened(fixed, anything, NOTHING)
    assert continued(first, first, has_context=True) == first
    # Where what was open when it connected belongs to an earlier mpsd, a later look does not replace it.
    assert continued(first, Opened(wide, wide), has_context=False) == Opened(fixed, wide)


# -- whose a client is -------------------------------------------------------------------------------------------------


def has_room(of: Lease, gpu: str) -> bool:
    """Return whether a lease may have one more client on a GPU, by the rule of the ledger."""
    return of.request.processes is None or len(of.clients_on(gpu)) < of.request.processes


def test_nearest_with_room() -> None:
    """A client belongs to its nearest ancestor's lease with room; if none has room, to the nearest one."""
    near, far = lease(25, clients=(OTHER,)), lease(50)
    found = attribution.by_circles(client(THIRD), [[], [near], [far]], has_room)
    assert (found.lease, found.counted) == (far, True)
    found = attribution.by_circles(client(THIRD), [[], [near], []], has_room)
    assert (found.lease, found.counted) == (near, False)
    assert attribution.by_circles(client(THIRD), [[], []], has_room).lease is None


def test_by_its_environment() -> None:
    """If a holder has several leases, a client belongs to the one whose environment it has, else to the oldest."""
    old, new = lease(25), lease(50)
    for own, expected in ((dict(new.shares[0].env), new), (dict(old.shares[0].env), old), ({}, old)):
        found = attribution.by_circles(client(HOLDER, environment=own), [[new, old]], has_room)
        assert found.lease is expected


def test_its_token_comes_before_room() -> None:
    """A client too many of one of a holder's leases takes no place of another, as of another container of the pod."""
    first, second = (
        structs.replace(lease(at, clients=clients), token=token)
        for at, token, clients in ((25, "first", (OTHER,)), (50, "second", ()))
    )
    for shown, expected in (("first", (first, False)), ("second", (second, True)), ("another", (second, True))):
        its = client(THIRD, environment={attribution.TOKEN: shown})
        found = attribution.by_circles(its, [[first, second]], has_room)
        assert (found.lease, found.counted) == expected


def test_by_an_ancestor() -> None:
    """Where its own environment is unknown, an ancestor's token tells which of its holder's leases a client has."""
    old, new = (structs.replace(lease(at), token=token) for at, token in ((25, "old"), (50, "new")))
    hidden = replace(client(HOLDER), environment=HIDDEN)
    found = attribution.by_circles(hidden, [[new, old]], has_room)
    assert (found.lease, found.counted, found.may) == (None, False, (old, new))
    for shown, expected in (({attribution.TOKEN: "new"}, new), ({attribution.TOKEN: "old"}, old)):
        found = attribution.by_circles(replace(hidden, inherited=shown), [[new, old]], has_room)
        assert (found.lease, found.counted, found.may) == (expected, True, ())
    for shown in ({attribution.TOKEN: "another"}, {attribution.TOKEN: ""}):
        assert attribution.by_circles(replace(hidden, inherited=shown), [[new, old]], has_room).may == (old, new)


def test_undecided() -> None:
    """A client that may have one of several leases is no violation, as long as they have a place for it."""
    may, hidden = (lease(25), lease(50)), replace(client(HOLDER), environment=HIDDEN)
    assert kinds(AttributedClient(hidden, None, counted=True, may=may)) == []
    assert kinds(AttributedClient(hidden, None, counted=False, may=may)) == [ViolationKind.NO_LEASE]


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
    """The control group of a job identifies a process's lease; that of a login session, or the root group, does not."""
    assert attribution.is_telling(cgroup) is telling


def test_another_uid_has_no_part_in_a_lease() -> None:
    """A client of another uid belongs to no lease, by family or control group; and one lease hides no other."""
    near, far = lease(25), lease(50)
    bobs = structs.replace(far, owner=Owner(1000, 1000, THIRD.pid, None))
    assert attribution.by_circles(client(THIRD, uid=1000), [[near], [near]], has_room).lease is None
    family = attribution.by_circles(client(THIRD, uid=1000), [[near, bobs]] * 2, has_room)
    assert (family.lease, family.counted) == (bobs, True)
    assert attribution.by_cgroup(client(THIRD, uid=1000), [near], has_room).lease is None
    assert attribution.by_cgroup(client(THIRD, uid=1000), [near, bobs], has_room).lease is bobs
    assert attribution.by_cgroup(client(THIRD), [near, bobs], has_room).lease is near


# -- what is a violation -----------------------------------------------------------------------------------------------


def kinds(attached: AttributedClient, *, denied: bool = True, memory: bool = True) -> list[ViolationKind]:
    return [each.kind for each in of_client(attached, denied=denied, memory=memory)]


@pytest.mark.parametrize(
    ("opened", "environment", "word"),
    [
        (WIDE, Known({}), "100 % of the threads instead of 25 % and unlimited memory instead of 2GiB"),
        (WIDE, HIDDEN, "cannot be read"),
        (None, Known({}), "mpsd could not see what was open to process 100 when it attached; unless"),
        (ReadBack(250, 3 * GIB), Known({}), "3GiB of memory instead of 2GiB"),
        (PART, Known({}), ""),
        (PART, HIDDEN, "drop the memory limit"),
        (WIDE, Known(lease().shares[0].env), ""),
        (None, Known(lease().shares[0].env), "may have less than its part of the lease"),
    ],
)
def test_what_only_might_be(opened: ReadBack | None, environment: Reading[Mapping[str, str]], word: str) -> None:
    """A client that is not visibly limited, while more is open, is unknown, and no violation."""
    granted = lease()
    found = replace(client(ceiling=opened), environment=environment)
    assert kinds(AttributedClient(found, granted, counted=True)) == []
    said = unknown(found, granted, granted.shares[0], memory=True)
    assert (word in said) if word else (said == "")
    # The result is the same where more was open later only.
    if opened == WIDE:
        later = replace(client(ceiling=PART, since=WIDE), environment=environment)
        assert unknown(later, granted, granted.shares[0], memory=True) == said


def test_variable_trap() -> None:
    """An entry for a GPU that the client does not see makes MPS drop every memory limit: reported, but no proof."""
    granted, variable = lease(), PINNED_DEVICE_MEM_LIMIT.variable
    for text, entry in (("0=2G,1=4G", "1=4G"), ("GPU-ffff=1G", "GPU-ffff=1G"), ("2G", "2G"), ("7=1G", "7=1G")):
        attached = AttributedClient(client(environment={variable: text}), granted, counted=True)
        (found,) = of_client(attached, denied=True, memory=True)
        assert (found.kind, found.own) == (ViolationKind.LIMITS, False)
        assert f"has the entry '{entry}'" in found.because
        assert "start the program again under a lease: mpsctl run; " in found.hint
        assert kinds(attached, memory=False) == []
        other = AttributedClient(client(OTHER, environment={variable: text}), lease(processes=2), counted=True)
        (found,) = of_client(other, denied=True, memory=True)
        assert f"mpsctl show {granted.id} -o env" in found.hint
    for text in ("", "0=2G", "00=2G", "GPU-0000=2G", f"{GPU}=2G,0=1G", ",", "0=x"):
        assert kinds(AttributedClient(client(environment={variable: text}), granted, counted=True)) == []


@pytest.mark.parametrize(
    ("limit", "more", "fewer"),
    [(ACTIVE_THREAD_PERCENTAGE, "90 ? 100.0", "20"), (PINNED_DEVICE_MEM_LIMIT, "0=70G 0=x ,", "0=1G")],
)
def test_its_own_environment(limit: Limit, more: str, fewer: str) -> None:
    """A client that names more than its part is reported; one that names less is not, nor a holder, who may set it."""
    for text in (*more.split(), fewer, ""):
        expected = [ViolationKind.LIMITS] if text in more.split() else []
        attached = AttributedClient(client(OTHER, environment={limit.variable: text}), lease(), counted=True)
        assert kinds(attached) == expected
        assert [each.own for each in of_client(attached, denied=True, memory=True)] == [False for _ in expected]
        own = AttributedClient(client(environment={limit.variable: text}), lease(), counted=True)
        assert kinds(own) == []


@pytest.mark.parametrize(
    ("value", "has", "expected"),
    [("32", 1, [ViolationKind.CONNECTIONS]), ("3", 1, [ViolationKind.CONNECTIONS]), ("2", 1, []), ("x", 1, []),
     ("32", 12, []), ("32", 11, [ViolationKind.CONNECTIONS])],
)  # fmt: skip
def test_more_connections(value: str, has: int, expected: list[ViolationKind]) -> None:
    """A client that takes more places of the GPU than its lease has for it is reported, and never ended."""
    granted = structs.replace(lease(), shares=(structs.replace(lease().shares[0], places=has),))
    attached = AttributedClient(client(environment={MAX_CONNECTIONS: value}), granted, counted=True)
    assert kinds(attached) == expected
    assert not any(each.own for each in of_client(attached, denied=True, memory=True))
    assert Settings().on_violation(ViolationKind.CONNECTIONS) is OnViolation.REPORT


def test_short() -> None:
    """A client that attached while less than its share was open is reported, with a remedy, and never ended."""
    granted, late = lease(), lease(processes=2)
    (found,) = of_client(AttributedClient(client(ceiling=CLOSED), granted, counted=True), denied=True, memory=True)
    assert (found.kind, found.own) == (ViolationKind.SHORT, False)
    assert "0.1 % of the threads instead of 25 % and 1MiB of memory instead of 2GiB" in found.because
    assert "mpsctl run" in found.hint
    other = client(OTHER, ceiling=CLOSED)
    (found,) = of_client(AttributedClient(other, late, counted=True), denied=True, memory=True)
    assert f"mpsctl attach {late.id}" in found.hint
    # A client that lowered itself, or was not seen, is not short; nor is one whose memory reads back in whole GiB.
    own = client(environment={ACTIVE_THREAD_PERCENTAGE.variable: "1"})
    assert kinds(AttributedClient(own, granted, counted=True)) == []
    assert kinds(AttributedClient(client(ceiling=None), granted, counted=True)) == []
    odd = structs.replace(granted.shares[0], memory=PinnedDeviceMemLimit(2500))
    assert kinds(AttributedClient(client(), structs.replace(granted, shares=(odd,)), counted=True)) == []
    assert kinds(AttributedClient(client(ceiling=ReadBack(250, None)), granted, counted=True)) == []
    assert kinds(AttributedClient(client(ceiling=CLOSED), granted, counted=True), memory=False) == [ViolationKind.SHORT]


def test_short_by_one_reading() -> None:
    """Where more was open after it connected, MPS may have fixed the limits before.

    Where only at times, it is unknown.
    """
    granted, share = lease(), lease().shares[0]
    found = client(of=granted, ceiling=CLOSED, since=PART)
    (short,) = of_client(AttributedClient(found, granted, counted=True), denied=True, memory=True)
    assert (short.kind, short.own) == (ViolationKind.SHORT, False)
    assert "may for good have only 0.1 % of the threads instead of 25 %" in short.because
    either = Opened(Bounds(CLOSED, PART), Bounds(CLOSED, PART))
    found = replace(client(of=granted), opened=either)
    assert kinds(AttributedClient(found, granted, counted=True)) == []
    assert "may for good have only 0.1 % of the threads" in unknown(found, granted, share, memory=True)


def test_fault_that_a_log_tells() -> None:
    """A fault in a server's log alone may be forged; one that the control daemon reports is not."""
    attached = AttributedClient(client(), None, counted=False)
    assert [of_lingering(attached, 1, proven=each).own for each in (False, True)] == [False, True]


def over(*mebibytes: int | None) -> list[int]:
    """Return which processes of a lease of 2 GiB for one are over if they, the oldest first, hold these amounts.

    NVML may show 640 MiB of its context beyond that.
    """
    held = {
        ProcessIdentity(900 - at, at): GpuProcess(Known(each * MIB) if each is not None else Unknown(""), mps=True)
        for at, each in enumerate(mebibytes)
    }
    reordered = dict(sorted(held.items(), key=lambda each: each[0].pid))
    of = lease(processes=1)
    return [each.process.start_ticks for each in of_memory(of, reordered, of.shares[0], {})]


@pytest.mark.parametrize(
    ("mebibytes", "which"),
    [
        ([1536, 1152], []),
        ([1536, 1152, 1], [2]),
        ([2048, 1536, 512], [1]),  # its end suffices
        ([2689, 1024, 1024], [0]),  # it alone holds too much
        ([1024, 2689, 2689], [1, 2]),
        ([2688, 0, None], []),  # unknown is nobody's fault
    ],
)
def test_newest_are_over(mebibytes: list[int | None], which: list[int]) -> None:
    """The oldest processes of a lease keep their memory, and so do those that fit beside them."""
    assert over(*mebibytes) == which


@pytest.mark.parametrize(("processes", "clients", "unlimited"), [(None, 2, True), (None, 1, False), (2, 2, False)])
def test_sum_that_mps_does_not_limit(processes: int | None, clients: int, *, unlimited: bool) -> None:
    """Each process of a lease of any number has the limit of the whole lease."""
    has = lease(clients=(HOLDER, OTHER)[:clients])
    has = structs.replace(has, request=structs.replace(has.request, processes=processes))
    assert is_unlimited([], [AttributedClient(client(), has, counted=True)]) is unlimited


@given(st.lists(st.integers(0, 3000), max_size=8))
def test_as_few_as_suffice(mebibytes: list[int]) -> None:
    """What is left fits; nobody is over if all fit; each that is over would not fit beside the older ones."""
    which = over(*mebibytes)
    left = [0 if at in which else each for at, each in enumerate(mebibytes)]
    assert sum(left) <= 2688
    assert bool(which) is (sum(mebibytes) > 2688)
    assert all(sum(left[:at]) + mebibytes[at] > 2688 for at in which)


@pytest.mark.parametrize(
    ("environment", "near", "own"),
    [
        (Known({}), lease(), True),
        (HIDDEN, None, True),
        (HIDDEN, lease(), False),
        (HIDDEN, structs.replace(lease(), owner=Owner(7, 7, 1, None)), True),
    ],
)
def test_extra_client_that_may_have_another_lease(
    environment: Reading[Mapping[str, str]], near: Lease | None, *, own: bool
) -> None:
    """An extra client whose environment may have the token of another lease of its user is reported only."""
    attached = AttributedClient(replace(client(), environment=environment), lease(50), counted=False)
    (found,) = of_client(attached, denied=True, memory=True, near=near)
    assert (found.kind, found.own) == (ViolationKind.PROCESSES, own)


def test_client_that_may_have_a_lease() -> None:
    """A client without a lease may have one if its user has one with room, or if its environment cannot be read."""

    def judged(found: Client, near: Lease | None = None) -> Violation:
        attached = AttributedClient(found, None, counted=False)
        (violation,) = of_client(attached, denied=True, memory=True, near=near)
        assert violation.kind is ViolationKind.NO_LEASE
        return violation

    assert judged(client()).own
    unreadable = judged(replace(client(), environment=HIDDEN))
    assert (unreadable.own, "cannot be read" in unreadable.because) == (False, True)
    possible = judged(client(), lease())
    assert (possible.own, "it may belong to lease lease-25" in possible.because) == (False, True)
    foreign = judged(client(uid=7), lease())
    assert foreign.own
    assert foreign.because.endswith(": it runs as uid 7, and lease lease-25 is for processes of uid 0")
    assert foreign.hint.startswith('start it again as uid 0: eval "$(mpsctl show lease-25 -o env)"; or ')


# -- whether a lease is well -------------------------------------------------------------------------------------------


def test_verify() -> None:
    """A lease is well when one of its processes is attached and none is in violation."""
    granted = lease(clients=(HOLDER,))
    held = {GPU: {HOLDER: GpuProcess(Known(GIB), mps=True)}}
    well = verify(granted, [client(of=granted)], held, (), memory=True)
    assert (well.verdict, [each.held for each in well.processes]) == (Verdict.OK, [GIB])
    # The lease is well with anything open, as long as its client's environment limits it; otherwise it is unknown.
    assert verify(granted, [client(of=granted, ceiling=WIDE)], held, (), memory=True).ok
    # Where it is not known what was open when it attached, its client may have less.
    unseen = verify(granted, [client(of=granted, ceiling=None)], held, (), memory=True)
    assert (unseen.verdict, unseen.processes[0].in_force, unseen.processes[0].at_least) == (Verdict.UNKNOWN, PART, None)
    for what in (client(ceiling=None), client(ceiling=WIDE), client(ceiling=PART, since=WIDE)):
        doubt = verify(granted, [what], held, (), memory=True)
        assert (doubt.verdict, doubt.processes[0].verdict) == (Verdict.UNKNOWN, Verdict.UNKNOWN)
        assert doubt.unknown == (doubt.because,)
        assert (doubt.processes[0].in_force is None) == (what.opened is None)

    short = verify(granted, [client(of=granted, ceiling=CLOSED)], held, (), memory=True)
    assert (short.verdict, short.processes[0].in_force) == (Verdict.VIOLATION, CLOSED)
    elsewhere = replace(of_outside(granted, granted.shares[0], [OTHER], {}).__next__(), kind=ViolationKind.USER)
    seen = verify(granted, [client(of=granted)], held, [elsewhere], memory=True)
    assert [(each.pid, each.verdict) for each in seen.processes] == [
        (HOLDER.pid, Verdict.OK),
        (OTHER.pid, Verdict.VIOLATION),
    ]
    trapped = client(environment={PINNED_DEVICE_MEM_LIMIT.variable: "1=2G"})
    trap = verify(granted, [trapped], held, (), memory=True)
    assert trap.verdict is Verdict.VIOLATION
    assert trap.because.startswith("no memory limit: ")
    assert trap.unknown == ()
    again = f'eval "$(mpsctl show {granted.id} -o env)"'
    assert trap.hint == (
        "leave that variable as the lease sets it, and start the program again under a lease: mpsctl run;"
        f" an administrator ends it: mpsctl end {HOLDER.pid}"
    )

    outside = {GPU: {OTHER: GpuProcess(Known(GIB))}}
    bypasses = verify(granted, [], outside, (), memory=True)
    assert "outside MPS" in bypasses.because
    assert bypasses.hint == f"start it again in the environment of its lease: {again}"
    assert not verify(granted, [client(of=granted)], {GPU: {**held[GPU], **outside[GPU]}}, (), memory=True).ok
    found = Violation(ViolationKind.MEMORY, HOLDER, granted.id, "gpu0", "too much", "less")
    proven = verify(granted, [client(of=granted)], held, (found,), memory=True)
    assert (proven.because, proven.hint) == ("too much", "less")
