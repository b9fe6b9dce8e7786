"""Three consumers share thirty streams; one is killed with kill -9, and the others take its streams over.

Each stream has one owner at a time, who reads its data; reading on notes how far it came. The next owner goes on
there, in a higher epoch: whatever the old one still has in hand is refused.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable

from conquiet import EmbeddedRedis, QueueConfig, RedisStreamsQueue, StreamBalancer, StreamLease

STREAMS = [f"session:{number}" for number in range(30)]
EVENTS = range(4)
LEASE = 1.0
"""Short, so that nobody has to wait here; the default of 15 seconds is a better one for real work."""


# --- what a consumer process does ----------------------------------------------------------------------------------


async def handle(stream: str, lease: StreamLease) -> None:
    """Read a stream to its end, and tell about it. To return is to finish the stream."""
    print("owns", stream, lease.epoch, flush=True)
    try:
        async for message in lease.messages():
            if message.payload["event"] == "end":
                return
            print("read", stream, message.payload["event"], flush=True)
    finally:
        print("left", stream, lease.epoch, flush=True)


async def consume(url: str, name: str) -> None:
    async with StreamBalancer.connect(url, service="ingest", consumer=name, lease_ttl=LEASE) as balancer:
        print("here", name, 0, flush=True)
        await balancer.run(handle)


# --- what the example does with three of them ----------------------------------------------------------------------


class Consumer:
    """A consumer process, and what it told so far."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_here = False
        self.owned: dict[str, int] = {}
        self.read: Counter[tuple[str, int]] = Counter()
        self.process: asyncio.subprocess.Process | None = None

    async def run(self, url: str) -> None:
        arguments = [sys.executable, __file__, url, self.name]
        self.process = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            what, stream, number = line.decode().split()
            if what == "here":
                self.is_here = True
            elif what == "owns":
                self.owned[stream] = int(number)
            elif what == "left":
                self.owned.pop(stream, None)
            else:
                self.read[stream, int(number)] += 1

    def end(self, how: str) -> None:
        assert self.process is not None
        getattr(self.process, how)()


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - it happens in other processes
        await asyncio.sleep(0.02)


async def write(url: str, *events: int | str) -> None:
    """Append events to each stream, as its producer would."""
    for stream in STREAMS:
        queue = RedisStreamsQueue(url, QueueConfig(stream, "unused", "producer"))
        await queue.enqueue_many([{"event": event} for event in events])
        await queue.aclose()


async def main() -> None:
    consumers = [Consumer("alice"), Consumer("bob"), Consumer("carol")]

    def owned() -> list[str]:
        return sorted(stream for one in consumers for stream in one.owned)

    async with EmbeddedRedis() as server, asyncio.TaskGroup() as processes:
        for one in consumers:
            processes.create_task(one.run(server.url))
        await until(lambda: all(one.is_here for one in consumers))
        balancer = StreamBalancer.connect(server.url, service="ingest")
        for stream in STREAMS:
            await balancer.add_stream(stream, info={"tenant": "a"})
        await balancer.aclose()
        await write(server.url, 0, 1)
        await until(lambda: owned() == sorted(STREAMS) and sum(len(one.read) for one in consumers) == 2 * len(STREAMS))
        print("shared:     ", {one.name: len(one.owned) for one in consumers})

        victim, *survivors = consumers
        victim.end("kill")
        lost, victim.owned = victim.owned, {}
        print(f"killed:      {victim.name}, who owned {len(lost)}")
        await until(lambda: owned() == sorted(STREAMS))
        taken = {one.name: len(one.owned.keys() & lost) for one in survivors}
        print("taken over: ", taken)
        epochs = {stream: epoch for one in survivors for stream, epoch in one.owned.items()}
        assert all(epochs[stream] > epoch for stream, epoch in lost.items())
        await until(lambda: owned() == sorted(STREAMS) and all(len(one.owned) == 15 for one in survivors))
        print("evened out: ", {one.name: len(one.owned) for one in survivors})

        await write(server.url, 2, 3, "end")
        # A stream that is on its way from one to the other has no owner either: all is done when all was read.
        await until(
            lambda: (
                not owned() and len({event for one in consumers for event in one.read}) == len(STREAMS) * len(EVENTS)
            )
        )
        for one in survivors:
            one.end("terminate")

    read = sum((one.read for one in consumers), Counter[tuple[str, int]]())
    missing = {(stream, event) for stream in STREAMS for event in EVENTS} - read.keys()
    again = sum(count > 1 for count in read.values())
    print(f"finished:    {len(STREAMS)} streams, {len(read)} events read, {again} of them again, {len(missing)} lost")


if __name__ == "__main__":
    asyncio.run(consume(*sys.argv[1:]) if len(sys.argv) == 3 else main())
