"""A topic with messages, groups, leases and failures, set up by the scripts and commands that make them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from conquiet.kit.clock import ManualClock
from conquiet.topics.options import Retention
from conquiet.topics.server.dead_letters import forward
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Registry, Topic
from conquiet.wire.scripts import Script
from conquiet.wire.streams import entries_of, pack

__all__ = ["TTL", "Held", "Stage", "hurried"]

TTL: Final = 15.0
"""Seconds that leases and memberships last here."""

_T = TypeVar("_T")

_ACQUIRE: Final = Script.named("partition_acquire")
_BEAT: Final = Script.named("member_beat")
_BURY: Final = Script.named("bury")
_PARK: Final = Script.named("park")
_RELEASE: Final = Script.named("partition_release")
_TAKE: Final = Script.named("take")


async def hurried(clock: ManualClock, work: Coroutine[Any, Any, _T]) -> _T:
    """The outcome of ``work``, which need not live through its waits."""
    task = asyncio.create_task(work)
    while not (await asyncio.wait([task], timeout=0.02))[0]:
        clock.advance(0.5)
    return task.result()


@dataclass(frozen=True)
class Held:
    """A lease that a test holds."""

    topic: Topic
    partition: int
    group: str
    owner: str
    epoch: str


@dataclass
class Stage:
    """Everything around the code under test."""

    instance: Instance
    registry: Registry

    async def call(self, key: str, *words: str | bytes | int) -> Any:
        """The answer to one command, its words first the name and then the rest."""
        return await self.instance.link.call(key, pack(*words))

    async def topic(self, name: str = "orders", partitions: int = 1, **retention: Any) -> Topic:
        return await self.registry.create(name, partitions, Retention(**retention))

    def stream(self, topic: Topic, partition: int = 0) -> str:
        return topic.stream(self.instance.keys, partition)

    async def add(
        self, topic: Topic, count: int, partition: int = 0, payload: bytes = b"{}", /, **more: str
    ) -> list[str]:
        """Append ``count`` messages; their IDs."""
        stream = self.stream(topic, partition)
        fields = [word for pair in more.items() for word in pair]
        command = pack("XADD", stream, "*", "payload", payload, "timestamp", 1, *fields)
        return [id.decode() for id in await self.instance.link.call_many(stream, [command] * count)]

    async def ids(self, topic: Topic, partition: int = 0) -> list[str]:
        """The entries that are in a partition."""
        stream = self.stream(topic, partition)
        return [id.decode() for id, _ in entries_of(await self.call(stream, "XRANGE", stream, "-", "+"))]

    async def create_group(self, topic: Topic, group: str, start: str = "0", partition: int = 0) -> None:
        stream = self.stream(topic, partition)
        await self.call(stream, "XGROUP", "CREATE", stream, group, start, "MKSTREAM")

    async def read(self, topic: Topic, group: str, count: int, partition: int = 0) -> list[str]:
        """Deliver up to ``count`` new entries to a group, as any reader would."""
        stream = self.stream(topic, partition)
        reply = await self.call(stream, "XREADGROUP", "GROUP", group, "reader", "COUNT", count, "STREAMS", stream, ">")
        return [id.decode() for id, _ in reply[0][1]] if reply else []

    async def ack(self, topic: Topic, group: str, *ids: str, partition: int = 0) -> None:
        stream = self.stream(topic, partition)
        await self.call(stream, "XACK", stream, group, *ids)

    async def pending(self, topic: Topic, group: str, partition: int = 0) -> list[str]:
        stream = self.stream(topic, partition)
        return [row[0].decode() for row in await self.call(stream, "XPENDING", stream, group, "-", "+", 100_000)]

    # --- as a member of a group -------------------------------------------------------------------------

    async def join(self, topic: Topic, group: str, member: str = "worker-1#a1", about: bytes = b"{}") -> int:
        """Become a member; the server's time."""
        keys = self.instance.keys
        names = [
            keys.members(topic.name, group),
            keys.members_info(topic.name, group),
            keys.generation(topic.name, group),
        ]
        if not await self.call(keys.groups(topic.name), "SISMEMBER", keys.groups(topic.name), group):
            await self.call(keys.groups(topic.name), "SADD", keys.groups(topic.name), group)
        beat = _BEAT(names, member, about, round(TTL * 1000), self.instance.clock.offset_ms)
        return int((await self.instance.run(names[0], beat))[0])

    async def acquire(
        self, topic: Topic, group: str, partition: int = 0, owner: str = "worker-1#a1", since: int | None = None
    ) -> Held:
        """Take the lease of a partition; ``AssertionError`` if it is not to be had."""
        status, *rest = await self.try_acquire(topic, group, partition, owner, since)
        assert status == b"OK", (status, rest)
        return Held(topic, partition, group, owner, rest[0].decode())

    async def try_acquire(
        self, topic: Topic, group: str, partition: int = 0, owner: str = "worker-1#a1", since: int | None = None
    ) -> Any:
        stream, offset = self.stream(topic, partition), self.instance.clock.offset_ms
        if since is None:
            seconds, micros = await self.call(stream, "TIME")
            since = int(seconds) * 1000 + int(micros) // 1000 + 1 + offset
        keys = [self.instance.keys.lease(stream, group), stream]
        call = _ACQUIRE(keys, owner, round(TTL * 1000), offset, group, "0-0", since, "0", "fail")
        return await self.instance.run(stream, call)

    async def release(self, held: Held) -> None:
        stream = self.stream(held.topic, held.partition)
        keys = [self.instance.keys.lease(stream, held.group), stream]
        assert await self.instance.run(stream, _RELEASE(keys, held.owner, held.epoch, held.group)) == 1

    async def take(self, held: Held, count: int = 100, *acked: str) -> Any:
        """What the owner is given: ``None`` if the lease is lost, else new entries and due ones."""
        keys, stream = self.instance.keys, self.stream(held.topic, held.partition)
        names = [*self._names(held)[:4], keys.delayed(stream), keys.delayed_items(stream)]
        about = (held.owner, held.epoch, self.instance.clock.offset_ms, held.group)
        reply = await self.instance.run(stream, _TAKE(names, *about, count, count, "0-0", "", *acked))
        if reply[0] == 0:
            return None
        fresh, due = [id.decode() for id, _ in reply[2]], [_due(row) for row in reply[3]]
        while reply[6] and len(fresh) < count:  # they are large
            reply = await self.instance.run(stream, _TAKE(names, *about, count - len(fresh), 0, "0-0", ""))
            fresh += [id.decode() for id, _ in reply[2]]
        return fresh, due

    async def park(self, held: Held, *ids: str, delay: float = 60.0) -> None:
        about = (held.owner, held.epoch, self.instance.clock.offset_ms, held.group)
        words = [word for id in ids for word in (id, round(delay * 1000), 1, "KeyError")]
        reply = await self.instance.run(
            self.stream(held.topic, held.partition), _PARK(self._names(held)[:4], *about, *words)
        )
        assert reply == [1, len(ids)]

    async def bury(self, held: Held, *ids: str, reason: str = "too many retries") -> None:
        """Make dead letters of pending entries."""
        about = (held.owner, held.epoch, self.instance.clock.offset_ms, held.group, held.topic.name, held.partition)
        words = [word for id in ids for word in (id, 4, reason, "KeyError", "it's gone", "Traceback...", -1)]
        reply = await self.instance.run(
            self.stream(held.topic, held.partition), _BURY(self._names(held), *about, *words)
        )
        assert reply == [1, len(ids)]

    async def dead(self, topic: Topic, group: str, count: int, partition: int = 0, /, **more: str) -> list[str]:
        """Append messages that the group then gives up on; their IDs. The lease is given back."""
        held = await self.acquire(topic, group, partition)
        await self.add(topic, count, partition, **more)
        ids, _ = await self.take(held, count)
        assert len(ids) == count
        await self.bury(held, *ids)
        await forward(self.instance, topic, partition, group)
        await self.release(held)
        return list(ids)

    def _names(self, held: Held) -> list[str]:
        keys, stream = self.instance.keys, self.stream(held.topic, held.partition)
        lease, retry, attempts, outbox = keys.of_group(stream, held.group)
        return [lease, stream, retry, attempts, outbox]


def _due(row: Any) -> tuple[str, str]:
    return row[0].decode(), row[2].decode()
