"""`python -m bench.empty SOCKET [--echo]`: servers that do nothing but answer, the measure of one that does something.

The HTTP one is aiohttp as mpsd runs it, with handlers that read the body and answer what stands on stdin.
"""

import asyncio
import sys
from pathlib import Path

from aiohttp import web


async def serve_http(path: Path, reply: bytes) -> None:
    """Answer every request for a lease with this reply, and every release with nothing."""

    async def grant(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(status=201, body=reply, content_type="application/json")

    async def release(_: web.Request) -> web.Response:
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
    """Sends back what it gets."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the other end."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Send it back."""
        self._transport.write(data)


async def serve_echo(path: Path) -> None:
    """Send everything back."""
    await asyncio.get_running_loop().create_unix_server(Echo, path)
    await asyncio.Event().wait()


if __name__ == "__main__":
    socket_path = Path(sys.argv[1])
    asyncio.run(serve_echo(socket_path) if "--echo" in sys.argv else serve_http(socket_path, sys.stdin.buffer.read()))
