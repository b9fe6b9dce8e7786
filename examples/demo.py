"""Producers, two consumers, one of them killed with kill -9 on the way: what was sent is handled, all of it.

``nox -s demo`` runs this on a Redis that it starts by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections import Counter

from conquiet import EmbeddedRedis, QueueConfig, QueueConsumer, QueueMessage, RedisStreamsQueue

PRODUCERS = 3
IDLE_MS = 1_000
"""From when on a message counts as abandoned here: far longer than its handling takes."""


def config_of(name: str) -> QueueConfig:
    return QueueConfig(stream_key="orders", consumer_group="shop", consumer_name=name, block_ms=200)


# --- what a consumer process does ------------------------------------------------------------------------


async def consume(url: str, name: str) -> None:
    """Handle new messages; when there are none, take over what a dead colleague left. Reports on stdout."""
    async with (
        RedisStreamsQueue.connect(url, config_of(name)) as queue,
        QueueConsumer(queue) as consumer,
    ):
        while not consumer.stopping:
            message = await consumer.next()
            if message is not None:
                await handle(queue, message, "handled")
                continue
            for stale in await queue.claim_stale(min_idle_ms=IDLE_MS, count=100):
                await handle(queue, stale, "recovered")


async def handle(queue: RedisStreamsQueue, message: QueueMessage, how: str) -> None:
    await asyncio.sleep(0.001)  # the work
    print(how, message.payload["order"], flush=True)
    await queue.ack(message)


# --- what the demo does with them ------------------------------------------------------------------------


class Consumer:
    """A consumer process, and what it told so far."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.told: list[tuple[str, int]] = []
        self.process: asyncio.subprocess.Process | None = None
        self.listening: asyncio.Task[None] | None = None

    async def start(self, url: str) -> None:
        arguments = [sys.executable, __file__, "--consume", self.name, "--url", url]
        self.process = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
        self.listening = asyncio.get_running_loop().create_task(self._listen(self.process))

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            how, _, order = line.decode().rstrip("\n").partition(" ")
            if order.isdigit():
                self.told.append((how, int(order)))

    async def end(self, number: signal.Signals) -> None:
        assert self.process is not None
        assert self.listening is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        await self.process.wait()
        await self.listening


async def kill_in_the_act(consumer: Consumer, url: str) -> int:
    """Kill ``consumer`` while it holds messages; how many."""
    assert consumer.process is not None
    async with RedisStreamsQueue.connect(url, config_of("observer")) as queue:
        while True:
            consumer.process.send_signal(signal.SIGSTOP)
            held = (await queue.backlog_stats()).pending_by_consumer.get(consumer.name, 0)
            if held:
                await consumer.end(signal.SIGKILL)
                return held
            consumer.process.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.003)


async def produce(url: str, producer: int, orders: range) -> None:
    async with RedisStreamsQueue.connect(url, config_of(f"producer-{producer}")) as queue:
        for start in range(0, len(orders), 50):
            await queue.enqueue_many([{"order": order} for order in orders[start : start + 50]])
            await asyncio.sleep(0.01)


async def until(condition: str, consumers: list[Consumer], count: int, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while len({order for consumer in consumers for _, order in consumer.told}) < count:
        if time.monotonic() > deadline:
            raise SystemExit(f"gave up waiting until {condition}")
        await asyncio.sleep(0.02)


async def pending_at_the_end(url: str, seconds: float = 30) -> int:
    """How many messages stay unacknowledged.

    The killed consumer may have told of a message that it had not acknowledged yet: the other one recovers it.
    """
    deadline = time.monotonic() + seconds
    async with RedisStreamsQueue.connect(url, config_of("observer")) as queue:
        while True:
            pending = (await queue.backlog_stats()).pending
            if not pending or time.monotonic() > deadline:
                return pending
            await asyncio.sleep(0.02)


async def main(messages: int) -> int:
    async with EmbeddedRedis() as server:
        print(f"{server.software} started at {server.url}")
        consumers = [Consumer("consumer-1"), Consumer("consumer-2")]
        for consumer in consumers:
            await consumer.start(server.url)
        print(f"{PRODUCERS} producers send {messages} messages, 2 consumers handle them")
        producing = asyncio.gather(
            *(produce(server.url, number, range(number, messages, PRODUCERS)) for number in range(PRODUCERS))
        )
        await until("a third is handled", consumers, messages // 3)
        held = await kill_in_the_act(consumers[0], server.url)
        print(f"killed {consumers[0].name} with kill -9, {held} message in its hands")
        await producing
        await until("all is handled", consumers, messages)
        pending = await pending_at_the_end(server.url)
        await consumers[1].end(signal.SIGTERM)
    return report(messages, consumers, pending)


def report(messages: int, consumers: list[Consumer], pending: int) -> int:
    counts = Counter(order for consumer in consumers for _, order in consumer.told)
    recovered = sum(how == "recovered" for consumer in consumers for how, _ in consumer.told)
    lost = messages - len(counts)
    rows = {
        "sent": messages,
        "handled": len(counts),
        "recovered": recovered,
        "handled twice": sum(count > 1 for count in counts.values()),
        "still pending": pending,
        "lost": lost,
    }
    print()
    for name, value in rows.items():
        print(f"  {name:<14}{value:>8}")
    return 1 if lost or pending else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=3_000)
    parser.add_argument("--consume", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.consume:
        asyncio.run(consume(arguments.url, arguments.consume))
    else:
        sys.exit(asyncio.run(main(arguments.messages)))
