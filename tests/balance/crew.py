"""The consumers of one service that only one test has: how they join, are listened to, and die."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from redis.asyncio import Redis, RedisCluster

from conquiet.balance import (
    StreamAdded,
    StreamBalancer,
    StreamDisowned,
    StreamEvent,
    StreamExpired,
    StreamLease,
    StreamTerminated,
)
from conquiet.kit.clock import Clock, ManualClock
from conquiet.wire.keys import BalanceKeys
from tests.rigs.asking import ask
from tests.rigs.clocks import WatchedClock
from tests.rigs.scraping import samples
from tests.rigs.waiting import eventually

__all__ = ["Crew", "Handler", "Member", "entry", "stuck"]

_E = TypeVar("_E", StreamAdded, StreamDisowned, StreamExpired, StreamTerminated)


def entry(stream: object, info: object = None) -> str:
    """What a foreign writer puts into the input to hand a stream in."""
    return json.dumps({"DataStreamName": stream, "Info": {} if info is None else info})


async def stuck(stream: str, lease: StreamLease) -> None:
    """A handler that never ends by itself."""
    await asyncio.Event().wait()


class Member:
    """A consumer, and all that it was told so far if somebody listens."""

    def __init__(self, balancer: StreamBalancer) -> None:
        self.balancer = balancer
        self.events: list[StreamEvent] = []
        self.task: asyncio.Task[None] | None = None
        self.is_listening = False
        self.is_gone = False
        """Whether it ended without a word."""
        self.looks = 0
        """How often it has looked for streams without an owner."""
        self._sweep, balancer._ledger.sweep = balancer._ledger.sweep, self._counted  # type: ignore[method-assign]

    async def _counted(self, *args: Any, **options: Any) -> Any:
        swept = await self._sweep(*args, **options)
        self.looks += 1
        return swept

    @property
    def owned(self) -> set[str]:
        return set(self.balancer.owned)

    def told(self, kind: type[_E]) -> list[_E]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def added(self) -> list[str]:
        return [event.stream for event in self.told(StreamAdded)]

    @property
    def lost(self) -> list[str]:
        return [event.stream for event in self.told(StreamDisowned)]

    @property
    def expired(self) -> list[str]:
        return [event.stream for event in self.told(StreamExpired)]

    def listen(self) -> None:
        self.is_listening = True
        self.task = asyncio.ensure_future(self._listen())

    async def _listen(self) -> None:
        async for event in self.balancer.events():
            self.events.append(event)

    def run(self, handler: Any) -> None:
        self.task = asyncio.ensure_future(self.balancer.run(handler))

    async def ended(self) -> None:
        """Return when its listening or running has ended; what it raised is raised."""
        assert self.task is not None
        await asyncio.wait_for(self.task, 20)

    async def owns(self, *streams: str) -> None:
        """Return once it owns exactly these, and has been told so if it listens."""
        await eventually(
            lambda: self.owned == set(streams) and self._has_heard_all,
            f"{self.balancer.consumer} to own {streams}, not {self.owned}",
        )

    @property
    def _has_heard_all(self) -> bool:
        is_listening = self.is_listening and self.task is not None and not self.task.done()
        return not is_listening or not self.balancer._consumer.event_buffer._waiting

    async def has_looked(self) -> None:
        """Return once it has looked for what was lost before it began, which it takes in any case."""
        await eventually(lambda: not self.balancer._consumer._is_recovering, "its first look")

    async def looks_again(self, times: int = 2) -> None:
        """Return once it has looked so often more for streams without an owner."""
        before = self.looks
        await eventually(lambda: self.looks >= before + times, f"{times} more looks")

    async def vanish(self) -> None:
        """End as a killed process would: nothing is released, and nobody is told."""
        self.is_gone = True
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])
        consumer = self.balancer._consumer
        await consumer._background.aclose()
        await consumer.streams.aclose()
        await self.balancer._ledger.link.aclose()


class Handler:
    """A handler of streams that remembers its calls, and then does as ``act`` says."""

    def __init__(self, act: Callable[[str, StreamLease], Awaitable[Any]] = stuck) -> None:
        self.calls: list[tuple[str, int]] = []
        self.ended: list[str] = []
        self._act = act

    async def __call__(self, stream: str, lease: StreamLease) -> None:
        self.calls.append((stream, lease.epoch))
        try:
            await self._act(stream, lease)
        finally:
            self.ended.append(stream)

    @property
    def streams(self) -> list[str]:
        return [stream for stream, _ in self.calls]


class Crew:
    """Makes consumers of one service, and looks past them at what is in Redis."""

    def __init__(self, url: str, clock: ManualClock) -> None:
        self.url = url
        self.clock = clock
        self.service = f"t{secrets.token_hex(6)}"
        self.keys = BalanceKeys(self.service)
        self.members: list[Member] = []

    def make(self, consumer: str = "a", *, url: str = "", clock: Clock | None = None, **options: Any) -> StreamBalancer:
        """A consumer that looks often, and is not opened."""
        given = {"service": self.service, "handle_signals": False, "sweep_interval": 0.2}
        return StreamBalancer(url or self.url, consumer=consumer, clock=clock or self.clock, **{**given, **options})

    async def join(self, consumer: str = "a", *, listen: bool = True, **options: Any) -> Member:
        """A consumer that works until the test ends."""
        member = Member(self.make(consumer, **options))
        self.members.append(member)
        await member.balancer.open()
        if listen:
            member.listen()
        return member

    async def running(self, consumer: str, handler: Any, **options: Any) -> Member:
        """A consumer that runs a handler until the test ends."""
        member = await self.join(consumer, listen=False, **options)
        member.run(handler)
        return member

    async def die(self, member: Member) -> None:
        """It ends as a killed process would, and its time runs out at once."""
        name, held = member.balancer.consumer, member.owned
        await member.vanish()
        await self.ask("ZREM", self.keys.members, name)
        for stream in held:
            await self.ask("ZADD", self.keys.leases, "XX", 1, stream)

    async def aclose(self) -> None:
        for member in reversed(self.members):
            if not member.balancer._life.is_leaving:
                await member.balancer.aclose()
            if member.task is not None:
                await asyncio.wait([member.task])

    # --- in Redis -------------------------------------------------------------------------------------------------

    async def ask(self, *words: str | int, **options: Any) -> Any:
        return await ask(self.url, *words, **options)

    async def add(self, *streams: str) -> list[str]:
        """Hand streams in, by somebody who is no consumer."""
        producer = self.make("producer")
        try:
            return [await producer.add_stream(stream) for stream in streams]
        finally:
            await producer.aclose()

    async def put(self, *fields: str) -> str:
        """An entry of a foreign writer."""
        return str(await self.ask("XADD", self.keys.input, "*", *fields))

    async def tick(self, seconds: float) -> None:
        """Skip so much time, and return once the loops of those who are alive have had their turns."""
        clock = self.clock
        assert isinstance(clock, WatchedClock)
        before = clock.waits
        clock.advance(seconds)
        await eventually(lambda: clock.waits >= before + 3, "loops that go on")

    async def lag_behind(self, seconds: float) -> None:
        """Let time pass for all who are alive: each of them renews in between, as often as it would."""
        for _ in range(round(seconds / 4)):
            before = await self._beats()
            self.clock.advance(4)
            await eventually(self._beaten_since(before), "all who are alive to renew")

    def _beaten_since(self, before: dict[str, int]) -> Callable[[], Awaitable[bool]]:
        # A renewal is due up to a second later, at random: that second is skipped too, but no more of it than it takes.
        left = 10

        async def have_beaten() -> bool:
            nonlocal left
            now = await self._beats()
            if all(now.get(name, 0) >= at + 3000 for name, at in before.items()):
                return True
            if left:
                left -= 1
                self.clock.advance(0.1)
            return False

        return have_beaten

    async def _beats(self) -> dict[str, int]:
        alive = {one.balancer.consumer for one in self.members if not one.is_gone and not one.balancer._life.is_leaving}
        rows = await self.ask("ZRANGE", self.keys.members, 0, -1, "WITHSCORES", withscores=False)
        found = {str(name): int(float(score)) for name, score in zip(rows[::2], rows[1::2], strict=True)}
        return {name: found.get(name, 0) for name in alive}

    async def pending(self) -> dict[str, str]:
        """Who has which entry of the input, by its ID."""
        rows = await self.ask("XPENDING", self.keys.input, self.keys.group, "-", "+", 10_000, parse_detail=True)
        return {row["message_id"]: row["consumer"] for row in rows}

    async def aside(self) -> list[dict[str, bytes]]:
        """The entries that were set aside, whose parts may be no text."""
        client = Redis.from_url if "cluster" not in self.url else RedisCluster.from_url
        async with client(self.url.replace("redis+cluster", "redis").split(",")[0]) as link:
            rows: Any = await link.xrange(self.keys.bad)
        return [{name.decode(): value for name, value in fields.items()} for _, fields in rows]

    async def size(self) -> int:
        return int(await self.ask("XLEN", self.keys.input))

    async def state(self) -> dict[str, Any]:
        """All that Redis knows of the streams and their owners."""
        keys = self.keys
        return {
            "input": await self.ask("XRANGE", keys.input, "-", "+"),
            "owners": await self.ask("HGETALL", keys.owners),
            "leases": await self.ask("ZRANGE", keys.leases, 0, -1),
            "epoch": await self.ask("GET", keys.epochs),
            "positions": await self.positions(),
            "pending": await self.pending(),
        }

    async def positions(self) -> dict[str, str]:
        """How far each stream was read; one field is there always, so that the key is."""
        found: dict[str, str] = await self.ask("HGETALL", self.keys.positions)
        return {stream: id for stream, id in found.items() if stream}

    def counted(self, what: str, **labels: str) -> float:
        """What a metric of this service shows, over all labels that are not given."""
        name, wanted = f"conquiet_balance_{what}", {"service": self.service, **labels}
        return sum(sample.value for sample in samples(name) if wanted.items() <= sample.labels.items())
