"""A server that stands still at an exactly known step, for longer than all leases, with two consumers at work.

All leases have run out when it goes on. Nothing is lost, nobody works on what another has, both go on, and what they
own moves once at most before it stays where it is.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from conquiet import Broker, StreamBalancer, Subscription
from conquiet.wire.embedded import EmbeddedRedis
from tests.rigs.asking import ask
from tests.rigs.freezing import PAUSES, Freezer, Pause, Side, all_of, freezer, own_server, paused
from tests.rigs.sizing import IS_FULL
from tests.rigs.waiting import LONG, eventually
from tests.system.balance_crew import Crew, names
from tests.system.pauses import Streams, consumer_here, stays
from tests.system.topics_crew import GROUP, TOPIC, Team
from tests.system.topics_log import Disturbance, check

pytestmark = pytest.mark.system

LEASE: Final = 0.9
LONGER: Final = 2.0
"""Seconds for which a server stands still: more than two leases."""
LONGEST: Final = 6.5
"""And more than a client waits for an answer: connections are given up."""
SIDES: Final[tuple[Side, ...]] = ("before", "after")


@dataclass(frozen=True)
class Step:
    """A command at which the server is stopped, and how one of the consumers comes to send it."""

    command: str
    cause: str = ""
    """What is to become of a message or a stream; or ``hand over`` or ``leave``; or nothing."""
    mode: str = "park"

    @property
    def name(self) -> str:
        return f"{self.cause or 'idle'}: {self.command}"


TOPICS: Final = (
    Step("take new", "done"),
    Step("ack", "done"),
    Step("park", "fail"),
    Step("requeue", "fail", "requeue"),
    Step("bury", "reject"),
    Step("lease_renew"),
    Step("partition_release", "hand over"),
    Step("partition_release", "leave"),
)
BALANCE: Final = (
    Step("balance_take", "add"),
    Step("balance_renew"),
    Step("balance_sweep"),
    Step("balance_finish", "done"),
    Step("balance_release", "hand over"),
    Step("balance_release", "leave"),
)


def cases(steps: tuple[Step, ...]) -> Iterable[tuple[Step, Side, Pause]]:
    """All steps, sides and pauses in a run of full scale; else each step once, and each pause."""
    for number, step in enumerate(steps):
        for at, side in enumerate(SIDES):
            for kind, how in enumerate(PAUSES):
                if IS_FULL or (number % 2 == at and number % 3 == kind):
                    yield step, side, how


# --- topics ------------------------------------------------------------------------------------------------------


@dataclass
class TopicScene:
    """Two consumers of a topic: the first one's way to the server leads through the proxy."""

    step: Step
    side: Side
    server: EmbeddedRedis
    proxy: Freezer
    team: Team
    broker: Broker
    first: Subscription
    second: Subscription
    sent: set[tuple[str, int]] = field(default_factory=set)
    moves: set[tuple[int, str]] = field(default_factory=set)
    """The partitions with each epoch that they were seen in since the server went on."""
    is_watching: bool = True

    async def play(self, how: Pause, seconds: float) -> None:
        await self.broker.create_topic(TOPIC, partitions=2)
        leaving = await self._reach_the_step()
        await self._expect_trouble()
        async with paused(self.server, how, seconds):
            self.proxy.release_soon()
        watching = asyncio.ensure_future(self._watch())
        try:
            if leaving is not None:
                await asyncio.wait_for(leaving, LONG)
            await eventually(self._is_settled, "all partitions have their owners")
            for partition in (0, 1, 0, 1):
                await self._send(partition)
            await self.team.all_is_done(self.broker, self.sent - self._rejected)
            await stays(self._epochs, 1.5 * LEASE, "the partitions stay where they are")
        finally:
            self.is_watching = False
            await watching
        assert len(self.moves) <= 2 * 3, f"the partitions wander: {sorted(self.moves)}"

    async def _reach_the_step(self) -> asyncio.Future[None] | None:
        step, leaving = self.step, None
        await self.first.__aenter__()
        await self.team.owns_all("first")
        if step.cause == "hand over":
            self.proxy.keep(step.command, self.side)
            await self.second.__aenter__()
        else:
            await self.second.__aenter__()
            await eventually(self._is_shared, "each has a partition")
            self.proxy.keep(step.command, self.side)
            if step.cause == "leave":
                leaving = asyncio.ensure_future(self.first.aclose())
            elif step.cause:
                await self._send((await self.team.owners()).index("first"), step.cause)
        await self.proxy.kept()
        return leaving

    async def _send(self, partition: int, do: str = "done") -> None:
        seq = len(self.sent)
        await self.broker.send(TOPIC, {"seq": seq, "do": do}, key=f"k{seq}", partition=partition)
        self.sent.add((f"k{seq}", seq))

    async def _expect_trouble(self) -> None:
        at = await self.team.now()
        for one in (self.first, self.second):
            held = await self.team.held(one.consumer)
            self.team.disturbances.append(Disturbance("stop", one.consumer, at, held))

    @property
    def _rejected(self) -> set[tuple[str, int]]:
        return {("k0", 0)} if self.step.cause == "reject" else set()

    async def _is_shared(self) -> bool:
        return sorted(await self.team.owners()) == ["first", "second"]

    async def _is_settled(self) -> bool:
        if self.step.cause == "leave":
            return await self.team.owners() == ["second", "second"]
        return await self._is_shared()

    async def _epochs(self) -> list[str]:
        streams = await self.team.partitions()
        return [await ask(self.team.url, "HGET", self.team.keys.lease(stream, GROUP), "epoch") for stream in streams]

    async def _watch(self) -> None:
        while self.is_watching:
            self.moves.update(enumerate(await self._epochs()))
            await asyncio.sleep(0.02)

    async def judge(self) -> None:
        """After both have left."""
        records = self.team.log.read().records
        judged = [record for record in records if record.message not in self._rejected]
        assert check(self.sent - self._rejected, judged, self.team.disturbances) == []
        letters = await self.broker.admin.dead_letters(TOPIC)
        assert [(letter.key, letter.payload["seq"]) for letter in letters] == list(self._rejected)
        info = await self.broker.admin.describe_group(TOPIC, GROUP)
        assert (info.lag, info.pending) == (0, 0)
        entries = [await ask(self.team.url, "XLEN", stream) for stream in await self.team.partitions()]
        assert sum(entries) == len(self.sent) + (self.step.mode == "requeue"), "a message is there twice"


async def play_topics(directory: Path, step: Step, side: Side, how: Pause, seconds: float = LONGER) -> None:
    directory.mkdir()
    gate = directory / "gate"
    gate.touch()
    async with own_server() as server, freezer(server.url) as proxy:
        with Team.hired(server.url, directory) as team:
            async with team.broker() as broker, Broker(proxy.url, namespace=team.namespace) as apart:
                first = consumer_here(apart, team, "first", LEASE, step.mode, gate)
                second = consumer_here(broker, team, "second", LEASE, step.mode, gate)
                scene = TopicScene(step, side, server, proxy, team, broker, first, second)
                try:
                    await scene.play(how, seconds)
                finally:
                    await asyncio.wait_for(asyncio.gather(first.aclose(), second.aclose()), LONG)
                await scene.judge()


async def test_consumers_of_a_topic_go_on_after_a_server_that_stood_still(tmp_path: Path) -> None:
    scenes: dict[str, Callable[[], Any]] = {}
    for number, (step, side, how) in enumerate(cases(TOPICS)):
        scenes[f"{how} {side} {step.name}"] = partial(play_topics, tmp_path / str(number), step, side, how)
    for step in TOPICS if IS_FULL else ():
        place = tmp_path / f"long {step.name}"
        scenes[f"long {step.name}"] = partial(play_topics, place, step, "after", "stopped", LONGEST)
    await all_of(scenes, 8)


# --- balance -----------------------------------------------------------------------------------------------------


@dataclass
class BalanceScene:
    """Two consumers of streams: the first one's way to the server leads through the proxy."""

    step: Step
    side: Side
    server: EmbeddedRedis
    proxy: Freezer
    crew: Crew
    work: Streams
    running: AsyncExitStack
    streams: list[str] = field(default_factory=lambda: names(4))

    async def play(self, how: Pause, seconds: float) -> None:
        leaving = await self._reach_the_step()
        async with paused(self.server, how, seconds):
            self.proxy.release_soon()
        calls = len(self.work.begun)
        if leaving is not None:
            await asyncio.wait_for(leaving, LONG)
        await eventually(self._is_settled, "each stream has its owner, who is at work on it")
        await stays(self._owned, 1.5 * LEASE, "the streams stay where they are")
        again = [stream for _, stream, _ in self.work.begun[calls:]]
        assert all(again.count(stream) <= 3 for stream in self.streams), f"the streams wander: {again}"

    async def _reach_the_step(self) -> asyncio.Future[None] | None:
        step, leaving = self.step, None
        first = await self._enter("first", self.proxy.url)
        if step.cause != "hand over":
            await self._enter("second", self.crew.url)
        if step.cause == "add":
            self.proxy.keep(step.command, self.side)
            await self.crew.add(self.streams)
        else:
            await self.crew.add(self.streams)
            await eventually(self._is_reached, "they are at work")
            self.proxy.keep(step.command, self.side)
            if step.cause == "leave":
                leaving = asyncio.ensure_future(first.aclose())
            elif step.cause == "hand over":
                await self._enter("second", self.crew.url)
            elif step.cause == "done":
                done = next(stream for stream, owner in self.work.owners().items() if owner == "first")
                self.work.done.add(done)
        await self.proxy.kept()
        return leaving

    async def _enter(self, name: str, url: str) -> StreamBalancer:
        return await self.running.enter_async_context(at_work(name, url, self.crew.service, self.work.of(name)))

    async def _is_reached(self) -> bool:
        wanted = {"first"} if self.step.cause == "hand over" else {"first", "second"}
        return len(self.work.owners()) == len(self.streams) and set(self.work.owners().values()) == wanted

    async def _is_settled(self) -> bool:
        streams = set(self.streams) - self.work.done
        wanted = {"second"} if self.step.cause == "leave" else {"first", "second"}
        at_work, known = self.work.owners(), await self.crew.owners()
        loads = Counter(known.values())
        is_fair = set(loads) == wanted and max(loads.values()) - min(loads.values()) <= 1
        return at_work == known and set(known) == streams and is_fair

    async def _owned(self) -> Any:
        return await ask(self.crew.url, "HGETALL", self.crew.keys.owners)

    def judge(self) -> None:
        """Nobody was ever at work on what another had; and what is done is done once."""
        work = self.work
        assert work.together == []
        epochs = [(stream, epoch) for _, stream, epoch in work.begun]
        assert len(set(epochs)) == len(epochs)
        assert sorted(work.finished) == sorted(work.done)


@asynccontextmanager
async def at_work(name: str, url: str, service: str, handler: Any) -> AsyncIterator[StreamBalancer]:
    """A consumer that runs a handler on its streams."""
    async with StreamBalancer.connect(
        url, service=service, consumer=name, lease_ttl=LEASE, sweep_interval=LEASE / 2, handle_signals=False
    ) as balancer:
        running = asyncio.ensure_future(balancer.run(handler))
        try:
            yield balancer
        finally:
            balancer.stop()
            await asyncio.wait_for(running, LONG)


async def play_balance(directory: Path, step: Step, side: Side, how: Pause, seconds: float = LONGER) -> None:
    directory.mkdir()
    async with own_server() as server, freezer(server.url) as proxy, AsyncExitStack() as running:
        with Crew.hired(server.url, directory) as crew:
            scene = BalanceScene(step, side, server, proxy, crew, Streams(), running)
            await scene.play(how, seconds)
            scene.judge()


async def test_owners_of_streams_go_on_after_a_server_that_stood_still(tmp_path: Path) -> None:
    scenes: dict[str, Callable[[], Any]] = {}
    for number, (step, side, how) in enumerate(cases(BALANCE)):
        scenes[f"{how} {side} {step.name}"] = partial(play_balance, tmp_path / str(number), step, side, how)
    for step in BALANCE if IS_FULL else ():
        place = tmp_path / f"long {step.name}"
        scenes[f"long {step.name}"] = partial(play_balance, place, step, "after", "stopped", LONGEST)
    await all_of(scenes, 8)
