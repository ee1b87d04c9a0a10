"""Callers that keep receipts of mpsd's answers until it dies under them, and the check that a new mpsd honours them."""

import asyncio
import json
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.durability.forked import ForkedNode
from tests.node import Answer, as_listed

_ENDS: Final = 5
"""Seconds within which the leases of dead holders end."""

_DEADLINE: Final = 20
"""Seconds for one life of mpsd with its callers; a life takes a few tenths."""

DEAD: Final = (OSError, asyncio.IncompleteReadError, EOFError)
"""The errors of a caller when mpsd dies."""

GIB: Final = 1024**3


class Holders:
    """Idle processes as holders of leases."""

    def __init__(self, count: int) -> None:
        self._processes = [self._start() for _ in range(count)]

    @staticmethod
    def _start() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    @property
    def pids(self) -> list[int]:
        """The pids of the processes that live."""
        return [each.pid for each in self._processes]

    def replace(self, pid: int) -> None:
        """Kill one by SIGKILL, and start another in its place."""
        place = self.pids.index(pid)
        self._end(self._processes[place])
        self._processes[place] = self._start()

    @staticmethod
    def _end(process: "subprocess.Popen[bytes]") -> None:
        process.kill()
        process.communicate()

    def close(self) -> None:
        for each in self._processes:
            self._end(each)


async def ask(socket: Path, method: str, path: str, body: object = None) -> Answer:
    """Send one request, and return its answer. Raises one of `DEAD` when mpsd dies before the answer."""
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        raw = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: mpsd\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)
        answer = await reader.read()
    finally:
        writer.close()
    head_, end, content = answer.partition(b"\r\n\r\n")
    lines = head_.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:])
    if not end or len(content) < int(headers.get("Content-Length", 0)):
        raise EOFError
    return Answer(int(lines[0].split()[1]), headers, content)


@dataclass
class Receipts:
    """mpsd's answers to its callers in all its lives, and their requests."""

    granted: dict[str, Any] = field(default_factory=dict)
    """By id, the leases that a caller knows, as they were granted."""
    releasing: set[str] = field(default_factory=set)
    """Leases that a caller has requested to end."""
    released: set[str] = field(default_factory=set)
    """The leases in `releasing` that mpsd reported as ended or unknown."""
    confirmed: set[str] = field(default_factory=set)
    """The leases in `releasing` that mpsd reported as ended."""
    unheard: Counter[str] = field(default_factory=Counter)
    """Requests that mpsd did not answer before it died, by kind."""
    waiting: list[str] = field(default_factory=list)
    """Places in the queue that a caller can return to, in mpsd's last order."""
    held: dict[str, set[int]] = field(default_factory=dict)
    """By claimed lease, the pids of which any may hold it, as far as is known; 0 means that it has no holder yet."""
    events: dict[int, str] = field(default_factory=dict)
    """Every event that was received, by number."""
    lives: int = 0

    @property
    def heard(self) -> int:
        """The number of the latest event received."""
        return max(self.events, default=0)

    def note_event(self, line: str) -> None:
        """Record a received event: the next one, or an exact repetition of an earlier one."""
        seq = json.loads(line)["seq"]
        assert self.events.setdefault(seq, line) == line, f"number {seq} was given twice"
        assert seq == 1 or seq - 1 in self.events, f"there is no event before {seq}"

    @property
    def owed(self) -> set[str]:
        """Leases that must exist as long as their holders live."""
        return self.granted.keys() - self.releasing

    def summary(self) -> str:
        """Return the figures of the run."""
        cut = ", ".join(f"{count} of {what}" for what, count in self.unheard.most_common())
        claims = f"{len(self.held)} of them claims"
        return (
            f"{self.lives} lives, {len(self.granted)} grants, {claims}, {len(self.released)} releases,"
            f" {len(self.events)} events; requests without an answer: {cut or 'none'}"
        )


class Load:
    """The callers of one node, whose mpsd is killed and started again many times."""

    def __init__(self, node: ForkedNode, seed: int) -> None:
        self.node = node
        self.receipts = Receipts()
        self.holders = Holders(4)
        self.random = random.Random(seed)
        self._gone: set[int] = set()
        """Holders that were killed."""
        self._comes_back: dict[str, str] = {}
        """By request_id, the lease that a caller must get when it returns."""
        self._numbers = 0
        self._sent = 0
        self._kill_after = 0

    # -- a life -------------------------------------------------------------------------------------------------------

    async def live(self, *, kill_after: int = 0) -> None:
        """Call mpsd until it dies: by itself, or by SIGKILL just after this many requests were sent."""
        self.receipts.lives += 1
        self._sent, self._kill_after = 0, kill_after
        async with asyncio.timeout(_DEADLINE), asyncio.TaskGroup() as group:
            for act in (*[self._take_and_release] * 3, *[self._claim] * 3):
                group.create_task(self._until_death(act))
            for number in range(2):
                group.create_task(self._until_death(partial(self._wait_in_line, f"place-{number}")))
            group.create_task(self._until_death(self._wait_without_return))
            group.create_task(self._until_death(self._look))
            group.create_task(self._follow())

    async def _until_death(self, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await act()
            except DEAD:
                return

    async def _ask(self, method: str, path: str, body: object = None) -> Answer:
        asked = asyncio.ensure_future(ask(self.node.socket, method, path, body))
        self._sent += 1
        if self._sent == self._kill_after:
            # mpsd may be before this request, in it, or behind it.
            for _ in range(self.random.choice((0, 1, 2, 3, 5, 8))):
                await asyncio.sleep(0)
            assert self.node.process is not None
            self.node.process.kill()
        try:
            return await asked
        except DEAD:
            self.receipts.unheard[f"{method} {path.split('/')[2]}"] += 1
            raise

    # -- what callers do ----------------------------------------------------------------------------------------------

    async def _take_and_release(self) -> None:
        mine = sorted(self.receipts.owed)
        if mine and self.random.random() < len(mine) / 12:
            await self._release(self.random.choice(mine))
            return
        body: dict[str, Any] = {
            "threads": self.random.randint(1, 25),
            "memory": f"{self.random.randint(1, 20)}GiB",
            "pid": self.random.choice(self.holders.pids),
        }
        if self.random.random() < 0.5:
            self._numbers += 1
            body["request_id"] = f"once-{self._numbers}"
        if self.random.random() < 0.3:
            body["ttl"] = 1000
        await self._take(body)

    async def _take(self, body: dict[str, Any]) -> None:
        answer = await self._ask("POST", "/v1/leases", body)
        assert answer.status in {201, 409, 422}, answer.json  # 422: its holder was killed
        if answer.status == 201:
            self.receipts.granted[answer.json["id"]] = answer.json
            if "ttl" in body and self.random.random() < 0.5:
                await self._renew(answer.json["id"])

    async def _claim(self) -> None:
        """Claim a lease, have it taken once, and hand it over: the holder in the answer holds it from then on."""
        claim = {"claim": {"deadline": 100_000}}
        answer = await self._ask("POST", "/v1/leases", {"threads": 1, "memory": "1GiB", "holder": claim})
        assert answer.status in {201, 409}, answer.json
        if answer.status == 409:
            return
        lease, token = answer.json["id"], answer.json["env"]["MPSD_LEASE_TOKEN"]
        self.receipts.granted[lease], self.receipts.held[lease] = answer.json, {0}
        if self.random.random() < 0.2:
            return
        first, second, third = self.random.sample(self.holders.pids, 3)
        await self._hold(lease, first, token=token)
        if lease not in self.receipts.releasing and self.receipts.held[lease] == {first}:
            path = f"/v1/leases/{lease}/holders"
            taken = await self._ask("POST", path, {"pid": second, "token": token})
            assert taken.status in {404, 409, 422}, "it was taken twice"
        if self.random.random() < 0.5:
            await self._hold(lease, third, replace=True)
        if self.random.random() < 0.7:
            await self._release(lease)

    async def _hold(self, lease: str, pid: int, **how: Any) -> None:
        before = self.receipts.held[lease]
        self.receipts.held[lease] = before | {pid}
        answer = await self._ask("POST", f"/v1/leases/{lease}/holders", {"pid": pid, **how})
        assert answer.status in {200, 404, 422}, answer.json  # the lease was released, or its holder was killed
        self.receipts.held[lease] = {pid} if answer.status == 200 else before

    async def _renew(self, lease: str) -> None:
        answer = await self._ask("POST", f"/v1/leases/{lease}/renew", {"ttl": 500_000})
        if answer.status == 200:
            self.receipts.granted[lease]["expires"] = answer.json["expires"]

    async def _release(self, lease: str) -> None:
        self.receipts.releasing.add(lease)
        answer = await self._ask("DELETE", f"/v1/leases/{lease}")
        assert answer.status in {204, 404}, answer.json  # 404: an earlier life ended it, and its answer was lost
        self.receipts.released.add(lease)
        if answer.status == 204:
            self.receipts.confirmed.add(lease)

    async def _wait_in_line(self, request_id: str) -> None:
        body = {
            "threads": 60,
            "memory": "8GiB",
            "wait": None,
            "request_id": request_id,
            "name": request_id,
            "pid": self.holders.pids[0],
        }
        answer = await self._ask("POST", "/v1/leases", body)
        assert answer.status == 201, answer.json
        lease = answer.json["id"]
        assert self._comes_back.pop(request_id, lease) == lease, f"{request_id} came back, and its place was gone"
        self.receipts.granted[lease] = answer.json
        await self._release(lease)

    async def _wait_without_return(self) -> None:
        body = {"threads": 90, "memory": "1GiB", "wait": 0.05, "name": "passer-by"}
        answer = await self._ask("POST", "/v1/leases", body)
        if answer.status == 201:
            self.receipts.granted[answer.json["id"]] = answer.json
            await self._release(answer.json["id"])

    async def _look(self) -> None:
        leases = (await self._ask("GET", "/v1/leases")).json["leases"]
        check_room(leases)
        self.receipts.waiting = _in_line(leases)

    async def _follow(self) -> None:
        try:
            reader, writer = await asyncio.open_unix_connection(self.node.socket)
            try:
                head = f"GET /v1/events?follow=true&after={self.receipts.heard} HTTP/1.1\r\nHost: mpsd\r\n\r\n"
                writer.write(head.encode())
                await reader.readuntil(b"\r\n\r\n")
                while line := await reader.readline():
                    if line.startswith(b"{") and line.endswith(b"\n"):  # and not the size of a chunk
                        self.receipts.note_event(line.decode())
            finally:
                writer.close()
        except DEAD:
            return

    def kill_a_holder(self) -> None:
        """Kill a holder, while mpsd lives or while it is down; but not the one in the queue."""
        pid = self.random.choice(self.holders.pids[1:])
        self._gone.add(pid)
        self.holders.replace(pid)

    # -- the proof ----------------------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Check a new life of mpsd against every receipt. Raises one of `DEAD` when it dies meanwhile."""
        receipts = self.receipts
        leases = await self._without_dead_holders()
        self._check_leases(leases)
        check_room(leases)
        here = {lease["id"]: lease for lease in leases}
        for lease in receipts.waiting:
            # A place may have become a grant whose answer was lost; a caller that returns gets it.
            assert lease in here or lease in receipts.granted, f"the place {lease} is lost"
        passers_by = [lease for lease in leases if lease["name"] == "passer-by" and lease["state"] == "waiting"]
        assert not passers_by, f"nobody can come back to {passers_by}"
        self._comes_back = {
            lease["name"]: lease["id"]
            for lease in leases
            if lease["name"].startswith("place-") and lease["id"] not in receipts.releasing
        }
        places = _in_line(leases)
        assert places == [lease for lease in receipts.waiting if lease in places] + [
            lease for lease in places if lease not in receipts.waiting
        ], "the queue has another order"
        await self._check_events()
        await self._clear_up(here)

    async def _without_dead_holders(self) -> list[dict[str, Any]]:
        """Return the leases once those have ended whose holders died, which takes a moment after a start."""
        receipts = self.receipts
        ends = time.monotonic() + _ENDS
        while True:
            leases: list[dict[str, Any]] = (await ask(self.node.socket, "GET", "/v1/leases")).json["leases"]
            owed = [each for each in leases if each["id"] in receipts.owed - receipts.held.keys()]
            if time.monotonic() > ends or not any(each["owner"]["pid"] in self._gone for each in owed):
                return leases

    def _check_leases(self, leases: Iterable[dict[str, Any]]) -> None:
        receipts = self.receipts
        counted = Counter(lease["id"] for lease in leases)
        assert set(counted.values()) <= {1}, f"there twice: {counted}"
        here = {lease["id"]: lease for lease in leases}
        for lease, pids in receipts.held.items():
            if lease in receipts.owed and pids.isdisjoint(self._gone):
                assert lease in here, f"{lease} was claimed, not released, and is lost"
                (holder,) = here[lease]["holders"]
                assert holder.get("pid", 0) in pids, f"{lease} is held by {holder}, and was to be by one of {pids}"
        for lease in receipts.owed - receipts.held.keys():
            published = as_listed(receipts.granted[lease])
            if published["owner"]["pid"] in self._gone:
                assert lease not in here, f"{lease} outlived its holder"
                continue
            assert lease in here, f"{lease} was granted, not released, and is lost"
            same = ("id", "shares", "env", "gpus", "owner", "granted", "created", "active_thread_percentage")
            assert {key: here[lease][key] for key in same} == {key: published[key] for key in same}
            if published["expires"] is not None:
                # The date shows whether it was renewed, independent of the clock's precision.
                assert here[lease]["expires"][:10] >= published["expires"][:10], f"{lease} forgot that it was renewed"
        back = receipts.released & here.keys()
        assert not back, f"released, and there again: {back}"
        strange = [lease for lease in here if lease not in receipts.granted and here[lease]["state"] == "granted"]
        cut_off = receipts.unheard["POST leases"]
        assert len(strange) <= cut_off, f"{strange} were granted to nobody; {cut_off} requests had no answer"

    async def _check_events(self) -> None:
        receipts = self.receipts
        answer = await ask(self.node.socket, "GET", f"/v1/events?after={receipts.heard}")
        assert answer.status == 200, answer.json
        for line in answer.body.decode().splitlines(keepends=True):
            if line.startswith("{"):  # and not the size of a chunk
                receipts.note_event(line)
        # An answer without a length looks complete even if mpsd died in the middle; it is complete only if mpsd lives.
        await ask(self.node.socket, "GET", "/healthz")
        said = {(event["event"], event.get("lease")) for event in map(json.loads, receipts.events.values())}
        for lease in receipts.granted:
            assert ("lease_granted", lease) in said, f"{lease} was granted, and no event says so"
        for lease in receipts.confirmed:
            assert ("lease_ended", lease) in said, f"{lease} was released, and no event says so"

    async def _clear_up(self, here: dict[str, Any]) -> None:
        """Release leases without a known holder, and leases that must end, so that the node does not fill up."""
        for lease in self.receipts.releasing - self.receipts.released:
            await self._release(lease)
        for lease in here.keys() - self.receipts.granted.keys():
            if here[lease]["name"] not in self._comes_back:
                await self._release(lease)


def _in_line(leases: Iterable[dict[str, Any]]) -> list[str]:
    """Return the places that a caller can return to, in order."""
    waiting = [lease for lease in leases if lease["state"] == "waiting" and lease["name"].startswith("place-")]
    return [lease["id"] for lease in sorted(waiting, key=lambda lease: lease["wait"]["position"])]


def check_room(leases: Iterable[dict[str, Any]]) -> None:
    """Check that no GPU has more granted than it has: all of the threads, and 80 GiB less the reserve."""
    threads: Counter[str] = Counter()
    memory: Counter[str] = Counter()
    for lease in leases:
        for share in lease["shares"]:
            threads[share["gpu"]] += round(share["active_thread_percentage"] * 10)
            memory[share["gpu"]] += share["pinned_device_mem_limit"]
    assert all(each <= 1000 for each in threads.values()), threads
    assert all(each <= 80 * GIB - GIB // 2 for each in memory.values()), memory
