"""Topics that grew, are growing, hold retries, delays, dead letters and leases; old streams; a namespace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from conquiet import (
    Backoff,
    Broker,
    BytesCodec,
    Message,
    QueueConfig,
    QueueError,
    RedisStreamsQueue,
    Reject,
    Retention,
    Retry,
    RetryPolicy,
    SubscribeOptions,
    TopicFullError,
)
from conquiet.topics.server.topics import TopicLike
from conquiet.wire.keys import Keys
from tests.rigs.asking import ask
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import eventually
from tests.topics.consuming import buried, vanish

NAMESPACE: Final = "shop"
LATER: Final = 60.0
"""Seconds that retries and delayed messages wait here."""
MUCH_LATER: Final = 3600.0
KEPT: Final = Retention(max_len=10_000, max_age=604_800.0, on_full="reject", trim_interval=5.0, dead_letter_max_len=500)

Facts = dict[str, Any]


@dataclass
class Stage:
    """Where the scenes are played; what is opened on the stack is there when they are cut off."""

    url: str
    broker: Broker
    stack: AsyncExitStack

    async def send(self, topic: TopicLike, numbers: range, keys: int = 0) -> None:
        for n in numbers:
            more: dict[str, Any] = {"key": f"key-{n % keys}", "headers": {"trace": f"t{n}"}} if keys else {}
            await self.broker.send(topic, {"n": n}, **more)

    async def finish(self, topic: TopicLike, group: str, count: int) -> list[int]:
        """Let a group finish so many messages; which."""
        done: list[int] = []
        async with self.broker.consume(topic, group=group, options=options()) as messages:
            for _ in range(count):
                message = await messages.next(10)
                assert message is not None
                await message.ack()
                done.append(message.payload["n"])
        return done

    async def handle(
        self,
        topic: TopicLike,
        group: str,
        handler: Callable[[Message], Awaitable[None]],
        until: Callable[[], Awaitable[bool]],
        **more: Any,
    ) -> None:
        """Let a group work until something is so."""
        async with self.broker.subscribe(topic, group=group, handler=handler, options=options(**more)):
            await eventually(until, f"{group} of {topic}")


def options(**more: Any) -> SubscribeOptions:
    """Those of a consumer of these scenes."""
    retry = RetryPolicy(
        max_retries=more.pop("max_retries", 3),
        backoff=Backoff(base=LATER, cap=LATER, kind="fixed"),
        mode=more.pop("mode", "park"),
    )
    return SubscribeOptions(**{"poll_timeout": 0.1, "handle_signals": False, "retry": retry, **more})


@asynccontextmanager
async def topics(url: str) -> AsyncIterator[Facts]:
    """Play all of them."""
    async with AsyncExitStack() as stack:
        stage = Stage(url, await stack.enter_async_context(Broker(url)), stack)
        facts: Facts = {}
        for scene in _SCENES:
            facts[scene.__name__.strip("_")] = await scene(stage)
        yield {**facts, "overview": await overview(stage.broker)}


async def overview(broker: Broker) -> Facts:
    """How all topics and groups stand, as an operator sees them."""
    listed = [topic for topic in await broker.admin.list_topics() if topic != "doomed"]
    topics: list[TopicLike] = [*listed, broker.legacy("app:legacy"), "plain"]
    return {str(getattr(topic, "stream", topic)): await _described(broker, topic) for topic in topics}


async def _described(broker: Broker, topic: TopicLike) -> Facts:
    info = await broker.admin.describe_topic(topic)
    names = ("length", "first_id", "last_id", "delayed", "trimmed_below", "dropped")
    parts = [{name: getattr(part, name) for name in names} for part in info.by_partition]
    groups = {group: await _stand(broker, topic, group) for group in await broker.admin.list_groups(topic)}
    settings = {"partitioner": info.partitioner, "retention": info.retention.plain(), "legacy": info.legacy}
    return {"partitions": parts, "groups": groups, "dead_letters": info.dead_letters, **settings}


async def _stand(broker: Broker, topic: TopicLike, group: str) -> Facts:
    info = await broker.admin.describe_group(topic, group)
    names = ("lag", "pending", "last_delivered_id", "owner", "epoch", "retry_depth", "oldest_pending_id")
    parts = [{name: getattr(part, name) for name in names} for part in info.partitions]
    page = await broker.admin.pending(topic, group)
    told = ("consumer", "deliveries", "failures", "crashes", "error_type")
    pending = {
        f"{entry.partition}/{entry.id}": {
            **{name: getattr(entry, name) for name in told},
            "parked_until": None if entry.parked_until is None else entry.parked_until.isoformat(),
        }
        for entry in page.entries
    }
    members = sorted(member.name for member in info.members)
    return {"partitions": parts, "pending": pending, "members": members}


async def _grown(stage: Stage) -> Facts:
    """``orders`` grew; ``billing`` had finished all before, ``audit`` had not."""
    await stage.broker.create_topic("orders", partitions=4, retention=KEPT)
    await stage.send("orders", range(24), keys=6)
    done = {"billing": await stage.finish("orders", "billing", 24), "audit": await stage.finish("orders", "audit", 10)}
    await stage.broker.admin.grow("orders", 8)
    await stage.send("orders", range(24, 48), keys=6)
    done["billing"] += await stage.finish("orders", "billing", 12)
    return {"finished": done}


async def _growing(stage: Stage) -> Facts:
    """Whoever let ``growing`` grow was killed in the middle of it."""
    await stage.broker.create_topic("growing", partitions=2)
    await stage.send("growing", range(12), keys=4)
    done = await stage.finish("growing", "g", 4)
    work = asyncio.create_task(stage.broker.admin.grow("growing", 4))

    async def is_planned() -> bool:
        return bool(await ask(stage.url, "HEXISTS", Keys().meta("growing"), "nextCount"))

    await eventually(is_planned, "growth to be planned")
    work.cancel()
    with suppress(asyncio.CancelledError):
        await work
    return {"finished": {"g": done}}


async def _retries(stage: Stage) -> Facts:
    """``park`` and ``requeue`` wait for retries in their own ways, and all for delayed messages."""
    await stage.broker.create_topic("retries", partitions=2)
    await stage.send("retries", range(4))
    await stage.broker.send("retries", {"n": 4}, max_retries=1)
    await stage.send("retries", range(5, 6))

    async def park(message: Message) -> None:
        n, tries = message.payload["n"], message.retry_count
        if n == 1 and tries == 0:
            raise Retry("at once", delay=0)
        if n == 3:
            raise Retry("much later", delay=MUCH_LATER)
        if n in (0, 1, 4):
            raise ValueError(f"try {tries}")

    async def requeue(message: Message) -> None:
        if message.payload["n"] in (0, 1):
            raise ValueError("requeued")

    async def are_parked() -> bool:
        info = await stage.broker.admin.describe_group("retries", "park")
        return info.lag == 0 and (info.pending, sum(part.retry_depth for part in info.partitions)) == (4, 4)

    async def are_delayed() -> bool:
        topic = await stage.broker.admin.describe_topic("retries")
        group = await stage.broker.admin.describe_group("retries", "requeue")
        return group.lag == group.pending == 0 and sum(part.delayed for part in topic.by_partition) == 2

    await stage.handle("retries", "park", park, are_parked)
    await stage.handle("retries", "requeue", requeue, are_delayed, mode="requeue")
    await stage.broker.send("retries", {"n": 6}, delay=LATER, key="late", headers={"h": "1"})
    await stage.broker.send("retries", {"n": 7}, delay=MUCH_LATER)
    return {}


async def _letters(stage: Stage) -> Facts:
    """Dead letters of two groups: some arrived, one on its way, one replayed as a copy that nobody has read."""
    broker = stage.broker
    await broker.create_topic("letters", partitions=2)
    ids = [
        await broker.send("letters", {"n": n}, key=f"key-{n}", headers={"trace": f"t{n}"}, partition=n % 2)
        for n in range(5)
    ]

    async def fail(message: Message) -> None:
        if message.payload["n"] == 2:
            raise ValueError("it is broken: Zoë")
        raise Reject("not wanted")

    async def fail_first(message: Message) -> None:
        if message.payload["n"] == 0:
            raise Reject("not here")

    async def are_gone(group: str) -> bool:
        info = await broker.admin.describe_group("letters", group)
        return info.lag == info.pending == 0

    await stage.handle("letters", "a", fail, lambda: are_gone("a"), max_retries=0)
    await stage.handle("letters", "b", fail_first, lambda: are_gone("b"))
    letters = {(letter.group, letter.payload["n"]): letter for letter in await buried(broker, "letters", 6)}
    for n in (1, 4):  # retention would have removed them
        await ask(stage.url, "XDEL", Keys().partition("letters", n % 2), ids[n])
    assert await broker.admin.replay("letters", [letters["a", 4].id]) == 1
    # Another one stays on its way: where the dead letters are is out of reach for a while.
    dead, aside = Keys().dead_letters("letters"), "aside"
    await ask(stage.url, "RENAME", dead, aside)
    await ask(stage.url, "SET", dead, "away")
    await broker.send("letters", {"n": 5}, key="key-5", partition=1)
    await stage.handle("letters", "b", _rejected, lambda: are_gone("b"))
    await ask(stage.url, "DEL", dead)
    await ask(stage.url, "RENAME", aside, dead)
    return {"ids": [f"{id.partition}/{id}" for id in ids]}


async def _rejected(message: Message) -> None:
    if message.payload["n"] == 5:
        raise Reject("on its way")


async def _replaying(stage: Stage) -> Facts:
    """A replay was killed when it had given the letters back, before it had removed them."""
    broker = stage.broker
    await broker.create_topic("replaying", partitions=2)
    ids = [await broker.send("replaying", {"n": n}, partition=n % 2) for n in range(4)]

    async def reject(message: Message) -> None:
        raise Reject("all of them")

    async def are_gone() -> bool:
        return (await broker.admin.describe_topic("replaying")).dead_letters == 4

    await stage.handle("replaying", "g", reject, are_gone)
    for n in (0, 1):
        await ask(stage.url, "XDEL", Keys().partition("replaying", n % 2), ids[n])
    async with Proxy(stage.url) as proxy, Broker(proxy.url) as cut_off:
        proxy.refuse(b"XDEL", b"-ERR killed")
        with suppress(QueueError):
            await cut_off.admin.replay("replaying")
    assert await are_gone()
    return {}


async def _doomed(stage: Stage) -> Facts:
    """Whoever deleted a topic was killed in the middle of it."""
    await stage.broker.create_topic("doomed", partitions=2)
    await stage.send("doomed", range(4))
    await stage.finish("doomed", "g", 2)
    async with Proxy(stage.url) as proxy, Broker(proxy.url) as cut_off:
        last = Keys().partition("doomed", 1).encode()
        proxy.refuse(b"UNLINK\r\n$%d\r\n%s" % (len(last), last), b"-ERR killed")
        with suppress(QueueError):
            await cut_off.admin.delete_topic("doomed")
    there = [await ask(stage.url, "EXISTS", key) for key in (Keys().meta("doomed"), last.decode())]
    assert there == [0, 1]
    return {}


async def _once(stage: Stage) -> Facts:
    """Messages with IDs of their own."""
    await stage.broker.create_topic("once", partitions=2)
    sent = [await stage.broker.send("once", {"n": n}, message_id=f"m-{n}") for n in range(6)]
    sent += [await stage.broker.send("once", {"n": 6}, message_id="m-6", key="key", delay=LATER)]
    return {"ids": [[id.partition, id] for id in sent]}


async def _left(stage: Stage) -> Facts:
    """A group that was deleted, beside one that is there."""
    await stage.broker.create_topic("left", partitions=2)
    await stage.send("left", range(4))
    await stage.finish("left", "gone", 3)
    done = await stage.finish("left", "stays", 2)
    await stage.broker.admin.delete_group("left", "gone")
    return {"finished": {"stays": done}}


async def _legacy(stage: Stage) -> Facts:
    """Streams that ``RedisStreamsQueue`` wrote, consumed as topics."""
    for name in ("app:legacy", "plain"):
        async with RedisStreamsQueue.connect(stage.url, QueueConfig(name, "queue", "c")) as queue:
            await queue.enqueue_many([{"n": n} for n in range(6)])
    topic = stage.broker.legacy("app:legacy")

    async def handle(message: Message) -> None:
        n = message.payload["n"]
        if n == 1:
            raise ValueError("parked")
        if n == 2:
            raise Reject("buried")

    async def is_handled() -> bool:
        info = await stage.broker.admin.describe_group(topic, "g")
        return (info.lag, info.pending, info.partitions[0].retry_depth) == (0, 1, 1)

    await stage.handle(topic, "g", handle, is_handled)
    await buried(stage.broker, topic, 1)
    await stage.broker.send(topic, {"n": 6})
    return {"finished": {"plain": await stage.finish("plain", "g", 2)}}


async def _shop(stage: Stage) -> Facts:
    """Topics of the same names in a namespace."""
    async with Broker(stage.url, namespace=NAMESPACE) as broker:
        shop = Stage(stage.url, broker, stage.stack)
        await broker.create_topic("orders", partitions=2)
        await shop.send("orders", range(100, 106), keys=3)
        return {"finished": {"billing": await shop.finish("orders", "billing", 2)}}


async def _kept(stage: Stage) -> Facts:
    """Retention in all its ways, with something removed by each."""
    broker = stage.broker
    await broker.create_topic("trimmed", retention=Retention(max_len=5, group_expiry=86_400.0))
    await stage.send("trimmed", range(12))
    await stage.finish("trimmed", "g", 9)
    await broker.admin.trim("trimmed")
    await broker.create_topic("acked", retention=Retention(delete_acked=True))
    await stage.send("acked", range(6))
    await stage.finish("acked", "g", 4)
    await broker.admin.trim("acked")
    await broker.create_topic("dropped", retention=Retention(max_len=3, on_full="drop"))
    await stage.send("dropped", range(2))
    await stage.finish("dropped", "g", 1)
    await stage.send("dropped", range(2, 8))
    await broker.create_topic("full", retention=Retention(max_len=2, on_full="reject"))
    await stage.finish("full", "g", 0)
    with suppress(TopicFullError):
        await stage.send("full", range(5))
    names = ("trimmed", "acked", "dropped", "full")
    infos = [await broker.admin.describe_topic(name) for name in names]
    return {name: [info.length, info.by_partition[0].dropped] for name, info in zip(names, infos, strict=True)}


async def _routes(stage: Stage) -> Facts:
    """Where keys go, by each partitioner; and payloads that are bytes."""
    for partitioner in ("murmur2", "consistent"):
        await stage.broker.create_topic(f"by-{partitioner}", partitions=5, partitioner=partitioner)
    async with Broker(stage.url, codec=BytesCodec()) as broker:
        await broker.create_topic("blobs")
        await broker.send("blobs", bytes(range(256)), key="blob")
        return {
            name: {key: (await broker.send(f"by-{name}", b"{}", key=key)).partition for key in _some_keys()}
            for name in ("murmur2", "consistent")
        }


def _some_keys() -> list[str]:
    return [*(f"customer-{n}" for n in range(12)), "", "Zoë", "日本"]


async def _held(stage: Stage) -> Facts:
    """One worker was killed, the next took over, and is at work when all is cut off."""
    await stage.broker.create_topic("held", partitions=2)
    for n in range(12):
        await stage.broker.send("held", {"n": n}, key=f"key-{n % 4}", partition=n % 2)
    brief = options(consumer="killed-worker", lease_ttl=0.5, max_inflight=4)
    first = await stage.broker.consume("held", group="g", options=brief).__aenter__()
    for _ in range(2):
        assert await first.next(10) is not None
    await vanish(first)
    held = options(consumer="old-worker", lease_ttl=15.0, max_inflight=6)
    messages = await stage.stack.enter_async_context(stage.broker.consume("held", group="g", options=held))
    done = []
    for _ in range(2):
        message = await messages.next(10)
        assert message is not None
        await message.ack()
        done.append(message.payload["n"])
    await eventually(lambda: messages.owned == {"held": (0, 1)}, "both partitions")
    assert await messages.next(10) is not None
    await eventually(lambda: messages.inflight == 6, "as many in its hands as it may have")
    return {"finished": {"g": done}}


_SCENES: Final = (
    *(_grown, _growing, _retries, _letters, _replaying, _doomed, _once, _left, _legacy, _shop, _kept, _routes),
    _held,  # at last: its worker is at work when all is cut off
)
