"""Paths through the library, each with every command that it sends: what is there before, who walks, what holds after.

A path is walked by a victim whose connection leads through a proxy. The names of the commands are those of
:mod:`tests.rigs.tracing`; a path that sends another one than is listed here fails its test.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode

from conquiet.errors import QueueError, Reject
from conquiet.kit.clock import ManualClock
from conquiet.kit.policy import Backoff, RetryPolicy
from conquiet.message import Message
from conquiet.topics.broker import Broker
from conquiet.topics.consume.subscription import Subscription
from conquiet.topics.options import Retention, SubscribeOptions
from conquiet.topics.server.dead_letters import forward
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Registry, Topic
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.keys import Keys
from tests.rigs.asking import ask
from tests.rigs.waiting import eventually
from tests.topics.staging import Stage

__all__ = ["BACKGROUND", "GROUP", "JOINING", "LEASE", "LIVING", "OPERATIONS", "PATHS", "TOPIC", "Scene"]

TOPIC: Final = "orders"
GROUP: Final = "billing"
LEASE: Final = 45.0
"""Seconds for which the victim has what it has: longer than any test waits for it."""
AFTER_LEASE: Final = 60.0
"""Seconds after which no lease of the dead is good any more, nor are they members."""

BACKGROUND: Final = {"CLIENT", "GET generation", "XREAD", "XLEN dead", "take nothing", "lease_renew"}
"""What comes whenever it comes; it changes nothing, or is done again before long."""

JOINING: Final = (
    *("topic_look", "SISMEMBER registry", "SCARD partitions", "topic_look", "SISMEMBER groups", "SADD groups"),
    *("group_missing", "XINFO stream"),
    *("XGROUP stream", "member_beat", "topic_look", "member_beat", "leases_look", "partition_acquire", "takeover"),
)
LIVING: Final = ("take new", "ack")
_FORWARDING: Final = ("XLEN dead", "forward: claim", "XRANGE dead", "forward: append", "XDEL dead", "forward: end")

PATHS: Final[dict[str, tuple[str, ...]]] = {
    "join": JOINING,
    "take over": ("takeover: entries", "ack"),
    "suspect": ("takeover: entries", "lease_suspect", "ack"),
    "ack": ("take new", "ack"),
    "park": ("take new", "park", "take due", "ack"),
    "requeue": ("take new", "requeue", "take new", "ack"),
    "requeue later": ("take new", "requeue", "take new", "ack"),
    "bury": ("take new", "bury", *_FORWARDING),
    "leave": ("take new", "ack", "partition_release", "member_leave"),
    "hand over": ("topic_look", "member_beat", "leases_look", "partition_release", "members_call"),
    "replay": (
        *("topic_look", "partition_look", "SMEMBERS groups", *_FORWARDING),
        *("XREVRANGE dlq", "XRANGE dlq", "replay_begin", "XRANGE dlq", "replay", "XDEL dlq", "replay_end"),
    ),
    "trim": ("topic_look", "partition_look", "trim: more", "trim: last"),
}
"""The commands of each path, in order. A consumer's joining comes before, and its usual life around them."""

OPERATIONS: Final = ("replay", "trim")
"""Paths that are walked by a call which fails when it is disturbed, and is repeated then."""


def _client(url: str) -> Redis | RedisCluster:
    address = Address.of(url)
    if address.kind == "cluster":
        return RedisCluster(
            startup_nodes=[ClusterNode(*node) for node in address.seeds], protocol=2, decode_responses=True
        )
    return Redis.from_url(url, protocol=2, decode_responses=True)


@dataclass
class Scene:
    """A topic that nobody else has, and what happens to it."""

    url: str
    namespace: str
    path: str
    sent: set[int] = field(default_factory=set)
    kept: list[str] = field(default_factory=list)
    """What trimming has to leave."""

    def __post_init__(self) -> None:
        self.clock = ManualClock()
        """The time of everyone but the victim."""
        self.instance = Instance(Connections(Address.of(self.url)), Keys(self.namespace), self.clock)
        self.broker = Broker(self.url, namespace=self.namespace, clock=self.clock)
        self.redis = _client(self.url)
        self.walker: asyncio.Task[None] | None = None
        self.topic = Topic(TOPIC, 2 if self.path == "hand over" else 1)

    async def aclose(self) -> None:
        await self.broker.aclose()
        await self.instance.link.aclose()
        await self.redis.aclose()

    @property
    def streams(self) -> list[str]:
        return self.topic.streams(self.instance.keys)

    @property
    def is_operation(self) -> bool:
        return self.path in OPERATIONS

    # --- before ----------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        kept = Retention(delete_acked=True, group_expiry=3600.0) if self.path == "trim" else Retention()
        await self.broker.create_topic(TOPIC, partitions=self.topic.partitions, retention=kept)
        stage = Stage(self.instance, Registry(self.instance))
        if self.path == "trim":
            await self._prepare_trim(stage)
            return
        await self.send(3)
        if self.path in ("take over", "suspect"):
            await stage.acquire(self.topic, GROUP, owner="dead#1")
            await self.redis.xreadgroup(GROUP, "dead#1", {self.streams[0]: ">"}, count=2)
            await self.redis.hset(self.instance.keys.lease(self.streams[0], GROUP), "until_ms", "1")
            for id in await stage.pending(self.topic, GROUP) if self.path == "suspect" else ():
                await self.redis.hset(self.instance.keys.attempts(self.streams[0], GROUP), f"c:{id}", "2")
        elif self.path == "replay":
            ids = await self.die_again()
            await self.redis.xdel(self.streams[0], ids[1])  # of this one a copy has to be made

    async def die_again(self) -> list[str]:
        """Make dead letters of all messages; the last one is not forwarded yet. Their IDs."""
        stage = Stage(self.instance, Registry(self.instance))
        held = await stage.acquire(self.topic, GROUP)
        await self.redis.xreadgroup(GROUP, held.owner, {self.streams[0]: ">"})
        ids = await stage.pending(self.topic, GROUP)
        await stage.bury(held, *ids[:-1])
        await forward(self.instance, self.topic, 0, GROUP)
        await stage.bury(held, ids[-1])
        await stage.release(held)
        return ids

    async def _prepare_trim(self, stage: Stage) -> None:
        ids = await stage.add(self.topic, 250)
        for group, finished in (("quick", 250), ("slow", 229)):
            await stage.create_group(self.topic, group)
            await stage.read(self.topic, group, min(finished + 1, 250))
            await stage.ack(self.topic, group, *ids[:finished])
        self.kept = ids[229:]

    async def send(self, count: int) -> None:
        """More messages, on each partition."""
        for partition in range(self.topic.partitions):
            for _ in range(count):
                number = len(self.sent)
                self.sent.add(number)
                await self.broker.send(TOPIC, number, partition=partition)

    # --- walking -----------------------------------------------------------------------------------------

    async def walk(self, broker: Broker) -> None:
        """What the victim does. A consumer that cannot begin tries again, and ends when it is cancelled."""
        if self.is_operation:
            await self.operate(broker)
            return
        while True:
            try:
                async with self.consumer(broker) as subscription:
                    if self.path == "leave":
                        await eventually(self.is_settled, "all is handled")
                        return
                    await subscription.wait()
            except QueueError as error:
                if type(error) is not QueueError:
                    raise
                await asyncio.sleep(0.02)  # what a program does that tries again, and not without end

    async def operate(self, broker: Broker) -> None:
        if self.path == "replay":
            await broker.admin.replay(TOPIC)
        else:
            await broker.admin.trim(TOPIC)

    def consumer(self, broker: Broker) -> Subscription:
        delay = 0.02 if self.path == "requeue later" else 0.0
        mode: Any = "requeue" if self.path.startswith("requeue") else "park"
        retry = RetryPolicy(backoff=Backoff(delay, kind="fixed"), mode=mode)
        options = SubscribeOptions(
            retry=retry, poll_timeout=0.2, drain_timeout=1.0, handle_signals=False, lease_ttl=LEASE
        )
        return broker.subscribe(TOPIC, group=GROUP, handler=self.handle, options=options)

    async def handle(self, message: Message) -> None:
        if self.path in ("park", "requeue", "requeue later") and message.retry_count == 0:
            raise ValueError("the first attempt fails")
        if self.path == "bury" and message.payload % 2:
            raise Reject("odd")
        await ask(self.url, "RPUSH", f"{self.namespace}:handled", message.payload)

    # --- looking -------------------------------------------------------------------------------------------

    async def handled(self) -> Counter[int]:
        return Counter(map(int, await self.redis.lrange(f"{self.namespace}:handled", 0, -1)))

    async def dead(self) -> Counter[int]:
        letters = await self.broker.admin.dead_letters(TOPIC)
        return Counter(letter.payload for letter in letters)

    async def entries(self) -> list[tuple[str, dict[str, str]]]:
        entries: list[tuple[str, dict[str, str]]] = await ask(self.url, "XRANGE", self.streams[0], "-", "+")
        return entries

    async def owners(self) -> set[str]:
        leases = [self.instance.keys.lease(stream, GROUP) for stream in self.streams]
        return {str(await self.redis.hget(lease, "owner") or "") for lease in leases}

    async def is_settled(self) -> bool:
        """Whether nothing is left to do."""
        walker = self.walker
        if walker is not None and walker.done() and not walker.cancelled() and not self.is_operation:
            walker.result()  # whatever ended a consumer is the test's failure
        waiting = [await self._waiting(stream) for stream in self.streams]
        return not any(waiting) and self.sent == {*await self.handled(), *await self.dead()}

    async def settles(self) -> bool:
        """As before, while time goes on for whoever waits for a lease to run out."""
        self.clock.advance(1.0)
        return await self.is_settled()

    async def _waiting(self, stream: str) -> int:
        keys = self.instance.keys
        async with self.redis.pipeline(transaction=False) as pipeline:
            pipeline.xinfo_groups(stream)
            pipeline.xinfo_stream(stream)
            pipeline.zcard(keys.retry(stream, GROUP))
            pipeline.zcard(keys.delayed(stream))
            pipeline.xlen(keys.outbox(stream, GROUP))
            groups, about, *counts = await pipeline.execute()
        group = next((row for row in groups if row["name"] == GROUP), None)
        if group is None:
            return 1
        is_behind = group["last-delivered-id"] != about["last-generated-id"]
        return int(group["pending"] + is_behind + sum(counts))

    # --- after ---------------------------------------------------------------------------------------------

    async def rescue(self) -> None:
        """A healthy consumer, after the victim's time is over; an operation is repeated first."""
        self.clock.advance(AFTER_LEASE)
        if self.is_operation:
            await self.operate(self.broker)
        if self.path == "trim":
            return
        async with self.consumer(self.broker):
            await self.send(1)
            await eventually(self.settles, f"all is settled: {self.path}")

    async def check(self) -> None:
        """Nothing is lost, nothing is stuck, and nobody holds anything."""
        if self.path == "trim":
            assert [id for id, _ in await self.entries()] == self.kept
            return
        handled, dead = await self.handled(), await self.dead()
        rejected = {number for number in self.sent if self.path == "bury" and number % 2}
        assert dead == Counter(rejected)
        assert set(handled) == self.sent - rejected
        assert await self.is_settled()
        await self._check_nobody_is_left()
        if self.path == "replay":
            assert handled == Counter(self.sent)
        if self.path.startswith("requeue"):
            copied = Counter(int(fields["payload"]) for _, fields in await self.entries() if "retryCount" in fields)
            assert copied == Counter(self.sent)

    async def _check_nobody_is_left(self) -> None:
        keys = self.instance.keys
        assert await self.owners() == {""}
        assert await self.redis.zrange(keys.members(TOPIC, GROUP), 0, -1) == []
        for stream in self.streams:
            assert await self.redis.hgetall(keys.attempts(stream, GROUP)) == {}
            assert [row["name"] for row in await self.redis.xinfo_consumers(stream, GROUP)] == []
