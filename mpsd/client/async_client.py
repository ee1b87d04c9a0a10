"""The client of mpsd's API for programs of asyncio.

    import asyncio
    import os
    import mpsd

    async def main() -> None:
        async with mpsd.AsyncClient() as api, api.leased(fraction=0.25, wait="10m") as lease:
            job = await asyncio.create_subprocess_exec("true", env={**os.environ, **lease["env"]})
            await job.wait()

    asyncio.run(main())

Many tasks may use one AsyncClient. A lease is held by the process, not by the task that took it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Unpack, cast

from mpsd.client import waiting
from mpsd.client.async_routes import AsyncRoutes
from mpsd.client.client import Client
from mpsd.client.request import Request, body
from mpsd.core.errors import MpsdError, NotFoundError, StoppingError, UnreachableError

if TYPE_CHECKING:
    from mpsd.client import answer_types


class AsyncClient(AsyncRoutes):
    """mpsd, with one method for each route, and leases that no cancellation leaves behind."""

    async def take(self, request: Mapping[str, object], *, wait: float) -> "answer_types.Lease":
        """Return the requested lease once it is granted, within `wait` seconds (`inf`: without a limit).

        It is `mpsd.client.waiting.take`: a request whose answer is lost is repeated, and gets one lease. A task that is
        cancelled meanwhile gives up its place, or a lease that was granted at that very moment; it ends when that is
        done, and at once when it is cancelled again. Raises the errors of `admit`.
        """
        request_id = str(request.get("request_id") or waiting.new_request_id())
        attempts = waiting.Attempts({**request, "request_id": request_id}, wait)
        try:
            while True:
                try:
                    await self.connect()
                    return await self.admit(attempts.next(), deadline=attempts.left + self.deadline)
                except (UnreachableError, StoppingError) as error:
                    pause = attempts.pause_after(error)
                await asyncio.sleep(pause)
        except MpsdError:
            raise
        except BaseException:
            await self._to_the_end(lambda client: waiting.give_up(client, request_id))
            raise

    @contextlib.asynccontextmanager
    async def leased(
        self,
        *,
        on_ending: "Callable[[answer_types.Lease, float], object] | None" = None,
        on_draining: "Callable[[answer_types.Lease], object] | None" = None,
        **request: Unpack[Request],
    ) -> AsyncIterator["answer_types.Lease"]:
        """Take a lease for the block, as `take` does; the arguments are those of `mpsd.lease`'s request.

        At its end, however that comes about, the lease is released. Where mpsd is away then, it ends with this process.
        As that of `mpsd.lease`, it is renewed while the block runs, by a thread, which no busy task delays. The answer
        that the block has is kept up to date: `lease["state"]` is `ended` where the lease is lost. `on_ending` and
        `on_draining` are called in the loop. Raises InvalidRequestError for a text in no valid notation, too.
        """
        asked = body(request)
        wait = cast("float", asked.pop("wait", 0.0))
        lease = await self.take(asked, wait=wait)
        try:
            with self._watched(lease, cast("float | None", asked.get("ttl")), on_ending, on_draining):
                yield lease
        except BaseException:
            await self._to_the_end(lambda client: client.release(lease["id"]))
            raise
        error = await self._to_the_end(lambda client: client.release(lease["id"]))
        # A lease that is not found has ended, as by a first request that an mpsd which was ended did not answer.
        if error is not None and not isinstance(error, UnreachableError | StoppingError | NotFoundError):
            raise error

    @contextlib.contextmanager
    def _watched(
        self,
        lease: "answer_types.Lease",
        ttl: float | None,
        on_ending: "Callable[[answer_types.Lease, float], object] | None",
        on_draining: "Callable[[answer_types.Lease], object] | None",
    ) -> Iterator[None]:
        """Renew a lease that has a time to live, and tell of its end and of a drain, until the end of the block."""
        if lease["expires"] is None and on_ending is None and on_draining is None:
            yield
            return
        from mpsd.client.watcher import Watcher

        loop, block = asyncio.get_running_loop(), [lease]

        def in_loop(function: Callable[..., object]) -> Callable[..., None]:
            """Return what calls a function with the lease, in the loop, unless the block has ended."""

            def call(*arguments: object) -> None:
                for each in block:
                    function(each, *arguments)

            def send(*arguments: object) -> None:
                with contextlib.suppress(RuntimeError):  # the loop was closed just now
                    loop.call_soon_threadsafe(call, *arguments)

            return send

        watcher = Watcher(
            Client(self.path, deadline=self.deadline, trusted=self.trusted),
            lease.copy(),
            ttl=ttl,
            heard=in_loop(lambda lease, answer: lease.update(answer)),
            on_ending=on_ending and in_loop(on_ending),
            on_draining=on_draining and in_loop(on_draining),
        )
        watcher.start()
        try:
            yield
        finally:
            watcher.stop()
            block.clear()

    async def _to_the_end(self, call: Callable[[Client], object]) -> MpsdError | None:
        """Call mpsd in a thread, which goes on whatever cancels this task; return the error.

        One cancellation is delayed until then.
        """
        done = asyncio.get_running_loop().run_in_executor(None, self._call, call)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            await asyncio.wait([done])
            raise

    def _call(self, call: Callable[[Client], object]) -> MpsdError | None:
        try:
            with Client(self.path, deadline=self.deadline, trusted=self.trusted) as client:
                waiting.through_a_restart(lambda: call(client))
        except MpsdError as error:
            return error
        return None
