"""A topic that grows while groups come, go, fall behind and come back; and what each of them must still get."""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, TypeVar

from conquiet.errors import QueueError, TopicFullError
from conquiet.kit.clock import ManualClock
from conquiet.message import Outgoing
from conquiet.topics.consume.growth_limits import GrowthLimits
from conquiet.topics.options import BrokerOptions, Retention
from conquiet.topics.produce.producer import Producer
from conquiet.topics.server.external_groups import Position, publish_progress
from conquiet.topics.server.growth import finish_growth
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Registry, Topic
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.keys import Keys
from conquiet.wire.scripts import Script
from conquiet.wire.streams import Entry, entries_of, pack
from tests.topics.scripted import field_of, number, place
from tests.topics.staging import Stage
from tests.topics.stepping import Stepped

__all__ = ["MOST", "Actor", "Group", "World"]

MOST: Final = 6
"""Partitions that the topic gets at most."""
_ORDERS: Final = "orders"
_OWNER: Final = "worker-1#a1"
_LEAD_MS: Final = 1500
_T = TypeVar("_T")

Kind: TypeAlias = Literal["members", "spark", "foreign"]

_PLAN: Final = Script.named("grow_plan")
_TAKE: Final = Script.named("take")


@dataclass
class Group:
    """What a group was promised, by the messages' numbers, and what it has finished of that."""

    name: str
    kind: Kind
    gate: GrowthLimits
    is_live: bool = False
    """Whether whatever is confirmed from now on is promised to it."""
    is_there: bool = False
    """Whether some of it may be on the server."""
    is_orderly: bool = True
    promised: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    latest: dict[bytes, int] = field(default_factory=dict)
    """By key, the message that it was given last for the first time."""

    def begin(self, promised: Iterable[int], *, is_orderly: bool = True) -> None:
        """It is there, as it was asked for, and is owed all of these."""
        self.is_live = self.is_there = True
        self.is_orderly = is_orderly
        self.promised, self.done = set(promised), set()
        self.latest.clear()

    def end(self) -> None:
        """Nothing is owed to it any more."""
        self.is_live = False
        self.promised.clear()


@dataclass
class Actor:
    """Somebody in the middle of something, and what it means when that is done, or never will be."""

    group: Group | None
    work: Stepped
    done: Callable[[], Coroutine[Any, Any, None]]
    dead: Callable[[], None]


@dataclass(frozen=True)
class _Seen:
    """One partition as it is on the server."""

    entries: dict[str, Entry]
    places: dict[str, str]
    pending: dict[str, set[str]]
    dropped: int


class World:
    """The servers, a clock, two producers with caches of their own, and the groups; synchronous, on its own loop."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = ManualClock()
        self.instance = Instance(Connections(Address.of(self.url)), Keys(f"t{secrets.token_hex(6)}"), self.clock)
        self.registry = Registry(self.instance)
        self.stage = Stage(self.instance, self.registry)
        self.producers = [Producer(self.instance, Registry(self.instance), BrokerOptions()) for _ in range(2)]
        kinds: dict[str, Kind] = {"billing": "members", "audit": "members", "query": "spark", "other": "foreign"}
        self.groups = {name: Group(name, kind, GrowthLimits(self.instance, name)) for name, kind in kinds.items()}
        self.actors: list[Actor] = []
        self.where: dict[int, tuple[int, str]] = {}
        self.sent = 0

    def teardown(self) -> None:
        try:
            self.wait(self.come_to_an_end())
        finally:
            self.wait(self.instance.link.aclose())
            self.runner.close()

    def wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self.runner.run(work)

    # --- the topic -------------------------------------------------------------------------------------------

    async def topic(self) -> Topic:
        found = await self.registry.fetch_or_none(_ORDERS)
        assert found is not None
        return found

    async def create(self, kept: Retention) -> None:
        await self.registry.create(_ORDERS, 1, kept)

    async def announce(self, more: int) -> None:
        """Growth begins, unless it has begun or there is enough."""
        topic = await self.topic()
        if topic.next_count is None and topic.partitions < MOST:
            meta = self.instance.keys.meta(_ORDERS)
            count = min(topic.partitions + more, MOST)
            await self.instance.run(meta, _PLAN([meta], self.clock.offset_ms, count, _LEAD_MS))

    async def take_effect(self) -> Topic:
        """The topic, when all producers hold back if it grows."""
        topic = await self.topic()
        if topic.next_count is not None:
            self.clock.advance(max(topic.switch_at + 1 - self.clock.monotonic(), 0))
        return topic

    async def send(self, producer: int, key: str, *, overdue: bool = False) -> None:
        """Send a message. It is nobody's if it is refused, and everybody's once it is confirmed.

        While all hold back nothing is sent, unless whoever was to complete the growth is ``overdue``.
        """
        topic = await self.topic()
        if topic.next_count is not None and not overdue and self.clock.monotonic() > topic.switch_at - 0.5:
            return
        self.sent += 1
        try:
            id = await self.producers[producer].send(_ORDERS, Outgoing(self.sent, key))
        except TopicFullError:
            return
        self.where[self.sent] = (id.partition, str(id))
        for group in self.groups.values():
            if group.is_live:
                group.promised.add(self.sent)

    # --- the groups ------------------------------------------------------------------------------------------

    async def act(
        self,
        group: Group | None,
        work: Callable[[Instance, Registry], Coroutine[Any, Any, Any]],
        done: Callable[[], Coroutine[Any, Any, None]],
        dead: Callable[[], None],
        steps: int,
    ) -> None:
        """Begin something, and go on with it for so many calls to the server."""
        actor = Actor(group, Stepped(self.instance, work), done, dead)
        self.actors.append(actor)
        await self.go_on(actor, steps)

    async def go_on(self, actor: Actor, steps: int) -> None:
        for _ in range(steps):
            if actor.work.done:
                break
            if not await actor.work.step():
                self.clock.advance(0.5)  # it sleeps
        if actor.work.done:
            self.actors.remove(actor)
            if isinstance(actor.work.task.exception(), QueueError):  # it took too long, and has to be repeated
                actor.dead()
            else:
                actor.work.task.result()
                await actor.done()

    async def die(self, actor: Actor) -> None:
        self.actors.remove(actor)
        await actor.work.die()
        actor.dead()

    def is_busy(self, group: Group) -> bool:
        return any(actor.group is group for actor in self.actors)

    async def complete(self, steps: int) -> None:
        """Somebody completes the growth that was announced."""
        topic = await self.take_effect()
        if topic.next_count is not None:
            await self.act(
                None, lambda instance, registry: finish_growth(instance, registry, topic), _nothing, _none, steps
            )

    async def there(self) -> set[int]:
        """The messages that are in the topic now."""
        return {number(words) for seen in await self.look() for _, words in seen.entries.values()}

    async def serve(self, group: Group, most: int, fate: Callable[[int], str]) -> int:
        """A consumer comes, takes what it may from each partition, and leaves; how much it was given."""
        topic = await self.topic()
        resets = [await self._resets(topic, group, index) for index in range(topic.partitions)]
        limits, closed = await group.gate.look(topic, resets)
        given = 0
        for index in range(topic.partitions):
            if index not in closed:
                given += await self._serve(topic, index, group, most, limits.get(index, ""), fate)
        return given

    async def _resets(self, topic: Topic, group: Group, index: int) -> object:
        key = self.instance.keys.lease(self.stage.stream(topic, index), group.name)
        return await self.stage.call(key, "HGET", key, "resets")

    async def _serve(
        self, topic: Topic, index: int, group: Group, most: int, limit: str, fate: Callable[[int], str]
    ) -> int:
        stream, keys = self.stage.stream(topic, index), self.instance.keys
        held = await self.stage.acquire(topic, group.name, index, _OWNER)
        last = (await self._places(stream))[group.name]
        names = [*keys.of_group(stream, group.name)[:1], stream, *keys.of_group(stream, group.name)[1:3]]
        names += [keys.delayed(stream), keys.delayed_items(stream)]
        about = (held.owner, held.epoch, self.clock.offset_ms, group.name)
        _, _, fresh, due, *_ = await self.instance.run(stream, _TAKE(names, *about, most, most, last, limit))
        self._check_order(group, fresh)
        taken = {row[0].decode(): number(row[1]) for row in (*fresh, *due)}
        done = [id for id, what in taken.items() if fate(what) == "ack"]
        if done:
            await self.stage.take(held, 0, *done)
            group.done.update(taken[id] for id in done)
        parked = [id for id in taken if id not in done]
        if parked:
            await self.stage.park(held, *parked, delay=100)
        await self.stage.release(held)
        return len(taken)

    def _check_order(self, group: Group, fresh: list[Any]) -> None:
        """Messages of a key are begun in the order in which they were sent, whichever partitions they are in."""
        for _, words in fresh:
            key, what = field_of(words, b"key"), number(words)
            assert not group.is_orderly or what > group.latest.get(key, 0), (group.name, key, what, group.latest)
            group.latest[key] = what

    async def read(self, group: Group, most: int) -> int:
        """Another program reads from every partition that it finds; how much it was given."""
        topic, given = await self.topic(), 0
        for index in range(topic.partitions):
            ids = await self.stage.read(topic, group.name, most, index)
            if ids:
                await self.stage.ack(topic, group.name, *ids, partition=index)
            group.done.update(what for what, there in self.where.items() if there[0] == index and there[1] in ids)
            given += len(ids)
        return given

    async def publish(self, group: Group, most: int) -> int:
        """A query has read on, and says so; how much it was."""
        topic, positions, read = await self.topic(), dict[int, Position](), set[int]()
        for index, seen in enumerate((await self.look())[: topic.partitions]):
            ids = [id for id in seen.entries if place(id) > place(seen.places[group.name])][:most]
            if ids:
                positions[index] = Position(ids[-1])
                read |= {number(seen.entries[id][1]) for id in ids}
        await publish_progress(self.instance, topic, group.name, positions)
        group.done |= read
        return len(read)

    # --- what must be so -------------------------------------------------------------------------------------

    async def look(self) -> list[_Seen]:
        return [await self._look(self.instance.keys.partition(_ORDERS, index)) for index in range(MOST)]

    async def _look(self, stream: str) -> _Seen:
        trim = self.instance.keys.trim(stream)
        asked = [pack("XRANGE", stream, "-", "+"), pack("HGET", trim, "dropped")]
        entries, dropped = await self.instance.link.call_many(stream, asked)
        places = await self._places(stream)
        pending = await self.instance.link.call_many(
            stream, [pack("XPENDING", stream, name, "-", "+", 1000) for name in places]
        )
        waiting = {name: {row[0].decode() for row in rows} for name, rows in zip(places, pending, strict=True)}
        return _Seen(
            {id.decode(): (id, words) for id, words in entries_of(entries)}, places, waiting, int(dropped or 0)
        )

    async def _places(self, stream: str) -> dict[str, str]:
        [groups] = await self.instance.link.call_many(stream, [pack("XINFO", "GROUPS", stream)])
        return {} if isinstance(groups, Exception) else {row[1].decode(): row[7].decode() for row in groups}

    async def check(self) -> None:
        """What was confirmed is still to be had by every group that was there, or was dropped and counted."""
        seen = await self.look()
        lost: dict[int, set[int]] = defaultdict(set)
        for group in self.groups.values():
            for what in group.promised - group.done:
                index, id = self.where[what]
                if id not in seen[index].entries:
                    lost[index].add(what)
                else:
                    self._check_within_reach(group, what, seen[index], id)
            if not group.is_there and not self.is_busy(group):
                assert not any(group.name in one.places for one in seen), f"{group.name} has come back"
        for index, missing in lost.items():
            assert len(missing) <= seen[index].dropped, f"{missing} are gone from partition {index}"

    def _check_within_reach(self, group: Group, what: int, seen: _Seen, id: str) -> None:
        where = f"message {what} ({id}) of {group.name}"
        assert group.name in seen.places, f"{where} is where the group is not"
        within = place(id) > place(seen.places[group.name]) or id in seen.pending[group.name]
        assert within, f"{where} is behind it, and it has not finished that"

    async def come_to_an_end(self) -> None:
        """Everybody completes what they began, comes back and goes on until nothing is left."""
        for actor in list(self.actors):
            await self.go_on(actor, 1000)
        await self.complete(1000)
        await self.check()
        for group in self.groups.values():
            serving = {"spark": self.publish, "foreign": self.read, "members": self._finish}[group.kind]
            idle = 0
            while group.is_live and idle < 3:  # what was dropped while it waited takes a round to be forgotten
                self.clock.advance(200)
                idle = 0 if await serving(group, 100) else idle + 1
        await self.check()
        there = await self.there()
        for group in self.groups.values():
            left = (group.promised - group.done) & there
            assert not left, f"{group.name} never got {left}"

    async def _finish(self, group: Group, most: int) -> int:
        return await self.serve(group, most, lambda what: "ack")


async def _nothing() -> None:
    pass


def _none() -> None:
    pass
