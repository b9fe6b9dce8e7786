"""The queue against the same work written by hand on redis.asyncio, in the same run."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import hiredis
import orjson
from redis.asyncio import Redis
from redis.asyncio.connection import Connection

import conquiet.sync
from conquiet import QueueConfig, QueueConsumer, RedisStreamsQueue
from tests.bench.clock import Measured, Work, measure, pin
from tests.bench.report import Row, Section
from tests.rigs.servers import on_a_port

PAYLOAD = {"order": 123, "customer": "customer-7", "amount": 12.5, "note": "some text to reach 100 bytes", "ok": True}
ONE_BY_ONE = 2_000
TASKS = 50
BULK = 50_000
BATCH = 100
CHUNK = 500

pack: Any = hiredis.pack_command
_names = (f"bench:{number}" for number in itertools.count())


class Bench:
    """The servers' end and all the ways to it."""

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self.pid = pid
        self.client = Redis.from_url(url)
        self.stream = next(_names)
        self.queue = RedisStreamsQueue.connect(url, QueueConfig(self.stream, "group", "consumer"))
        self.facade = conquiet.sync.RedisStreamsQueue.connect(url, QueueConfig(self.stream, "group", "consumer"))
        port = int(url.rsplit(":", 1)[1])
        self.raw: Any = Connection(host="127.0.0.1", port=port, socket_timeout=None, protocol=2)

    async def aclose(self) -> None:
        await self.raw.disconnect()
        await self.queue.aclose()
        await self.client.aclose()
        await asyncio.to_thread(self.facade.close)

    async def filled(self, count: int) -> str:
        """A new stream with ``count`` messages and the group on it."""
        stream = next(_names)
        async with RedisStreamsQueue.connect(self.url, QueueConfig(stream, "group", "consumer")) as queue:
            await queue.enqueue_many([PAYLOAD] * count)
        return stream


async def in_thread(work: Callable[[], object]) -> None:
    """Synchronous code as a user would run it: in a thread without a loop."""
    await asyncio.to_thread(work)


# --- produce ---------------------------------------------------------------------------------------------


def enqueue_works(bench: Bench) -> dict[str, Work]:
    async def default() -> None:
        for _ in range(ONE_BY_ONE):
            await bench.client.xadd(bench.stream, {"data": json.dumps(PAYLOAD)})

    async def ours() -> None:
        for _ in range(ONE_BY_ONE):
            await bench.queue.enqueue(PAYLOAD)

    def sync() -> None:
        for _ in range(ONE_BY_ONE):
            bench.facade.enqueue(PAYLOAD)

    return {"default": default, "ours": ours, "sync": lambda: in_thread(sync)}


def concurrent_works(bench: Bench) -> dict[str, Work]:
    async def at_once(send: Callable[[], Awaitable[object]]) -> None:
        async def one() -> None:
            for _ in range(ONE_BY_ONE // TASKS * 5):
                await send()

        await asyncio.gather(*(one() for _ in range(TASKS)))

    return {
        "default": lambda: at_once(lambda: bench.client.xadd(bench.stream, {"data": json.dumps(PAYLOAD)})),
        "ours": lambda: at_once(lambda: bench.queue.enqueue(PAYLOAD)),
    }


def bulk_works(bench: Bench) -> dict[str, Work]:
    head = pack(("XADD", bench.stream, "*", "data", ""))[:-6]

    async def default() -> None:
        for _ in range(BULK // CHUNK):
            pipeline = bench.client.pipeline(transaction=False)
            for _ in range(CHUNK):
                pipeline.xadd(bench.stream, {"data": json.dumps(PAYLOAD)})
            await pipeline.execute()

    async def packed() -> None:
        for _ in range(BULK // CHUNK):
            parts = []
            for _ in range(CHUNK):
                data = orjson.dumps(PAYLOAD)
                parts.append(b"%b$%d\r\n%b\r\n" % (head, len(data), data))
            await bench.raw.send_packed_command(b"".join(parts))
            for _ in range(CHUNK):
                (await bench.raw._parser.read_response()).decode()

    async def ours() -> None:
        for _ in range(BULK // CHUNK):
            await bench.queue.enqueue_many([PAYLOAD] * CHUNK)

    def sync() -> None:
        for _ in range(BULK // CHUNK):
            bench.facade.enqueue_many([PAYLOAD] * CHUNK)

    return {"default": default, "packed": packed, "ours": ours, "sync": lambda: in_thread(sync)}


# --- consume ---------------------------------------------------------------------------------------------


def entries_of(reply: Any) -> list[Any]:
    return reply[0][1] if isinstance(reply, list) else next(iter(reply.values()))[0]  # type: ignore[no-any-return]


async def one_by_one_works(bench: Bench) -> dict[str, Work]:
    streams = [await bench.filled(ONE_BY_ONE * 6) for _ in range(3)]
    queue = RedisStreamsQueue.connect(bench.url, QueueConfig(streams[1], "group", "consumer"))
    facade = conquiet.sync.RedisStreamsQueue.connect(bench.url, QueueConfig(streams[2], "group", "consumer"))
    consumer, sync_consumer = QueueConsumer(queue), conquiet.sync.QueueConsumer(facade)

    async def default() -> None:
        for _ in range(ONE_BY_ONE):
            reply = await bench.client.xreadgroup("group", "consumer", {streams[0]: ">"}, count=1, block=5000)
            [(id, fields)] = entries_of(reply)
            json.loads(fields[b"data"])
            await bench.client.xack(streams[0], "group", id)

    async def ours() -> None:
        for _ in range(ONE_BY_ONE):
            message = await consumer.next()
            assert message is not None
            assert message.payload
            await consumer.ack(message)

    def sync() -> None:
        for _ in range(ONE_BY_ONE):
            message = sync_consumer.next()
            assert message is not None
            assert message.payload
            sync_consumer.ack(message)

    return {"default": default, "ours": ours, "sync": lambda: in_thread(sync)}


async def batch_works(bench: Bench) -> dict[str, Work]:
    streams = [await bench.filled(BULK * 6) for _ in range(4)]
    queue = RedisStreamsQueue.connect(bench.url, QueueConfig(streams[2], "group", "consumer"))
    facade = conquiet.sync.RedisStreamsQueue.connect(bench.url, QueueConfig(streams[3], "group", "consumer"))

    async def default() -> None:
        for _ in range(BULK // BATCH):
            reply = await bench.client.xreadgroup("group", "consumer", {streams[0]: ">"}, count=BATCH, block=5000)
            entries = entries_of(reply)
            for _, fields in entries:
                json.loads(fields[b"data"])
            await bench.client.xack(streams[0], "group", *(id for id, _ in entries))

    words = ("XREADGROUP", "GROUP", "group", "consumer", "COUNT", BATCH, "BLOCK", 5000, "STREAMS", streams[1], ">")
    read = pack(words)

    async def raw() -> None:
        connection = bench.raw
        for _ in range(BULK // BATCH):
            await connection.send_packed_command(read)
            entries = (await connection._parser.read_response())[0][1]
            for _, fields in entries:
                orjson.loads(fields[1])
            ids = [entry[0] for entry in entries]
            await connection.send_packed_command(pack(("XACK", streams[1], "group", *ids)))
            await connection._parser.read_response()

    async def ours() -> None:
        for _ in range(BULK // BATCH):
            messages = await queue.read(5000, BATCH)
            for message in messages:
                assert message.payload
            await queue.ack(*messages)

    def sync() -> None:
        for _ in range(BULK // BATCH):
            messages = facade.read(5000, BATCH)
            for message in messages:
                assert message.payload
            facade.ack(*messages)

    return {"default": default, "raw": raw, "ours": ours, "sync": lambda: in_thread(sync)}


# --- the table -------------------------------------------------------------------------------------------


def rows(work: str, found: dict[str, Measured], bases: list[tuple[str, str, str, float | None]]) -> list[Row]:
    """A row for each comparison, (subject, base, the base in words, goal), and the base's own before it."""
    made: list[Row] = []
    for subject, base, words, goal in bases:
        mine, theirs = found[subject], found[base]
        name = f"{work}{', sync' if subject == 'sync' else ''}"
        made.append(Row(name, mine.rate, mine.cpu_us, words, mine.rate / theirs.rate, goal))
    return made


async def run() -> Section:
    async with on_a_port() as server:
        bench = Bench(server.url, server.pid)
        await bench.raw.connect()
        await bench.queue.open()
        table = await produce_rows(bench) + await consume_rows(bench)
        await bench.aclose()
        return Section("queue", server.version, table)


async def produce_rows(bench: Bench) -> list[Row]:
    pin(bench.pid, together=True)
    one = await measure(ONE_BY_ONE, enqueue_works(bench))
    pin(bench.pid, together=False)
    many = await measure(ONE_BY_ONE // TASKS * 5 * TASKS, concurrent_works(bench))
    bulk = await measure(BULK, bulk_works(bench))
    default = "`await client.xadd`, defaults"
    return [
        Row("by hand: `await client.xadd`", one["default"].rate, one["default"].cpu_us),
        *rows("`enqueue` one by one", one, [("ours", "default", default, 1.2), ("sync", "ours", "async", None)]),
        Row(f"by hand: {TASKS} tasks of `xadd` on a default pool", many["default"].rate, many["default"].cpu_us),
        *rows(f"{TASKS} tasks calling `enqueue`", many, [("ours", "default", "the same on a default pool", 5)]),
        Row(f"by hand: default pipeline of {CHUNK}, `json`", bulk["default"].rate, bulk["default"].cpu_us),
        Row(f"by hand: packed write of {CHUNK}, `orjson`", bulk["packed"].rate, bulk["packed"].cpu_us),
        *rows(
            f"`enqueue_many` by {CHUNK}",
            bulk,
            [
                ("ours", "default", "default pipeline", 3.5),
                ("ours", "packed", "packed loop", 0.7),
                ("sync", "ours", "async", 0.9),
            ],
        ),
    ]


async def consume_rows(bench: Bench) -> list[Row]:
    pin(bench.pid, together=True)
    one = await measure(ONE_BY_ONE, await one_by_one_works(bench))
    pin(bench.pid, together=False)
    batch = await measure(BULK, await batch_works(bench))
    return [
        Row("by hand: `xreadgroup` + `xack` one by one", one["default"].rate, one["default"].cpu_us),
        *rows(
            "`QueueConsumer` next + ack",
            one,
            [("ours", "default", "the default pair", 1.2), ("sync", "ours", "async", None)],
        ),
        Row(f"by hand: default client by {BATCH}, `json`", batch["default"].rate, batch["default"].cpu_us),
        Row(f"by hand: raw loop by {BATCH}, `orjson`", batch["raw"].rate, batch["raw"].cpu_us),
        *rows(
            f"`read({BATCH})` + `ack`",
            batch,
            [
                ("ours", "default", "default client", 1.2),
                ("ours", "raw", "raw loop", 0.75),
                ("sync", "ours", "async", 0.9),
            ],
        ),
    ]
