"""`python -m bench.empty SOCKET`: a server that only answers, as a reference for one that works.

It is aiohttp, with handlers that read the body; a request for a lease is answered with the text on stdin.
"""

import asyncio
import sys

from aiohttp import web


async def serve(path: str, reply: bytes) -> None:
    """Answer every request for a lease with this reply, and every release with an empty answer."""

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


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.stdin.buffer.read()))
