"""AsyncClient against a running mpsd: its routes, and leases that no cancellation leaves behind or takes twice."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
from textwrap import dedent
from typing import Any, Final

import pytest

import mpsd.client.async_client
from mpsd import AsyncClient
from mpsd.client.connection import MOST_IDLE
from mpsd.core.errors import DoesNotFitError, NotFoundError
from tests.cli.conftest import ROOT
from tests.daemon.conftest import Start
from tests.harness import eventually, wait_until
from tests.node import Node

SMALL: Final[dict[str, Any]] = {"threads": 1, "memory": "1MiB"}


def test_example(node: Node) -> None:
    """The example in the module's own description works as it stands."""
    assert mpsd.client.async_client.__doc__ is not None
    example = "\n".join(line for line in mpsd.client.async_client.__doc__.splitlines() if line.startswith("    "))
    done = subprocess.run(
        [sys.executable, "-c", dedent(example)], capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "MPSD_SOCKET": str(node.socket)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert node.get("/v1/leases?ended=true").json["leases"][-1]["because"].endswith("released it")


def test_many_tasks(node: Node) -> None:
    """Tasks that share a client each get their own answers, and few sockets stay open after that."""

    async def ask(client: AsyncClient, lease: str) -> set[str]:
        return {(await client.lease(lease))["id"] for _ in range(20)}

    async def asking() -> None:
        async with AsyncClient(str(node.socket)) as client:
            leases = [(await client.admit(SMALL))["id"] for _ in range(12)]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(ask(client, lease)) for lease in leases]
            assert [task.result() for task in tasks] == [{lease} for lease in leases]
            assert 1 <= len(client._idle) <= MOST_IDLE

    asyncio.run(asking())


def test_routes(node: Node) -> None:
    """A lease is taken, seen, renewed, verified and released, and its events can be read."""

    async def walk() -> None:
        async with AsyncClient(str(node.socket)) as client:
            lease = await client.admit({**SMALL, "ttl": 600})
            assert [each["id"] for each in (await client.leases())["leases"]] == [lease["id"]]
            assert (await client.renew(lease["id"], 1200))["id"] == lease["id"]
            assert (await client.verify(lease["id"]))["violations"] == []
            await client.release(lease["id"])
            assert (await client.lease(lease["id"]))["state"] == "ended"
            events = [event["event"] async for _, event in client.events(0, follow=False)]
            assert events.count("lease_granted") >= 1
            assert (await client.principal())["uid"] == os.getuid()
            assert (await client.readiness())["ok"]
            assert b"mpsd_" in await client.metrics(users=True)
            with pytest.raises(DoesNotFitError):
                async with client.leased(threads=100, memory="1MiB"), client.leased(gpus=2, threads=100, memory="1MiB"):
                    pass
            assert (await client.leases())["leases"] == []

    asyncio.run(walk())


def test_a_block_that_is_cancelled(node: Node) -> None:
    """When a task that was cancelled within its block, once or twice, has ended, its lease ends, or has ended."""

    async def hold(client: AsyncClient, inside: asyncio.Event) -> None:
        async with client.leased(**SMALL):
            inside.set()
            await asyncio.Event().wait()

    async def cancelling(times: int) -> None:
        async with AsyncClient(str(node.socket)) as client:
            inside = asyncio.Event()
            task = asyncio.create_task(hold(client, inside))
            await inside.wait()
            for _ in range(times):
                task.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await task
            if times <= 2:
                assert (await client.leases())["leases"] == []

    for times in (1, 2, 3):
        asyncio.run(cancelling(times))
        assert node.leases() == []


def test_a_lease_that_mpsd_has_forgotten(make_node: Start) -> None:
    """A block ends without an error where its lease has ended already, and an mpsd started since does not know it."""
    node = make_node(simulate=1).start()

    async def block() -> None:
        async with AsyncClient(str(node.socket)) as client, client.leased(**SMALL) as lease:
            await client.release(lease["id"])
            node.end(signal.SIGTERM)
            node.start()
            with pytest.raises(NotFoundError):
                await client.lease(lease["id"])

    asyncio.run(block())


def test_a_time_to_live(node: Node) -> None:
    """A lease is renewed while its block runs, even where a task blocks the loop, and no longer."""

    async def block() -> str:
        async with AsyncClient(str(node.socket)) as client, client.leased(ttl="6s", **SMALL) as lease:
            first, name = lease["expires"], lease["id"]
            wait_until(lambda: node.events("lease_renewed", lease=name), what="a renewal")
            await eventually(lambda: lease["expires"] != first, what="the answer to be the last one")
            return name

    name = asyncio.run(block())
    assert node.get(f"/v1/leases/{name}").json["because"].endswith("released it")
    wait_until(lambda: f"mpsd-{name}" not in {each.name for each in threading.enumerate()}, what="its thread to end")


@pytest.mark.thorough
def test_renewed_by_the_next_mpsd(make_node: Start) -> None:
    node = make_node(simulate=1).start()

    async def block() -> None:
        async with AsyncClient(str(node.socket)) as client, client.leased(ttl=30, **SMALL) as lease:
            node.end(signal.SIGKILL)
            node.start()
            await eventually(lambda: node.events("lease_renewed", lease=lease["id"]), what="a renewal", deadline=30)
            assert (await client.lease(lease["id"]))["state"] == lease["state"] == "granted"

    asyncio.run(block())
    assert node.leases() == []


def test_a_lease_that_is_lost(make_node: Start) -> None:
    """The block sees that its lease has ended, or hears of it and of a drain; what it hears may end its task."""
    node = make_node(simulate=2).start()
    heard = list[tuple[str, object]]()

    async def told(client: AsyncClient) -> None:
        task = asyncio.current_task()
        assert task is not None

        def ending(lease: Any, seconds: float) -> None:
            heard.append((lease["state"], seconds))
            assert task is not None
            task.cancel()

        def draining(lease: Any) -> None:
            heard.append((lease["state"], "draining"))

        async with client.leased(on_ending=ending, on_draining=draining, gpu=0, **SMALL) as lease:
            await client.operate(lease["shares"][0]["daemon"], "drain")
            await eventually(lambda: heard, what="the drain to be heard of")
            await client.release(lease["id"])
            await asyncio.Event().wait()

    async def blocks() -> None:
        async with AsyncClient(str(node.socket)) as client:
            async with client.leased(ttl=1.5, gpu=1, **SMALL) as lease:
                await client.release(lease["id"])
                await eventually(lambda: lease["state"] == "ended", what="the end to be seen")
            with pytest.raises(asyncio.CancelledError):
                await asyncio.create_task(told(client))

    asyncio.run(blocks())
    assert heard == [("granted", "draining"), ("ended", 0.0)]


def test_a_wait_that_is_cancelled(node: Node) -> None:
    """A task that is cancelled while it waits gives up its place before it has ended."""

    async def wait(client: AsyncClient) -> None:
        async with client.leased(wait=600, **SMALL):
            raise AssertionError

    async def waiting() -> None:
        async with AsyncClient(str(node.socket)) as client:
            for gpu in (await client.gpus())["gpus"]:
                await client.admit({**SMALL, "threads": 100, "gpu": gpu["uuid"]})
            full = {each["id"] for each in (await client.leases())["leases"]}
            task = asyncio.create_task(wait(client))
            await eventually(lambda: len(node.leases()) > len(full), what="the request to wait")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert {each["id"] for each in (await client.leases())["leases"]} == full

    asyncio.run(waiting())


@pytest.mark.parametrize("seed", range(3))
def test_cancellations_anywhere(node: Node, seed: int) -> None:
    """Wherever a task is when it is cancelled, once or twice, it leaves no lease."""
    chance = random.Random(seed)

    async def hold(client: AsyncClient) -> None:
        async with client.leased(wait=60, **SMALL):
            await asyncio.sleep(0)

    async def cancelling() -> None:
        loop = asyncio.get_running_loop()
        async with AsyncClient(str(node.socket)) as client:
            tasks = [asyncio.create_task(hold(client)) for _ in range(40)]
            for task in tasks:
                for _ in range(chance.randrange(1, 3)):
                    loop.call_later(chance.uniform(0, 0.2), task.cancel)
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(each) for each in outcomes} <= {asyncio.CancelledError, type(None)}

    asyncio.run(cancelling())
    assert node.leases() == []
