"""A lease of this process: taken, set in its environment, renewed, verified, and released.

    import mpsd

    with mpsd.lease(fraction=0.25, wait="10m", ttl="1h") as lease:
        print(lease.uuid, lease.memory)  # its GPU, and the bytes of device memory that it may use there
        ...  # the first use of CUDA, in this process or in those that it starts
        print(lease.verify().because)

    print(lease.state)

The environment is set before CUDA is initialised, which reads it then, once for all: where that is too late, no lease
is taken. At the end of the block the environment is as it was before, and the lease is released, also by an exception.
"""

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Self, TypeAlias, Unpack, cast

from mpsd.client import own_environment
from mpsd.client.client import Client
from mpsd.client.environment import environment, own_connections
from mpsd.client.request import Request, body
from mpsd.client.waiting import Progress, give_up, new_request_id, take
from mpsd.core.errors import CudaInitializedError, InvalidRequestError, MpsdError, NotFoundError, UnreachableError

if TYPE_CHECKING:
    from mpsd.client import answer_types
    from mpsd.client.watcher import Watcher
    from mpsd.core.programs.frameworks import Advice

OnEnding: TypeAlias = "Callable[[Lease, float], object]"
OnDraining: TypeAlias = "Callable[[Lease], object]"

_LEASE: Final = "MPSD_LEASE"
_PIPE_DIRECTORY: Final = "CUDA_MPS_PIPE_DIRECTORY"


class WholeGpuWarning(UserWarning):
    """There is no mpsd on this machine, and the program continues on the whole GPU, without limits, as asked."""


class Options(Request, total=False):
    """The keyword arguments of `mpsd.lease`: the request, and what this program does about it."""

    client: Client | None
    """How mpsd is called; by default with MPSD_SOCKET and MPSD_TRUST_UID, as mpsctl does."""
    otherwise: Literal["fail", "whole-gpu"]
    """What to do on a machine without mpsd: raise UnreachableError, or warn and go on without a lease."""
    on_ending: "OnEnding | None"
    """Called once with the Lease and seconds, in a thread, when it ends in 60 s or less, or has ended (0)."""
    on_draining: "OnDraining | None"
    """Called once with the Lease, likewise, when its control daemon is being drained."""


class Verification(NamedTuple):
    """Whether a lease is in force, by the driver inside this process and by mpsd outside."""

    inside: bool | None
    """Whether the driver says that this process is under MPS; None where CUDA is not initialised here, or the driver
    does not say."""
    outside: "answer_types.Verify | None"
    """The answer of mpsd; None for a program that continues without a lease."""
    because: str
    """Both in a sentence."""
    is_verified: bool
    """Whether mpsd verified every process of the lease, and the driver does not contradict.

    mpsd sees the environment that a program was started with. Beside larger leases it does not know whether a process
    that set its own variables is within its limits. This process knows that of itself, so that such a doubt about it
    alone counts as verified where the driver says that it is under MPS.
    """


def lease(**options: Unpack[Options]) -> "Lease":
    """Return a lease that is not open yet: `with` takes it, and sets the environment of this process.

        with mpsd.lease(fraction=0.25, wait="10m") as lease:
            ...  # the first use of CUDA, here or in a child process

    How much: `fraction` of a GPU (0.25, `25%`, `1/4`), or `threads` (percent) and `memory` (bytes, `8GiB`); on one
    `gpu` (0, `gpu0`, a UUID), or the same on each of `gpus`; in parts for so many `processes` on each, or `any`.
    When: `wait` until it fits (seconds, `10m`, `forever`; by default not at all), with `priority`; `ttl` (`2h`).
    Of its clients: `client_priority` (0 or 1), `connections` (1 to 32), `visible` (`uuid` or `index`).
    Of the lease: `name`, `labels`, `pid` (its holder), `stop` (`terminate` or `sigterm`).
    Of this program: `client`, `otherwise` (`fail` or `whole-gpu`), `on_ending`, `on_draining`.

    Raises TypeError for another argument, and for one of these last of a wrong type; InvalidRequestError for a text in
    no valid notation. `Lease.open` raises the others.
    """
    return Lease(**options)


def current() -> "Lease | None":
    """Return the lease that this process runs under, by the MPSD_LEASE in its environment; None without one.

    Within `with mpsd.lease(...)` that is the very Lease. Any other is held by another process, such as the parent: it
    does not end by this object. Raises the errors of `Client.lease`, and NotFoundError where it has ended.
    """
    name = os.environ.get(_LEASE)
    if not name:
        return None
    here = (each for each in own_environment.owners() if isinstance(each, Lease) and each.id == name)
    return next(here, None) or Lease.of_another(name)


_held: "Final[list[Lease]]" = []
"""The leases that are open in this process, and copies of its parent's."""


class Lease:
    """A lease of mpsd, as a context manager; `mpsd.lease` makes one.

    The process that opens it holds it. A forked child is under the lease as a descendant of its holder, and does not
    hold it: to leave the block there, or to close the Lease, restores the child's environment and releases nothing.
    The child's own `mpsd.lease()` takes a further lease. Whatever kills the holder, mpsd ends the lease, once its
    clients are gone.

    The environment is that of the whole process. Of leases that several threads open, the last one is in force.
    """

    def __init__(self, **options: Unpack[Options]) -> None:
        unknown = options.keys() - Options.__optional_keys__
        if unknown:
            raise TypeError(f"there is an unexpected keyword argument {min(unknown)!r}{_nearest(min(unknown))}")
        self.is_whole_gpu = False
        """Whether this program continues without a lease, with the whole GPU: see `otherwise`."""
        self.answer: answer_types.Lease | None = None
        """The last answer of mpsd about the lease; None before it is open, and without mpsd."""
        self.environments: tuple[dict[str, str], ...] = ()
        """The variables of its processes on each of its GPUs."""
        self.holder: int | None = None
        """The pid of the process that holds it; None before it is open, and for a holder that is no process."""
        given: dict[str, object] = {**options}
        client = given.pop("client", None)
        if not isinstance(client, Client | None):
            raise TypeError(f"client is an mpsd.Client, not {client!r}")
        self._is_own_client = client is None
        self._client = client or _default_client()
        self._otherwise = given.pop("otherwise", "fail")
        if self._otherwise not in {"fail", "whole-gpu"}:
            raise InvalidRequestError(
                f"otherwise is {self._otherwise!r}", hint='pass otherwise="fail" or otherwise="whole-gpu"'
            )
        self._on_ending = cast("OnEnding | None", given.pop("on_ending", None))
        self._on_draining = cast("OnDraining | None", given.pop("on_draining", None))
        for name, function in (("on_ending", self._on_ending), ("on_draining", self._on_draining)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} is a function, not {function!r}")
        self._request = body(given)
        self._wait = cast("float", self._request.pop("wait", 0.0))
        self._opened_by: int | None = None
        """The pid of the process that opened it, and has not closed it."""
        self._share = 0
        self._watcher: Watcher | None = None
        self._absent: UnreachableError | None = None

    @classmethod
    def of_another(cls, name: str) -> "Lease":
        """Return the lease with this id, which another process holds. Raises the errors of `Client.lease`."""
        found = cls()
        with found._calling() as client:
            found._accept(client.lease(name))
        pipe = os.environ.get(_PIPE_DIRECTORY)
        directories = [each.get(_PIPE_DIRECTORY) for each in found.environments]
        found._share = directories.index(pipe) if pipe in directories else 0
        return found

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        """The client for the mpsd whose lease it is."""
        return self._client

    @property
    def id(self) -> str:
        """Its id; empty before it is open, and without mpsd."""
        return "" if self.answer is None else self.answer["id"]

    @property
    def state(self) -> str:
        """`new` before it is open, then mpsd's own word, as far as it is known: `granted`, `active` or `ended`.

        `whole-gpu` is that of a program that continues without a lease.
        """
        if self.is_whole_gpu:
            return "whole-gpu"
        return "new" if self.answer is None else self.answer["state"]

    @property
    def environment(self) -> dict[str, str]:
        """The variables of its processes, on its only or first GPU; empty without a lease."""
        return self.environments[self._share] if self.environments else {}

    @property
    def uuids(self) -> tuple[str, ...]:
        """The UUIDs of its GPUs."""
        return () if self.answer is None else tuple(self.answer["gpus"])

    @property
    def uuid(self) -> str | None:
        """The UUID of the GPU that `environment` names."""
        return self.uuids[self._share] if self.uuids else None

    @property
    def threads(self) -> float | None:
        """Percent of a GPU's threads, on each of its GPUs; None without a lease: no limit."""
        return None if self.answer is None else self.answer["active_thread_percentage"]

    @property
    def memory(self) -> int | None:
        """Bytes of device memory, likewise. All its processes on a GPU share these: a pool's worker has its part."""
        return None if self.answer is None else self.answer["pinned_device_mem_limit"]

    @property
    def is_held_here(self) -> bool:
        """Whether this very process holds it, and it has not ended."""
        return self.holder == os.getpid() and self.state != "ended"

    def __repr__(self) -> str:
        """Say what it is, and who holds it while it lives."""
        if self.answer is None:
            return f"<mpsd.Lease: {self.state}>"
        if self.state == "ended":
            return f"<mpsd.Lease {self.id}: ended>"
        by = "this process" if self.holder == os.getpid() else "another process"
        if self._opened_by not in {None, os.getpid()} and self._opened_by == self.holder:
            by = "the process that forked this one"
        held = f"held by pid {self.holder}, {by}" if self.holder else "held by no process"
        return f"<mpsd.Lease {self.id}: {self.state}, {held}>"

    # -- its life -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Open it."""
        self._open(sets_environment=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Close it; an exception of the block is raised whatever mpsd answers."""
        if error is None:
            self.close()
        else:
            self._close_quietly()

    def open(self, *, sets_environment: bool = True) -> Self:
        """Take the lease, and set the variables of its first GPU in os.environ.

        `sets_environment`: whether this process itself is to use it; otherwise it holds the lease for those that it
        starts with `environment` or `environments`.

        Raises CudaInitializedError, before anything is taken, where CUDA is initialised in this process already;
        InvalidRequestError where another process is to hold it, or where this one holds a lease on the same GPU; and
        the errors of `Client.admit`: UnreachableError without mpsd, DoesNotFitError, NeverFitsError, and others.
        """
        self._open(sets_environment=sets_environment)
        return self

    def _open(self, *, sets_environment: bool) -> None:
        if self.state != "new":
            raise RuntimeError(f"{self!r} cannot be opened again: make another by mpsd.lease()")
        request = self._request
        if sets_environment:
            _refuse_initialised()
            if (holder := request.get("pid", os.getpid())) != os.getpid():
                raise InvalidRequestError(
                    f"pid {holder} is to hold the lease, so that this process is no part of it",
                    hint="open(sets_environment=False) takes a lease for another process, which needs its environment",
                )
        if "connections" not in request and (connections := own_connections(os.environ)) is not None:
            request = {**request, "connections": connections}
        request_id, contact = new_request_id(), _Contact()
        with contextlib.ExitStack() as failed:
            failed.callback(self._abandon, request_id)
            try:
                answer = self._take({**request, "request_id": request_id}, contact)
            except MpsdError as error:
                failed.pop_all()
                self._go_without(error, contact)
                return
            self._opened_by = os.getpid()
            _held.append(self)
            self._accept(answer)
            self.holder = cast("int | None", self._request.get("pid")) or os.getpid()
            if sets_environment:
                _refuse_initialised()  # it may have waited for long
                self._refuse_another(answer)
                own_environment.put(self, self.environment)
            self._watch(answer)
            failed.pop_all()

    def _go_without(self, error: MpsdError, contact: "_Contact") -> None:
        """Go on with the whole GPU, if the program wants that, and there is no mpsd; otherwise raise the error."""
        error = error.with_traceback(None)  # it says what it is about, and not which of mpsd's functions found that
        if not isinstance(error, UnreachableError) or error.socket is None or contact.is_made:
            raise error
        if self._otherwise == "fail":
            error.hint += '; to go on without mpsd, with the whole GPU: otherwise="whole-gpu"'
            raise error
        self.is_whole_gpu, self._absent = True, error
        warnings.warn(
            f"{error.detail}: this program continues with the whole GPU, without limits",
            WholeGpuWarning,
            stacklevel=_level_of_program(),
        )

    def _abandon(self, request_id: str) -> None:
        """Release the lease of a request whose program does not get it."""
        was_answered = self.answer is not None
        with contextlib.suppress(MpsdError):
            self.close()
            if not was_answered:
                with self._calling() as client:
                    give_up(client, request_id)

    def _refuse_another(self, answer: "answer_types.Lease") -> None:
        """Refuse a further lease on a GPU where this process holds one: mpsd cannot see whose client it is.

        It sees the environment that a program was started with, and not what the program sets itself. Raises
        InvalidRequestError, and the errors of `Client.lease`.
        """
        others = [each.answer for each in _held if each is not self]
        if name := own_environment.inherited(_LEASE):
            with self._calling() as client, contextlib.suppress(NotFoundError):
                others.append(client.lease(name))
        own = answer["owner"]["pid"]  # as mpsd sees it, which may be in another pid namespace
        for each in others:
            if each is None or each["state"] == "ended" or each["owner"]["pid"] not in {own} - {0}:
                continue
            if {*each["gpus"]} & {*answer["gpus"]}:
                raise InvalidRequestError(
                    f"this process holds {each['id']} on the same GPU, and mpsd would take it for a client of that one",
                    hint="use that lease, which mpsd.current() returns; or start the work as a process of its own, by"
                    " mpsd.spawn() or mpsctl run",
                )

    def _take(self, request: Mapping[str, object], progress: Progress) -> "answer_types.Lease":
        """Return the granted lease. One that another process takes for itself replaces this."""
        with self._calling() as client:
            return take(client, request, wait=self._wait, progress=progress)

    def _accept(self, answer: "answer_types.Lease") -> None:
        self.answer = answer
        self.holder = answer["owner"]["pid"] or None
        self.environments = tuple(environment(self._client, answer, share) for share in range(len(answer["gpus"])))

    def _close_quietly(self) -> None:
        with contextlib.suppress(MpsdError):
            self.close()

    def close(self) -> None:
        """Restore the environment as it was before, and release the lease; nothing where that was done.

        Where mpsd is away, a thread releases the lease as soon as mpsd is back, and without that it ends with its
        holder. In a forked child, only the environment is restored. Raises the errors of `Client.release`.
        """
        opened_by, self._opened_by = self._opened_by, None
        if self in _held:
            _held.remove(self)
        is_released_here = opened_by == os.getpid() and self.answer is not None
        with contextlib.ExitStack() as rest:  # what is left to do where this is interrupted, as by Ctrl-C
            if is_released_here:
                rest.callback(self._release_later, self.id)
            rest.callback(own_environment.take_back, self)
            own_environment.take_back(self)
            if is_released_here and not self._release():
                return
            rest.pop_all()

    def _release(self) -> bool:
        """Release the lease, and tell whether that is done: mpsd may be away. Raises the errors of a refusal."""
        answer = self._known()
        if self._watcher is not None:
            self._watcher.stop()
        self.answer = cast("answer_types.Lease", {**answer, "state": "ended", "because": "it was closed"})
        try:
            with self._calling() as client, contextlib.suppress(NotFoundError):  # it ended long ago
                client.release(answer["id"])
        except MpsdError as error:
            if not error.retryable:
                raise
            return False
        return True

    def _release_later(self, name: str) -> None:
        from mpsd.client.watcher import release_later

        release_later(self._client, name)

    def _watch(self, answer: "answer_types.Lease") -> None:
        if answer["expires"] is None and self._on_ending is None and self._on_draining is None:
            return
        from mpsd.client.watcher import Watcher

        self._watcher = Watcher(
            self._client,
            answer,
            ttl=cast("float | None", self._request.get("ttl")),
            heard=self._hear,
            on_ending=self._on_ending and partial(self._on_ending, self),
            on_draining=self._on_draining and partial(self._on_draining, self),
        )
        self._watcher.start()

    # -- what is true of it -------------------------------------------------------------------------------------------

    def refresh(self) -> "answer_types.Lease":
        """Return what mpsd says of it now, which is its `answer` from then on. Raises the errors of `Client.lease`."""
        with self._calling() as client:
            answer = client.lease(self._known()["id"])
        if self.state != "ended":
            self.answer = answer
        return answer

    def verify(self) -> Verification:
        """Ask the driver inside this process, and mpsd outside, whether the lease is in force.

        The driver is asked only where CUDA is initialised here, and is never initialised by this. Raises the errors of
        `Client.verify`, and RuntimeError where the Lease is not open.
        """
        from mpsd.client import cuda

        inside = cuda.is_under_mps()
        said = _INSIDE[inside] if inside is not None or cuda.is_initialised() else _NOT_ASKED
        if self.is_whole_gpu:
            return Verification(inside, None, f"{said}, and there is no lease: {self._known_absent().detail}", False)
        with self._calling() as client:
            outside = client.verify(self._known()["id"])
        is_verified = outside["ok"] and inside is not False
        if inside and not is_verified and self in own_environment.owners() and _doubts(outside) == [os.getpid()]:
            because = f"{said}, and its environment was set before it initialised CUDA; mpsd cannot see that, and says"
            return Verification(inside, outside, f"{because}: {outside['because']}", True)
        but = "but" if inside is not None and inside != outside["ok"] else "and"
        return Verification(inside, outside, f"{said}, {but} mpsd says: {outside['because']}", is_verified)

    def gate(self, processes: int, within: float | str = 60.0) -> list[int]:
        """Wait until so many processes of the lease wait here, and mpsd has verified each; return their pids.

        Each of them calls this itself, and is a client by then: after the first use of CUDA. All of them begin
        together, or all of them get a GateFailedError that says why: one is missing after `within` seconds (`60s`, or
        `1m`), has ended, or runs outside MPS or beyond its limits. Raises the errors of `Client.gate`.
        """
        from mpsd.core.units import parse_span

        with self._calling() as client:
            return client.gate(self._known()["id"], processes, parse_span(within))["processes"]

    def advice(self, framework: str) -> "Advice":
        """Return what to tell a framework about its part of the GPU: `vllm`, `sglang`, `jax`, `pytorch`, and others.

        Raises InvalidRequestError for a name that mpsd does not know, and UnreachableError without mpsd.
        """
        from mpsd.client.advice import advice_for

        with self._calling() as client:
            return advice_for(client, self._known(), framework)

    @contextlib.contextmanager
    def _calling(self) -> Iterator[Client]:
        """Yield the client, and close a connection that the program does not know of."""
        try:
            yield self._client
        finally:
            if self._is_own_client:
                self._client.close()

    def _known(self) -> "answer_types.Lease":
        """Return the last answer. Raises the UnreachableError of a program without mpsd, and RuntimeError."""
        if self.is_whole_gpu:
            raise self._known_absent()
        if self.answer is None:
            raise RuntimeError("the lease is not open yet: use `with`, or open()")
        return self.answer

    def _known_absent(self) -> UnreachableError:
        if self._absent is None:
            raise RuntimeError("the lease is not open yet: use `with`, or open()")
        return self._absent

    def _hear(self, answer: "answer_types.Lease") -> None:
        """Take an answer of mpsd, which its watcher got."""
        if self._opened_by is not None:
            self.answer = answer


_INSIDE: Final = {
    True: "the driver says that this process is under MPS",
    False: "the driver says that this process is outside MPS, where no limits apply",
    None: "the driver does not say whether this process is under MPS",
}
_NOT_ASKED: Final = "CUDA is not initialised in this process"


def _doubts(outside: "answer_types.Verify") -> list[int]:
    """Return the pids of the processes of which mpsd does not know whether they are well, if that is all it lacks."""
    unknown = [each["pid"] for each in outside["processes"] if each["verdict"] == "unknown"]
    return unknown if len(unknown) == len(outside["unknown"]) and not outside["violations"] else []


class _Contact(Progress):
    """Whether an mpsd was there while a lease was requested."""

    def __init__(self) -> None:
        self.is_made = False

    def lose(self, error: MpsdError, *, answered: bool) -> None:  # noqa: ARG002 - the wait's own
        self.is_made = self.is_made or answered


def _default_client() -> Client:
    """Return the client for the mpsd that the environment names, with the users whom it trusts."""
    trusted = os.environ.get("MPSD_TRUST_UID", "").split()
    if odd := [each for each in trusted if not (each.isascii() and each.isdecimal())]:
        raise InvalidRequestError(
            f"MPSD_TRUST_UID has {odd[0]!r}, which is no uid", hint="set it to uids with spaces between"
        )
    return Client(trusted=[int(each) for each in trusted])


def _level_of_program() -> int:
    """Return the `stacklevel` at which the caller warns about the program's own line, which is outside of mpsd."""
    frame, level = sys._getframe(1), 1  # noqa: SLF001 - documented, and inspect takes long to import
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}".startswith("mpsd."):
        frame, level = frame.f_back, level + 1
    return level


def _nearest(name: str) -> str:
    from difflib import get_close_matches

    found = get_close_matches(name, Options.__optional_keys__, 1)
    return f". Did you mean {found[0]!r}?" if found else ""


def _refuse_initialised() -> None:
    """Refuse to change the environment of a process that has read it already. Raises CudaInitializedError."""
    from mpsd.client import cuda  # it imports ctypes

    if cuda.is_initialised():
        raise CudaInitializedError(
            "CUDA is initialised in this process already, which fixed its limits: a lease would not change them",
            hint="take the lease before the first use of CUDA; or start the work as a process of its own, by"
            " mpsd.spawn() or mpsctl run",
        )
