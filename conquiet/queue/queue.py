"""One stream through one consumer group: the low-level API."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Self

from conquiet.errors import ConfigError, PayloadError, QueueError
from conquiet.kit import codec, rules
from conquiet.kit.chunks import by_number, chunks
from conquiet.kit.loopthread import forks
from conquiet.kit.opened import Opened
from conquiet.kit.options import instance
from conquiet.message import DATA, QueueMessage
from conquiet.metrics import queue_metrics
from conquiet.queue.backlog import BacklogStats, backlog_commands, backlog_of
from conquiet.queue.config import QueueConfig
from conquiet.queue.stale import StaleSearch
from conquiet.wire import streams
from conquiet.wire.address import Address, AddressLike
from conquiet.wire.connections import Connections
from conquiet.wire.groups import create_group
from conquiet.wire.interrupt import Interrupt
from conquiet.wire.parser import Reply
from conquiet.wire.shared_connection import running_loop

__all__ = ["RedisStreamsQueue"]

_log = logging.getLogger("conquiet.queue")
_CHUNK: Final = 500
_CHUNK_BYTES: Final = 1 << 20
_UNSENT: Final = object()
_LARGEST: Final = 512 << 20  # Redis' own limit for one value


class RedisStreamsQueue(Opened):
    """Redis Streams as they are: at-least-once delivery, explicit acknowledgment, every failure raised.

    No loop, no retry, no buffer, no background work. A message that was read stays pending until it is
    acknowledged; if its reader dies, a consumer that calls :meth:`claim_stale` gets it again. Reads and claims of
    one queue may run side by side, and a read that blocks never delays an acknowledgment.

    ``client`` is a ``redis.asyncio`` client (standalone, Sentinel or Cluster), a URL or an address. The
    queue uses only the settings of a client: it does not touch the client's connections and does not close it.
    """

    def __init__(self, client: AddressLike, config: QueueConfig) -> None:
        instance("config", config, of=QueueConfig)
        self._config = config
        self._link = Connections(Address.of(client))
        self._metrics = queue_metrics(config.stream_key)
        self._xadd_head = streams.xadd_head(config.stream_key, DATA)
        self._stale = StaleSearch(self._link, config.stream_key, config.consumer_group)
        self._has_group = False
        self._creating_group = asyncio.Lock()
        self._created_at: tuple[object, int] | None = None

    @classmethod
    def connect(cls, url: str, config: QueueConfig) -> Self:
        """A queue at ``url``; ``async with`` creates the group and closes the connections at the end."""
        return cls(url, config)

    @property
    def config(self) -> QueueConfig:
        """What the queue was made with."""
        return self._config

    async def open(self) -> None:
        """Create the consumer group, and the stream, unless they exist; once in the life of this object."""
        if self._has_group:
            return
        here = (running_loop(), forks())
        if self._created_at != here:  # a task of another loop may hold the old lock for ever
            self._created_at, self._creating_group = here, asyncio.Lock()
        async with self._creating_group:
            if not self._has_group:
                await self._create_group()
                self._has_group = True

    async def aclose(self) -> None:
        """Close the connections, within a second. What was read and not acknowledged stays pending."""
        await self._link.aclose()

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def enqueue(self, payload: Mapping[str, Any]) -> str:
        """Append ``payload``; the entry's ID, once Redis has it.

        A payload that JSON would change is refused with ``PayloadError`` before anything is sent. After a
        ``QueueError`` of a lost connection the entry may or may not be in the stream; it is there at most once.
        """
        key = self._config.stream_key
        reply = await self._link.call(key, streams.xadd(self._xadd_head, _encoded(payload)))
        return reply.decode()  # type: ignore[no-any-return]

    async def enqueue_many(self, payloads: Iterable[Mapping[str, Any]]) -> list[str]:
        """Append ``payloads`` in order, one round trip for each few hundred; their IDs.

        All are checked before the first is sent. It is not one transaction: other writers' entries may come
        between, and when Redis fails on the way the ``QueueError`` says in ``entry_ids`` which were written.
        """
        values = _all_encoded(payloads)
        ids: list[str] = []
        for chunk in chunks(values, _CHUNK, _CHUNK_BYTES, len):
            ids += await self._append(chunk, ids, len(values))
        return ids

    async def read(self, block_ms: int | None = None, count: int | None = None) -> list[QueueMessage]:
        """Up to ``count`` messages that the group has not seen, waiting up to ``block_ms`` for the first.

        They are pending with this consumer from now on. The list may be empty. Both default to the config's.
        A read that is cancelled or times out may have been given messages: these stay pending.
        """
        return await self._read(block_ms, count, Interrupt())

    async def ack(self, *messages: QueueMessage) -> None:
        """Take ``messages`` off the pending list; returns once Redis has done so.

        One that is not pending any more, for whatever reason, is no error.
        """
        key, group = self._config.stream_key, self._config.consumer_group
        ids = [message.id for message in messages if message.stream == key and message.group == group]
        if len(ids) < len(messages):
            raise ConfigError(f"not all of {messages!r} are of stream {key!r} and group {group!r}")
        if ids:
            self._metrics.acked(await self._ack(key, group, ids))

    async def claim_stale(self, min_idle_ms: int | None = None, count: int = 10) -> list[QueueMessage]:
        """Take over up to ``count`` messages of any consumer that have been idle for ``min_idle_ms``.

        Best effort: not fair, not complete, not in order; Redis decides what is idle. A call looks at 5,000 pending
        messages at most, and the next one goes on behind them. A message whose entry was deleted or trimmed is taken
        off the pending list, with a warning in the log.
        """
        idle = rules.integer("min_idle_ms", _or(min_idle_ms, self._config.claim_idle_ms), least=0)
        rules.integer("count", count, least=1)
        await self.open()
        key, group, name = self._names
        deliveries = {row.id: row.deliveries + 1 for row in await self._stale.find(idle, count)}
        if not deliveries:
            return []
        parts = by_number(list(deliveries), streams.MOST_IDS)
        replies = await self._all(key, [streams.xclaim(key, group, name, idle, part) for part in parts])
        reply = [entry for part in replies for entry in part]
        entries = [(id.decode(), fields) for id, fields in streams.entries_of(reply)]
        self._metrics.claimed(len(entries))
        if len(entries) < len(reply):
            await self._drop_ghosts(deliveries.keys() - {id for id, _ in entries})
        return [QueueMessage(key, group, id, fields, deliveries[id]) for id, fields in entries]

    async def backlog_stats(self) -> BacklogStats:
        """The backlog of the group: one round trip of bounded cost, no side effects."""
        await self.open()
        key, group, _ = self._names
        return backlog_of(await self._all(key, backlog_commands(key, group)), group)

    @property
    def _names(self) -> tuple[str, str, str]:
        return self._config.stream_key, self._config.consumer_group, self._config.consumer_name

    async def _read(self, block_ms: int | None, count: int | None, interrupt: Interrupt) -> list[QueueMessage]:
        block = rules.integer("block_ms", _or(block_ms, self._config.block_ms), least=1)
        most = rules.integer("count", _or(count, self._config.max_read_count), least=1)
        if not self._has_group and not await interrupt.ends(self.open):
            return []
        key, group, name = self._names
        command = streams.xreadgroup(key, group, name, count=most, block_ms=block)
        started = time.perf_counter()
        reply = await self._link.wait(key, command, block / 1000, interrupt, _UNSENT)
        if reply is _UNSENT:
            return []
        entries = streams.read_entries_of(reply)
        self._metrics.read(len(entries), time.perf_counter() - started)
        return [QueueMessage(key, group, id.decode(), fields, 1) for id, fields in entries]

    async def _create_group(self) -> None:
        key, group, _ = self._names
        refusal = await create_group(self._link, key, group, "0-0")
        if refusal is not None:
            self._link.refuse(key, refusal)

    async def _append(self, chunk: Sequence[bytes], before: Sequence[str | None], total: int) -> list[str]:
        head, xadd = self._xadd_head, streams.xadd
        try:
            replies = await self._link.call_many(self._config.stream_key, [xadd(head, value) for value in chunk])
        except QueueError as error:
            raise _partial(str(error), before, total) from error.__cause__
        try:
            return [reply.decode() for reply in replies]
        except AttributeError:  # an error reply among them
            known = [*before, *(None if isinstance(reply, Exception) else reply.decode() for reply in replies)]
            refusal = next(reply for reply in replies if isinstance(reply, Exception))
            raise _partial(str(refusal), known, total) from refusal

    async def _drop_ghosts(self, ids: Iterable[str]) -> None:
        """Take IDs without an entry off the pending list, as Redis 7 does by itself; 6.2 keeps them for ever."""
        key, group, _ = self._names
        suspects = list(ids)
        found = await self._link.call_many(key, [streams.xrange_one(key, id) for id in suspects])
        ghosts = [id for id, reply in zip(suspects, found, strict=True) if reply == []]
        if ghosts:
            _log.warning("stream %r, group %r: %d pending IDs have no entry any more", key, group, len(ghosts))
            await self._ack(key, group, ghosts)

    async def _ack(self, key: str, group: str, ids: Sequence[str]) -> int:
        if len(ids) <= streams.MOST_IDS:
            return int(await self._link.call(key, streams.xack(key, group, ids)))
        parts = by_number(ids, streams.MOST_IDS)
        return sum(await self._all(key, [streams.xack(key, group, part) for part in parts]))

    async def _all(self, key: str, commands: Sequence[bytes]) -> list[Reply]:
        """The replies to commands that are all to succeed."""
        replies = await self._link.call_many(key, commands)
        for reply in replies:
            if isinstance(reply, Exception):
                self._link.refuse(key, reply)
        return replies


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _encoded(payload: object) -> bytes:
    data = codec.encode_object(payload)
    if len(data) > _LARGEST:
        raise PayloadError("$", f"is {len(data)} bytes as JSON, but Redis takes {_LARGEST} at most")
    return data


def _all_encoded(payloads: Iterable[object]) -> list[bytes]:
    values: list[bytes] = []
    try:
        for payload in payloads:
            values.append(_encoded(payload))  # noqa: PERF401 - its length tells which payload was refused
    except PayloadError as error:
        raise PayloadError(f"payloads[{len(values)}]: {error.path}", error.reason) from None
    return values


def _partial(reason: str, known: Sequence[str | None], total: int) -> QueueError:
    ids = [*known, *[None] * (total - len(known))]
    written = sum(id is not None for id in ids)
    return QueueError(f"{reason} ({written} of {total} entries are known to be written)", entry_ids=ids)
