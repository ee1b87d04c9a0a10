"""The amount of a request on a GPU, and requests that can never be granted there."""

from decimal import Decimal
from typing import Any, Final

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mpsd.core import mps_facts
from mpsd.core.admission.admission import Amount, Offer, Shortage, check, needs, never, share, why_never
from mpsd.core.errors import (
    DaemonNotReadyError,
    DoesNotFitError,
    ExceedsDaemonLimitError,
    InvalidRequestError,
    MpsdError,
    NeverFitsError,
    NotPermittedError,
)
from mpsd.core.model import AttachedProcess, LeaseRequest, Limits, ProcessIdentity, Visible
from mpsd.core.mps_facts import CONNECTIONS
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.units import GIB, MIB
from tests.core.admission.scenarios import Desk, gpu, offer, request

THREADS: Final = ActiveThreadPercentage(250)
MEMORY: Final = PinnedDeviceMemLimit(8192)

fractions = st.integers(1, 1000).map(lambda thousandths: thousandths / 1000) | st.floats(0.001, 1)
sizes = st.integers(MIB, 2**62) | st.integers(1, 2**20).map(lambda mebibytes: mebibytes * MIB)


def need(what: LeaseRequest, at: Offer) -> Amount:
    """Return the amount of a request on one GPU."""
    check(what)
    ((offered, amount),) = needs(what, [at])
    assert offered is at
    return amount


@pytest.mark.parametrize(
    ("what", "limit", "words"),
    [
        ({"fraction": 0.5, "threads": THREADS}, "fraction", "neither can be given with it"),
        ({"fraction": 0.5, "memory": MEMORY}, "fraction", "neither can be given with it"),
        ({"fraction": 0.5, "threads": THREADS, "memory": MEMORY}, "fraction", "neither can be given with it"),
        ({"fraction": 0.0}, "fraction", "fraction 0 is not between 0.001 and 1"),
        ({"fraction": -0.5}, "fraction", "fraction -0.5 is not"),
        ({"fraction": 0.00099}, "fraction", "fraction 0.00099 is not"),
        ({"fraction": 1.0000001}, "fraction", "fraction 1.0000001 is not between 0.001 and 1"),
        ({"fraction": float("nan")}, "fraction", "fraction nan is not"),
        ({"fraction": float("inf")}, "fraction", "fraction inf is not"),
        ({"fraction": 5e-324}, "fraction", "fraction 5e-324 is not"),
        ({}, "threads", "threads is missing"),
        ({"memory": MEMORY}, "threads", "threads is missing"),
        ({"threads": THREADS}, "memory", "memory is missing"),
        ({"fraction": 0.5, "processes": 0}, "processes", "processes is 0"),
        ({"fraction": 0.5, "processes": -1}, "processes", "processes is -1"),
        ({"fraction": 0.5, "gpus": 0}, "gpus", "gpus is 0"),
        ({"fraction": 0.5, "gpus": 2, "gpu": gpu(0)}, "gpus", "2 GPUs were requested, but gpu names a single one"),
    ],
)
def test_amounts_that_are_refused(what: dict[str, Any], limit: str, words: str) -> None:
    """A missing, duplicate or invalid amount is refused with its name and its number."""
    with pytest.raises(InvalidRequestError) as refusal:
        check(LeaseRequest(**what))
    assert refusal.value.limit == limit
    assert words in refusal.value.detail
    assert refusal.value.hint


class TestNeeds:
    """The amount of a request: integers, rounded so that nothing is promised twice."""

    @pytest.mark.parametrize(
        ("fraction", "memory", "amount"),
        [
            (0.25, 80 * GIB, Amount(250, 20 * GIB, 1)),
            (0.29, 100 * MIB, Amount(290, 29 * MIB, 1)),
            (0.57, 100 * MIB, Amount(570, 57 * MIB, 1)),
            (1.0, 100 * MIB - 1, Amount(1000, 99 * MIB, 1)),
            (1 / 3, 100 * MIB, Amount(333, 33 * MIB, 1)),
            (0.0019, 80 * GIB, Amount(1, 155 * MIB, 1)),
            (0.001, 100 * MIB, Amount(1, MIB, 1)),
            (0.5, 0, Amount(500, MIB, 1)),
        ],
    )
    def test_fraction(self, fraction: float, memory: int, amount: Amount) -> None:
        """A fraction is that part of the threads and of the memory, computed in decimal as written, rounded down."""
        assert need(LeaseRequest(fraction=fraction), offer(memory=memory)) == amount

    @given(st.integers(1, 1000), sizes)
    def test_parts_of_one_fit(self, parts: int, memory: int) -> None:
        """All whole multiples of a fraction up to one fit together, and each loses less than a MiB and a tenth."""
        at, part = offer(memory=max(memory, parts * MIB)), need(LeaseRequest(fraction=1 / parts), offer(memory=memory))
        assert part.threads * parts <= at.threads < (part.threads + 1) * parts + parts
        assert part.memory * parts <= at.memory
        assert part.memory % MIB == 0
        assert part.threads >= 1
        assert part.memory >= MIB

    @given(fractions, fractions, sizes)
    def test_fractions_that_make_one(self, first: float, second: float, memory: int) -> None:
        """Two fractions that add up to at most one fit together, if a thousandth is at least a MiB."""
        assume(Decimal(str(first)) + Decimal(str(second)) <= 1)
        memory = max(memory, 1000 * MIB)
        one, other = (need(LeaseRequest(fraction=each), offer(memory=memory)) for each in (first, second))
        assert one.threads + other.threads <= 1000
        assert one.memory + other.memory <= memory


class TestConnections:
    """The connections of clients weigh in the places of their GPU."""

    @pytest.mark.parametrize(
        ("connections", "clients_max", "places"),
        [
            *((None, most, 1) for most in (16, 48, 60)),
            *((2, most, 1) for most in (16, 48, 60)),
            (1, 48, 1),
            (3, 48, 2),
            (8, 48, 3),
            (8, 60, 4),
            (32, 16, 4),
            (32, 48, 12),
            (32, 60, 15),
        ],
    )
    def test_places(self, connections: int | None, clients_max: int, places: int) -> None:
        """A client takes the places whose connections it has, at least one."""
        at, what = offer(clients_max=clients_max), request(connections=connections, processes=2)
        amount = need(what, at)
        assert (amount.clients, amount.places) == (2, 2 * places)
        place = share(at, amount, what)
        assert (place.places, place.env.get("CUDA_DEVICE_MAX_CONNECTIONS")) == (
            places,
            None if connections is None else str(connections),
        )

    @pytest.mark.parametrize(("connections", "fit"), [(None, 47), (2, 47), (8, 15), (32, 3)])
    def test_as_measured(self, connections: int | None, fit: int) -> None:
        """As many leases fit as clients on a GPU with driver 580, less the place of a canary."""
        desk = Desk(offer(clients=47))
        for _ in range(fit):
            desk.ask(1, 1, connections=connections)
        with pytest.raises(DoesNotFitError) as refusal:
            desk.ask(1, 1, connections=connections)
        assert refusal.value.limit == "clients"

    @given(st.lists(st.integers(1, 32), max_size=60), st.sampled_from([48, 60]))
    def test_no_more_than_there_are(self, connections: list[int], clients_max: int) -> None:
        """Whatever clients have together, all that are granted have less connections than did not fit when measured."""
        desk, has = Desk(offer(clients=clients_max - 1, clients_max=clients_max, threads=10**6)), 0
        for each in connections:
            try:
                desk.ask(0.1, 1 / 1024, connections=each)
            except DoesNotFitError:
                continue
            has += each
        assert has < CONNECTIONS

    @pytest.mark.parametrize(
        ("text", "connections"),
        [("8", 8), ("0", 0), ("33", 32), ("9" * 5000, 32), ("", None), ("-1", None), ("x", None)],
    )
    def test_variable(self, text: str, connections: int | None) -> None:
        """The variable of any program is read without harm: a nonsense one counts as none."""
        assert mps_facts.connections(text) == connections
        assert mps_facts.places(connections, 48) >= 1

    def test_attached(self) -> None:
        """A client that has more than its lease takes its own places, beside those of the clients to come."""
        desk = Desk(offer(clients=47))
        lease = desk.ask(4, 1, processes=2, connections=8)
        assert desk.ledger.taken(gpu(0)).places == 6
        heavy = AttachedProcess(ProcessIdentity(1, 1), gpu(0), 12)
        desk.ledger.attach(lease.id, (heavy,))
        assert desk.ledger.taken(gpu(0)) == Amount(40, GIB, 2, 13)
        light = AttachedProcess(ProcessIdentity(2, 2), gpu(0), 3)
        desk.ledger.attach(lease.id, (heavy, light))
        assert desk.ledger.taken(gpu(0)).places == 15
        desk.ledger.attach(lease.id, ())
        assert desk.ledger.taken(gpu(0)).places == 6


class TestVisible:
    """CUDA_VISIBLE_DEVICES has a number only where that is known to be safe."""

    NAME = "CUDA_VISIBLE_DEVICES"

    @pytest.mark.parametrize("closed", [True, False, None])
    @pytest.mark.parametrize("setting", [*Visible])
    def test_of_the_settings(self, setting: Visible, closed: bool | None) -> None:  # noqa: FBT001
        """The setting gives a number on a closed node only; on another one, the lease says why it has none."""
        desk = Desk(offer(closed=closed, visible=setting))
        lease = desk.ask(1, 1)
        wants = setting is Visible.INDEX
        assert lease.shares[0].env[self.NAME] == ("0" if wants and closed else gpu(0))
        assert (self.NAME in lease.because) == (wants and not closed)
        own = desk.ask(1, 1, visible=Visible.UUID)
        assert (own.shares[0].env[self.NAME], self.NAME in own.because) == (gpu(0), False)

    def test_requested(self) -> None:
        """A request for a number is refused on an open node, and waits while the mode of a GPU is unknown."""
        desk = Desk(offer(closed=False))
        with pytest.raises(NotPermittedError) as refusal:
            desk.ask(1, 1, visible=Visible.INDEX, wait=None)
        assert refusal.value.limit == "visible"
        desk.offers(offer(closed=None))
        with pytest.raises(DaemonNotReadyError) as unknown:
            desk.ask(1, 1, visible=Visible.INDEX)
        assert unknown.value.limit == "health"
        waits = desk.waits(1, 1, visible=Visible.INDEX)
        assert (desk.settle(), desk.ledger.impossible()) == ([], [])
        assert desk.offers(offer(closed=True)) == [waits.id]
        assert desk.ledger.leases[waits.id].shares[0].env[self.NAME] == "0"
        # Another one that waits for room is ended when the node is opened.
        other = desk.waits(100, 1, visible=Visible.INDEX)
        desk.offers(offer(closed=None))
        assert desk.ledger.impossible() == []
        desk.offers(offer(closed=False))
        ((impossible, shortage),) = desk.ledger.impossible()
        assert (impossible.id, shortage.limit, shortage.error) == (other.id, "visible", NotPermittedError)


class TestShare:
    """A share on a GPU, and the environment that limits each process to its part."""

    def test_environment(self) -> None:
        """The environment names the pipe directory, the GPU, and limits in MPS's own grammar."""
        what = request(33.3, 1.5)
        at = offer(3)
        place = share(at, need(what, at), what)
        assert (place.gpu, place.daemon, place.threads.tenths, place.memory.mebibytes) == (gpu(3), "gpu3", 333, 1536)
        assert place.env == {
            "CUDA_MPS_PIPE_DIRECTORY": "/run/mpsd/gpu3",
            "CUDA_VISIBLE_DEVICES": gpu(3),
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "33.3",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1536M",
        }

    @pytest.mark.parametrize(
        ("threads", "memory", "processes", "percentage", "limit"),
        [
            (100, 8, 1, "100.0", "0=8G"),
            (100, 8, 3, "33.3", "0=2730M"),
            (40, 8, 4, "10.0", "0=2G"),
            (0.7, 7 / 1024, 7, "0.1", "0=1M"),
            (1.3, 13 / 1024, 7, "0.1", "0=1M"),
        ],
    )
    def test_parts(self, threads: float, memory: float, processes: int, percentage: str, limit: str) -> None:
        """Each of several processes gets its part, rounded down to a value that MPS accepts."""
        what = request(threads, memory, processes=processes)
        place = share(offer(), need(what, offer()), what)
        assert place.env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == percentage
        assert place.env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == limit
        assert place.threads == what.threads

    @given(st.integers(1, 1000), st.integers(1, 2**20), st.integers(1, 1000))
    def test_parts_are_no_more_than_the_whole(self, tenths: int, mebibytes: int, processes: int) -> None:
        """The limits of all processes together are at most the granted amount; otherwise there are no such parts."""
        what = LeaseRequest(ActiveThreadPercentage(tenths), PinnedDeviceMemLimit(mebibytes), processes=processes)
        at = offer(memory=2**50, clients=1000)
        amount = need(what, at)
        shortage = never(amount, at)
        if shortage is not None:
            assert (shortage.limit, shortage.error) == ("processes", InvalidRequestError)
            assert tenths < processes or mebibytes < processes
            return
        env = share(at, amount, what).env
        each = ActiveThreadPercentage.parse(env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]).tenths
        memory = env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"].removeprefix("0=") + "iB"
        each_memory = PinnedDeviceMemLimit.parse(memory.replace("MiB", " MiB").replace("GiB", " GiB"))
        assert 0 < each * processes <= tenths < (each + 1) * processes
        assert 0 < each_memory.mebibytes * processes <= mebibytes < (each_memory.mebibytes + 1) * processes


def limits(threads: float = 100, mebibytes: int | None = None) -> Limits:
    return Limits(ActiveThreadPercentage.parse(threads), None if mebibytes is None else PinnedDeviceMemLimit(mebibytes))


class TestNever:
    """Requests that can never be granted on a GPU, and the reason."""

    @pytest.mark.parametrize(
        ("what", "at", "error", "limit", "words"),
        [
            (
                request(50.1),
                offer(threads=500),
                NeverFitsError,
                "threads",
                "50.1 % of the threads were requested, but the GPU can grant only 50 %",
            ),
            (
                request(1, 80.001),
                offer(),
                NeverFitsError,
                "memory",
                "81921MiB of memory were requested, but the GPU can grant only 80GiB",
            ),
            (
                request(1, 1),
                offer(memory=0),
                NeverFitsError,
                "memory",
                "1GiB of memory were requested, but the GPU can grant only 0B",
            ),
            (
                LeaseRequest(fraction=0.5),
                offer(memory=0),
                NeverFitsError,
                "memory",
                "1MiB of memory were requested, but the GPU can grant only 0B",
            ),
            (
                request(100, 1, processes=17),
                offer(clients=16),
                NeverFitsError,
                "clients",
                "17 client processes were requested, but MPS admits only 16 clients on the GPU",
            ),
            (
                request(1.9, 1, processes=20),
                offer(),
                InvalidRequestError,
                "processes",
                "1.9 % of the threads and 1GiB cannot be divided into 20 parts of at least 0.1 % and 1 MiB",
            ),
            (
                request(100, 19 / 1024, processes=20),
                offer(),
                InvalidRequestError,
                "processes",
                "100.0 % of the threads and 19MiB cannot be divided into 20 parts",
            ),
            (
                request(30.1),
                offer(limits=limits(30)),
                ExceedsDaemonLimitError,
                "limits.active_thread_percentage",
                "30.1 % of the threads were requested, but the control daemon allows a client 30.0 % at most",
            ),
            (
                request(100, processes=2),
                offer(limits=limits(49.9)),
                ExceedsDaemonLimitError,
                "limits.active_thread_percentage",
                "50 % of the threads were requested for each process, but the control daemon allows a client 49.9 %",
            ),
            (
                request(1, 4.1),
                offer(limits=limits(100, 4096)),
                ExceedsDaemonLimitError,
                "limits.pinned_device_mem_limit",
                "4198MiB of memory were requested, but the control daemon allows a client 4GiB at most",
            ),
            (
                request(100, 9, processes=2),
                offer(limits=limits(100, 4096)),
                ExceedsDaemonLimitError,
                "limits.pinned_device_mem_limit",
                "4.5GiB of memory were requested for each process, but the control daemon allows a client 4GiB",
            ),
        ],
    )
    def test_never(self, what: LeaseRequest, at: Offer, error: type[MpsdError], limit: str, words: str) -> None:
        """The refusal names the limit, both numbers, and the remedy."""
        shortage = never(need(what, at), at)
        assert shortage is not None
        assert (shortage.error, shortage.limit, shortage.gpu) == (error, limit, at.gpu)
        assert words in shortage.because
        assert shortage.hint
        refusal = shortage.raised()
        assert isinstance(refusal, error)
        assert (refusal.detail, refusal.hint, refusal.limit) == (shortage.because, shortage.hint, limit)

    @pytest.mark.parametrize(
        ("what", "at"),
        [
            (request(100, 80, processes=48), offer()),
            (request(50), offer(threads=500)),
            (request(100), offer(threads=4000)),
            (request(100, processes=2), offer(limits=limits(50))),
            (request(1, 8, processes=2), offer(limits=limits(100, 4096))),
            (request(2, 20 / 1024, processes=20), offer()),
            (LeaseRequest(fraction=1), offer()),
            (LeaseRequest(fraction=0.001), offer(memory=MIB)),
        ],
    )
    def test_to_the_last_bit(self, what: LeaseRequest, at: Offer) -> None:
        """A request for exactly the whole amount is possible."""
        assert never(need(what, at), at) is None

    def test_closest(self) -> None:
        """Of several GPUs the refusal describes the closest: the largest, and a configured limit before a lack."""

        def why(*offers: Offer) -> Shortage:
            return why_never(needs(request(40, 50), offers))

        assert why(offer(0, memory=GIB), offer(1, memory=9 * GIB), offer(2, memory=2 * GIB)).gpu == gpu(1)
        assert why(offer(0, memory=GIB), offer(1, limits=limits(30)), offer(2, memory=GIB)).gpu == gpu(1)
        assert why(offer(0), offer(1, memory=GIB)).gpu == gpu(1)
