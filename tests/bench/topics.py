"""Topics against the same work written by hand on redis.asyncio, in the same run."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import hiredis
import orjson
from redis.asyncio import Redis
from redis.asyncio.connection import Connection

from conquiet import Broker, EmbeddedRedis, Message, Outgoing, SubscribeOptions
from tests.bench.clock import Work, measure, pin
from tests.bench.report import Row, Section

PAYLOAD = {"order": 123, "customer": "customer-7", "amount": 12.5, "note": "some text to reach 100 bytes", "ok": True}
KEYS = 1_000
ONE_BY_ONE = 2_000
TASKS = 50
BULK = 50_000
CHUNK = 500
DRAINED = 50_000
SLOW = 10_000
HANDLER = 0.005
INFLIGHT = 200
PACE = 500
PACED = 3_000

pack: Any = hiredis.pack_command
_names = (f"bench-{number}" for number in itertools.count())


class Bench:
    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self.pid = pid
        self.client = Redis.from_url(url, max_connections=500)
        self.broker = Broker.connect(url)
        port = int(url.rsplit(":", 1)[1])
        self.raw: Any = Connection(host="127.0.0.1", port=port, socket_timeout=None, protocol=2)

    async def aclose(self) -> None:
        await self.raw.disconnect()
        await self.broker.aclose()
        await self.client.aclose()

    async def topic(self, partitions: int, count: int = 0) -> str:
        """A new topic with ``count`` keyed messages."""
        name = next(_names)
        await self.broker.create_topic(name, partitions=partitions)
        for start in range(0, count, CHUNK):
            batch = [Outgoing(PAYLOAD, key=f"key-{n % KEYS}") for n in range(start, min(start + CHUNK, count))]
            await self.broker.send_batch(name, batch)
        return name


def streams_of(topic: str, partitions: int) -> list[str]:
    return [f"stream:topic:{topic}:p:{index}" for index in range(partitions)]


def now_ms() -> int:
    return int(time.time() * 1000)


# --- produce ---------------------------------------------------------------------------------------------


def send_works(bench: Bench, topic: str) -> dict[str, Work]:
    stream = streams_of(topic, 1)[0]

    async def default() -> None:
        for _ in range(ONE_BY_ONE):
            await bench.client.xadd(stream, {"payload": json.dumps(PAYLOAD), "timestamp": now_ms(), "key": "k"})

    async def ours() -> None:
        for _ in range(ONE_BY_ONE):
            await bench.broker.send(topic, PAYLOAD, key="k")

    return {"default": default, "ours": ours}


def concurrent_works(bench: Bench, topic: str) -> dict[str, Work]:
    stream = streams_of(topic, 1)[0]

    async def at_once(send: Callable[[], Awaitable[object]]) -> None:
        async def one() -> None:
            for _ in range(ONE_BY_ONE // TASKS * 5):
                await send()

        await asyncio.gather(*(one() for _ in range(TASKS)))

    def default() -> Awaitable[object]:
        return bench.client.xadd(stream, {"payload": json.dumps(PAYLOAD), "timestamp": now_ms(), "key": "k"})

    return {
        "default": lambda: at_once(default),
        "ours": lambda: at_once(lambda: bench.broker.send(topic, PAYLOAD, key="k")),
    }


def batch_works(bench: Bench, topic: str) -> dict[str, Work]:
    stream = streams_of(topic, 1)[0]
    batch = [Outgoing(PAYLOAD, key=f"key-{n % KEYS}") for n in range(CHUNK)]

    async def default() -> None:
        for _ in range(BULK // CHUNK):
            pipeline = bench.client.pipeline(transaction=False)
            for message in batch:
                fields: Any = {"payload": json.dumps(PAYLOAD), "timestamp": now_ms(), "key": message.key}
                pipeline.xadd(stream, fields)
            await pipeline.execute()

    async def packed() -> None:
        for _ in range(BULK // CHUNK):
            parts = [
                pack(("XADD", stream, "*", b"payload", orjson.dumps(PAYLOAD), b"timestamp", now_ms(), b"key", m.key))
                for m in batch
            ]
            await bench.raw.send_packed_command(b"".join(parts))
            for _ in range(CHUNK):
                (await bench.raw._parser.read_response()).decode()

    async def ours() -> None:
        for _ in range(BULK // CHUNK):
            await bench.broker.send_batch(topic, batch)

    return {"default": default, "packed": packed, "ours": ours}


# --- consume ---------------------------------------------------------------------------------------------


async def read_by_hand(bench: Bench, streams: list[str], count: int, handle: Callable[[Any], Awaitable[None]]) -> None:
    """Neither fenced nor ordered, nothing retried, nothing recovered: just read, decode, handle, acknowledge."""
    group = next(_names)
    for stream in streams:
        await bench.client.xgroup_create(stream, group, "0")
    wanted: Any = dict.fromkeys(streams, ">")
    done = 0
    while done < count:
        read: Any = await bench.client.xreadgroup(group, "c", wanted, count=max(100 // len(streams), 1))
        for stream, entries in read:
            for _, fields in entries:
                await handle(json.loads(fields[b"payload"]))
            await bench.client.xack(stream, group, *[id for id, _ in entries])
            done += len(entries)


async def subscribe(bench: Bench, topic: str, count: int, options: SubscribeOptions, pause: float = 0.0) -> None:
    """Handle ``count`` messages with a new group, until the last is acknowledged."""
    handled = 0
    done = asyncio.Event()

    async def handle(message: Message) -> None:
        nonlocal handled
        if pause:
            await asyncio.sleep(pause)
        handled += 1
        if handled == count:
            done.set()

    async with bench.broker.subscribe(topic, group=next(_names), handler=handle, options=options) as subscription:
        await done.wait()
        while subscription.inflight:
            await asyncio.sleep(0.001)


def drain_works(bench: Bench, topic: str, partitions: int) -> dict[str, Work]:
    async def nothing(payload: object) -> None:
        pass

    return {
        "by hand": lambda: read_by_hand(bench, streams_of(topic, partitions), DRAINED, nothing),
        "ours": lambda: subscribe(bench, topic, DRAINED, SubscribeOptions()),
    }


def slow_works(bench: Bench, topic: str, partitions: int) -> dict[str, Work]:
    async def by_hand() -> None:
        """A task for each message and a semaphore."""
        group, limit = next(_names), asyncio.Semaphore(INFLIGHT)
        streams = streams_of(topic, partitions)
        for stream in streams:
            await bench.client.xgroup_create(stream, group, "0")
        tasks: set[asyncio.Task[None]] = set()

        async def one(stream: str, id: bytes, fields: dict[bytes, bytes]) -> None:
            try:
                json.loads(fields[b"payload"])
                await asyncio.sleep(HANDLER)
                await bench.client.xack(stream, group, id)
            finally:
                limit.release()

        wanted: Any = dict.fromkeys(streams, ">")
        taken = 0
        while taken < SLOW:
            read: Any = await bench.client.xreadgroup(group, "c", wanted, count=max(100 // partitions, 1))
            for stream, entries in read:
                for id, fields in entries:
                    await limit.acquire()
                    task = asyncio.get_running_loop().create_task(one(stream, id, fields))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                taken += len(entries)
        await asyncio.gather(*tasks)

    options = SubscribeOptions(max_inflight=INFLIGHT)
    return {"by hand": by_hand, "ours": lambda: subscribe(bench, topic, SLOW, options, HANDLER)}


# --- latency ---------------------------------------------------------------------------------------------


async def paced(send: Callable[[dict[str, float]], Awaitable[object]]) -> None:
    began = time.perf_counter()
    for number in range(PACED):
        await asyncio.sleep(max(began + number / PACE - time.perf_counter(), 0))
        await send({"at": time.perf_counter()})


async def latency_by_hand(bench: Bench) -> list[float]:
    stream, group = next(_names), "g"
    await bench.client.xgroup_create(stream, group, "0", mkstream=True)
    found: list[float] = []

    async def read() -> None:
        while len(found) < PACED:
            read: Any = await bench.client.xreadgroup(group, "c", {stream: ">"}, count=100, block=1000)
            for _, entries in read:
                for id, fields in entries:
                    found.append(time.perf_counter() - json.loads(fields[b"payload"])["at"])
                    await bench.client.xack(stream, group, id)

    sender = Redis.from_url(bench.url)
    reading = asyncio.get_running_loop().create_task(read())
    await paced(lambda payload: sender.xadd(stream, {"payload": json.dumps(payload)}))
    await reading
    await sender.aclose()
    return found


async def latency_of_ours(bench: Bench) -> list[float]:
    topic = await bench.topic(8)
    found: list[float] = []
    done = asyncio.Event()

    async def handle(message: Message) -> None:
        found.append(time.perf_counter() - message.payload["at"])
        if len(found) == PACED:
            done.set()

    async with bench.broker.subscribe(topic, group="g", handler=handle), Broker.connect(bench.url) as sender:
        await paced(lambda payload: sender.send(topic, payload))
        await done.wait()
    return found


async def latency_rows(bench: Bench) -> list[Row]:
    rounds = [(await latency_by_hand(bench), await latency_of_ours(bench)) for _ in range(3)]
    rows: list[Row] = []
    for name, at, goal in (("p50", 50, 1.3), ("p99", 99, 1.5)):
        hand, ours = (
            statistics.median(statistics.quantiles(both[which], n=100)[at - 1] for both in rounds) for which in (0, 1)
        )
        rows.append(Row(f"latency {name} at {PACE}/s, by hand ({hand * 1e3:.2f} ms)", PACE, 0))
        text = f"latency {name} at {PACE}/s, `subscribe` ({ours * 1e3:.2f} ms)"
        rows.append(Row(text, PACE, 0, "by hand / ours", hand / ours, round(1 / goal, 2)))
    return rows


# --- the suite ---------------------------------------------------------------------------------------------


async def produce_rows(bench: Bench) -> list[Row]:
    topic = await bench.topic(1)
    wide = await bench.topic(8)
    pin(bench.pid, together=True)
    one = await measure(ONE_BY_ONE, send_works(bench, topic))
    pin(bench.pid, together=False)
    many = await measure(ONE_BY_ONE * 5, concurrent_works(bench, topic))
    bulk = await measure(BULK, batch_works(bench, topic), rounds=3)
    spread = await measure(BULK, {"ours": batch_works(bench, wide)["ours"]}, rounds=3)
    return [
        Row("`client.xadd` one by one, default client", one["default"].rate, one["default"].cpu_us),
        _row("`send` one by one", one, "ours", "default", 1.2),
        Row(f"`client.xadd` from {TASKS} tasks, default pool", many["default"].rate, many["default"].cpu_us),
        _row(f"`send` from {TASKS} tasks", many, "ours", "default", 5),
        Row(f"default pipeline of {CHUNK}, `json`", bulk["default"].rate, bulk["default"].cpu_us),
        Row(f"packed loop of {CHUNK}, `orjson`", bulk["packed"].rate, bulk["packed"].cpu_us),
        _row(f"`send_batch` of {CHUNK}, 1 partition", bulk, "ours", "default", 3.5),
        _row(f"`send_batch` of {CHUNK}, 1 partition", bulk, "ours", "packed", 0.7),
        Row(f"`send_batch` of {CHUNK}, 8 partitions", spread["ours"].rate, spread["ours"].cpu_us),
    ]


async def consume_rows(bench: Bench) -> list[Row]:
    rows: list[Row] = []
    for partitions in (1, 8, 32):
        topic = await bench.topic(partitions, DRAINED)
        found = await measure(DRAINED, drain_works(bench, topic, partitions), rounds=3)
        by_hand = found["by hand"]
        rows.append(Row(f"plain loop by hand, {partitions} streams", by_hand.rate, by_hand.cpu_us))
        rows.append(_row(f"`subscribe`, no-op handler, {partitions} partitions", found, "ours", "by hand", 0.5))
    topic = await bench.topic(8, SLOW)
    found = await measure(SLOW, slow_works(bench, topic, 8), rounds=3)
    by_hand = found["by hand"]
    rows.append(Row(f"by hand, a task a message, 5 ms handler, {INFLIGHT} at once", by_hand.rate, by_hand.cpu_us))
    rows.append(_row(f"`subscribe`, 5 ms handler, `max_inflight={INFLIGHT}`", found, "ours", "by hand", 0.9))
    return rows


def _row(work: str, found: Any, name: str, base: str, goal: float) -> Row:
    ratio = found[name].rate / found[base].rate
    return Row(work, found[name].rate, found[name].cpu_us, base, ratio, goal)


async def run() -> Section:
    async with EmbeddedRedis(unix_socket=False) as server:
        bench = Bench(server.url, server.pid)
        await bench.raw.connect()
        try:
            rows = [*await produce_rows(bench), *await consume_rows(bench), *await latency_rows(bench)]
        finally:
            await bench.aclose()
        return Section("topics", server.version, rows)
