"""`python -m bench.empty SOCKET [--echo|--commit]`: servers that only answer, as a reference for one that works.

The HTTP one is aiohttp, with handlers that read the body and answer with the text on stdin. With --commit they also
store a lease, and its end, in mpsd's own store: durability before the answer costs that much by itself.
"""

import asyncio
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from aiohttp import web
from msgspec import structs

from mpsd.core.model import HoldingProcess, Lease, LeaseRequest, LeaseState, Owner, ProcessIdentity, Share
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.daemon.leases.lease_store import LEASES_BALLAST, LEASES_SCHEMA, LeaseEvent, LeaseStore
from mpsd.daemon.record.log import EventName
from mpsd.system import clock
from mpsd.system.database import Database

_TOLD_AFTER: Final = 50
"""Commits after which published events leave the store, since they are in the history: about so with one caller."""


def committing(path: Path) -> Callable[[LeaseState], None]:
    """Return a function that stores a lease, or its end, with its event, as mpsd does for one caller."""
    keeping = LeaseStore(Database(path, LEASES_SCHEMA, ballast=LEASES_BALLAST))
    threads, memory = ActiveThreadPercentage.parse(1), PinnedDeviceMemLimit.parse("16MiB")
    gpu = "GPU-00000000-0000-4000-8000-000000000000"
    variables = {
        "CUDA_MPS_PIPE_DIRECTORY": "/run/mpsd/mps/gpu0",
        "CUDA_VISIBLE_DEVICES": gpu,
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "1.0",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=16M",
    }
    lease = Lease(
        id="lease-0123456789",
        state=LeaseState.GRANTED,
        because="it fits",
        owner=Owner(0, 0, 1, clock.now()),
        holders=(HoldingProcess(ProcessIdentity(1, 1)),),
        request=LeaseRequest(threads=threads, memory=memory),
        arrival=1,
        created=clock.now(),
        shares=(Share(gpu, "gpu0", threads, memory, variables),),
        granted=clock.now(),
    )
    facts: dict[str, object] = {"uid": 0, "pid": 1, "gpus": [gpu], "processes": 1, "because": "it fits"}

    held: list[str] = []
    numbers = itertools.count()

    def commit(state: LeaseState) -> None:
        if state is LeaseState.ENDED:
            happened, name = EventName.LEASE_ENDED, held.pop()
        else:
            happened, name = EventName.LEASE_GRANTED, f"lease-{next(numbers):010x}"
            held.append(name)
        if keeping.batch % _TOLD_AFTER == 0:
            keeping.note_published(keeping.batch)
        kept = keeping.keep({name: structs.replace(lease, id=name, state=state)}, [LeaseEvent(name, happened, facts)])
        assert not kept.because, kept.because

    return commit


async def serve_http(path: Path, reply: bytes, commit: Callable[[LeaseState], None]) -> None:
    """Answer every request for a lease with this reply, and every release with an empty answer."""

    async def grant(request: web.Request) -> web.Response:
        await request.read()
        commit(LeaseState.GRANTED)
        return web.Response(status=201, body=reply, content_type="application/json")

    async def release(_: web.Request) -> web.Response:
        commit(LeaseState.ENDED)
        return web.Response(status=204)

    application = web.Application(client_max_size=64 * 1024)
    application.router.add_post("/v1/leases", grant)
    application.router.add_delete("/v1/leases/{id}", release)
    runner = web.AppRunner(
        application, access_log=None, handler_cancellation=True, shutdown_timeout=1.0, keepalive_timeout=75.0
    )
    await runner.setup()
    await web.UnixSite(runner, path).start()
    await asyncio.Event().wait()


class Echo(asyncio.Protocol):
    """Sends the received bytes back."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Send the received bytes back."""
        self._transport.write(data)


async def serve_echo(path: Path) -> None:
    """Send all received bytes back."""
    await asyncio.get_running_loop().create_unix_server(Echo, path)
    await asyncio.Event().wait()


if __name__ == "__main__":
    socket_path = Path(sys.argv[1])
    if "--echo" in sys.argv:
        asyncio.run(serve_echo(socket_path))
    else:
        stores = committing(socket_path.with_suffix(".db")) if "--commit" in sys.argv else lambda _: None
        asyncio.run(serve_http(socket_path, sys.stdin.buffer.read(), stores))
