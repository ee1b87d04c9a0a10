"""`python -m tests.client.opener KIND SOCKET COUNT SEED`: opens and closes so many leases with one kind of client.

It prints the id of each lease that it has closed, and `cancelled` for each task that was cancelled instead, of which
it starts as many more. It fails if mpsd has a lease of it at the end.
"""

import asyncio
import contextlib
import os
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import mpsd
from mpsd.client import waiting
from mpsd.client.request import Request
from mpsd.core.errors import NotFoundError
from tests.harness import wait_until

AT_ONCE: Final = {"one": 1, "threads": 4, "tasks": 4, "blocks": 1}
"""The kinds of client, and how many leases one process has or requests at a time."""

CANCELLED: Final = "cancelled"

SHARE: Final[Request] = {"threads": 40, "memory": "64MiB", "wait": 60}


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def one(socket: str, count: int, __: random.Random) -> None:
    """Open one lease after another."""
    with mpsd.Client(socket) as api:
        for _ in range(count):
            hold(api)


def threads(socket: str, count: int, _: random.Random) -> None:
    """Do so in threads that share a client."""
    with mpsd.Client(socket) as api, ThreadPoolExecutor(AT_ONCE["threads"]) as pool:
        for done in [pool.submit(hold, api) for _ in range(count)]:
            done.result()


def hold(api: mpsd.Client) -> None:
    lease = waiting.take(api, SHARE, wait=60)
    with contextlib.suppress(NotFoundError):  # the first request released it, and mpsd ended before it answered
        waiting.through_a_restart(partial(api.release, lease["id"]))
    say(lease["id"])


def tasks(socket: str, count: int, chance: random.Random) -> None:
    """Do so in tasks that share a client, some of which are cancelled."""
    asyncio.run(_tasks(socket, count, chance))


async def _tasks(socket: str, count: int, chance: random.Random) -> None:
    left = count
    async with mpsd.AsyncClient(socket) as api, asyncio.TaskGroup() as group:

        async def block() -> str:
            async with api.leased(**SHARE) as lease:
                await asyncio.sleep(0)
            return lease["id"]

        async def slot() -> None:
            nonlocal left
            while left:
                left -= 1
                task = group.create_task(block())
                for _ in range(chance.choice([0, 0, 1, 2])):
                    asyncio.get_running_loop().call_later(chance.expovariate(20), task.cancel)
                try:
                    say(await task)
                except asyncio.CancelledError:
                    left += 1
                    say(CANCELLED)

        for _ in range(AT_ONCE["tasks"]):
            group.create_task(slot())


def blocks(socket: str, count: int, __: random.Random) -> None:
    """Open one `mpsd.lease` after another."""
    with mpsd.Client(socket) as api:
        for _ in range(count):
            with mpsd.lease(client=api, **SHARE) as lease:
                name = lease.id
            say(name or "")


KINDS: Final[dict[str, Callable[[str, int, random.Random], None]]] = {
    "one": one,
    "threads": threads,
    "tasks": tasks,
    "blocks": blocks,
}


def main(kind: str, socket: str, count: str, seed: str) -> None:
    KINDS[kind](socket, int(count), random.Random(seed))
    with mpsd.Client(socket) as api:

        def has_none() -> bool:
            return all(each["owner"]["pid"] != os.getpid() for each in api.leases()["leases"])

        wait_until(has_none, what="its leases to end before it does", not_yet=(mpsd.MpsdError,))


if __name__ == "__main__":
    main(*sys.argv[1:])
