"""Queues of jobs as one would write them by hand: a job at a time, as the drivers' manuals show it.

Neither has retries, priorities, fencing or recovery; both keep what was done, so that it can be looked up.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol
from uuid import uuid4

from psycopg import AsyncConnection
from redis.asyncio import Redis

__all__ = ["ByHand", "HandPostgres", "HandRedis", "Handler", "PlainQueue"]

Handler = Callable[[Any], Awaitable[object]]

_ADD = """
redis.call('HSET', KEYS[1] .. ARGV[1], 'payload', ARGV[2], 'state', 'ready')
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
"""
_CLAIM = """
local popped = redis.call('ZPOPMIN', KEYS[2])
if #popped == 0 then return false end
redis.call('HSET', KEYS[1] .. popped[1], 'state', 'in flight')
redis.call('ZADD', KEYS[3], ARGV[1], popped[1])
return {popped[1], redis.call('HGET', KEYS[1] .. popped[1], 'payload')}
"""
_ACK = """
if redis.call('ZREM', KEYS[3], ARGV[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1] .. ARGV[1], 'state', 'done', 'result', ARGV[2])
return 1
"""
_TABLE = """
CREATE TABLE IF NOT EXISTS plain_jobs (
    id bigserial PRIMARY KEY, queue text NOT NULL, state text NOT NULL DEFAULT 'ready',
    payload jsonb NOT NULL, result jsonb, leased_until timestamptz
);
CREATE INDEX IF NOT EXISTS plain_ready ON plain_jobs (queue, id) WHERE state = 'ready';
"""
_INSERT = "INSERT INTO plain_jobs (queue, payload) VALUES (%s, %s)"
_LEASE = """
UPDATE plain_jobs SET state = 'in flight', leased_until = now() + interval '5 s'
WHERE id = (
    SELECT id FROM plain_jobs WHERE queue = %s AND state = 'ready' ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED
)
RETURNING id, payload
"""
_DONE = "UPDATE plain_jobs SET state = 'done', result = %s WHERE id = %s"


class ByHand(Protocol):
    """One queue of one store."""

    async def enqueue(self, payload: object) -> object: ...

    async def enqueue_many(self, payloads: list[Any]) -> object: ...

    async def drain(self, count: int, workers: int, handler: Handler) -> None:
        """Handle ``count`` jobs that are there, ``workers`` at a time."""
        ...

    async def serve(self, count: int, handler: Handler) -> None:
        """Handle ``count`` jobs as they come."""
        ...


class PlainQueue:
    """In memory: an ``asyncio.Queue``."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[Any] = asyncio.Queue()

    async def enqueue(self, payload: object) -> None:
        await self._waiting.put(json.dumps(payload))

    async def enqueue_many(self, payloads: list[Any]) -> None:
        for payload in payloads:
            self._waiting.put_nowait(json.dumps(payload))

    async def drain(self, count: int, workers: int, handler: Handler) -> None:
        async def work() -> None:
            while not self._waiting.empty():
                await handler(json.loads(await self._waiting.get()))

        await asyncio.gather(*(work() for _ in range(workers)))

    async def serve(self, count: int, handler: Handler) -> None:
        for _ in range(count):
            await handler(json.loads(await self._waiting.get()))


class HandRedis:
    """A hash for each job, sorted sets of those that wait and of those in flight, a script for each step."""

    def __init__(self, client: Redis, queue: str) -> None:
        self._client: Any = client
        self._keys = [f"{queue}:job:", f"{queue}:ready", f"{queue}:leases"]
        self._add, self._claim, self._ack = (client.register_script(text) for text in (_ADD, _CLAIM, _ACK))

    async def enqueue(self, payload: object) -> None:
        await self._add(keys=self._keys, args=[uuid4().hex, json.dumps(payload), time.time()])

    async def enqueue_many(self, payloads: list[Any]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for payload in payloads:
            await self._add(keys=self._keys, args=[uuid4().hex, json.dumps(payload), time.time()], client=pipeline)
        await pipeline.execute()

    async def drain(self, count: int, workers: int, handler: Handler) -> None:
        await asyncio.gather(*(self._work(handler) for _ in range(workers)))

    async def serve(self, count: int, handler: Handler) -> None:
        for _ in range(count):
            _, id, _ = await self._client.bzpopmin(self._keys[1])
            pipeline = self._client.pipeline(transaction=False)
            pipeline.zadd(self._keys[2], {id: time.time() + 5})
            pipeline.hget(self._keys[0] + id.decode(), "payload")
            _, payload = await pipeline.execute()
            await self._handled(id, payload, handler)

    async def _work(self, handler: Handler) -> None:
        while claimed := await self._claim(keys=self._keys, args=[time.time() + 5]):
            id, payload = claimed
            await self._handled(id, payload, handler)

    async def _handled(self, id: bytes, payload: bytes, handler: Handler) -> None:
        result = await handler(json.loads(payload))
        await self._ack(keys=self._keys, args=[id, json.dumps(result)])


class HandPostgres:
    """A table, ``SKIP LOCKED``, a transaction for each step; ``pool`` are connections that commit by themselves."""

    def __init__(self, pool: list[AsyncConnection[Any]], queue: str) -> None:
        self._free: asyncio.Queue[AsyncConnection[Any]] = asyncio.Queue()
        for connection in pool:
            self._free.put_nowait(connection)
        self._pool = pool
        self._queue = queue

    @staticmethod
    async def make(dsn: str, connections: int) -> list[AsyncConnection[Any]]:
        """The table, and connections to it."""
        pool = [await AsyncConnection.connect(dsn, autocommit=True) for _ in range(connections)]
        await pool[0].execute(_TABLE.encode())
        return pool

    async def enqueue(self, payload: object) -> None:
        connection = await self._free.get()
        try:
            await connection.execute(_INSERT, (self._queue, json.dumps(payload)))
        finally:
            self._free.put_nowait(connection)

    async def enqueue_many(self, payloads: list[Any]) -> None:
        async with self._pool[0].transaction(), self._pool[0].cursor() as cursor:
            await cursor.executemany(_INSERT, [(self._queue, json.dumps(payload)) for payload in payloads])

    async def drain(self, count: int, workers: int, handler: Handler) -> None:
        # More workers than connections would only wait for each other.
        await asyncio.gather(*(self._work(connection, handler) for connection in self._pool[:workers]))

    async def serve(self, count: int, handler: Handler) -> None:
        listener, worker, *_ = self._pool
        await listener.execute(f"LISTEN {self._queue}".encode())
        handled = await self._work(worker, handler)
        async for _ in listener.notifies():
            handled += await self._work(worker, handler)
            if handled >= count:
                break
        await listener.execute("UNLISTEN *")

    async def tell(self, payload: object) -> None:
        """Enqueue for somebody who serves."""
        connection = self._pool[-1]
        async with connection.transaction():
            await connection.execute(_INSERT, (self._queue, json.dumps(payload)))
            await connection.execute(f"NOTIFY {self._queue}".encode())

    async def _work(self, connection: AsyncConnection[Any], handler: Handler) -> int:
        handled = 0
        while True:
            row = await (await connection.execute(_LEASE, (self._queue,))).fetchone()
            if row is None:
                return handled
            result = await handler(row[1])
            await connection.execute(_DONE, (json.dumps(result), row[0]))
            handled += 1
