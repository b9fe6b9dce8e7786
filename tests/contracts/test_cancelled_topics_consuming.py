"""Consuming, cancelled wherever it waits: what was taken is delivered again, and nothing stays owned for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest

from conquiet import Delivery, Message
from conquiet.topics.consume.handling import Handler
from conquiet.topics.server.topics import Topic, TopicLike
from conquiet.wire.scripts import Script
from tests.contracts.topics_cancellation import Case, Ground, Place, each, ground_at, scene_of, servers
from tests.contracts.topics_consumers import SENT, TTL, Consumed, Entered
from tests.rigs.cancelling import How, cancelled_everywhere
from tests.rigs.waiting import LONG, eventually
from tests.topics.consuming import buried, impatient

pytestmark = servers

_A_WHILE: Final = 0.2
"""Seconds after which a subscription is stopped."""


@pytest.fixture
async def ground(url: str) -> AsyncIterator[Ground]:
    async with ground_at(url) as ground:
        yield ground


# --- entering ---------------------------------------------------------------------------------------------------------


class EnterConsume(Consumed):
    async def call(self) -> Any:
        await self.consumer.__aenter__()

    async def check(self) -> None:
        if self.is_done:
            message = await self.messages.next(LONG)
            assert message is not None
            await message.ack()
            self.handled.append(message.id)
            await self.consumer.aclose()
        await super().check()


class EnterSubscribe(Consumed):
    subscribes = True

    async def call(self) -> Any:
        await self.consumer.__aenter__()

    async def check(self) -> None:
        if self.is_done:
            await self.all_handled.wait()
            await self.consumer.aclose()
        await super().check()


class EnterLegacy(EnterConsume):
    async def prepare(self) -> None:
        await super().prepare()
        self.stream = f"{self.ground.namespace}:{self.topic}"
        self.consumer = self.new()
        self.sent = [await self.other.send(self.source, {"n": n}) for n in range(SENT)]

    @property
    def source(self) -> TopicLike:
        return self.broker.legacy(getattr(self, "stream", self.topic))


class EnterTwo(EnterConsume):
    """Of two topics, one after the other."""

    async def prepare(self) -> None:
        await super().prepare()
        await self.other.create_topic(f"{self.topic}-second")
        options = impatient(lease_ttl=TTL)
        self.consumer = self.broker.consume([self.topic, f"{self.topic}-second"], group="g", options=options)


class EnterPlain(EnterSubscribe):
    """With a handler that runs in threads."""

    @property
    def handler(self) -> Handler:
        loop = asyncio.get_running_loop()

        def handle(message: Message) -> None:
            self.handled.append(message.id)
            if len(self.handled) == len(self.sent):
                loop.call_soon_threadsafe(self.all_handled.set)

        return handle


# --- pulling ----------------------------------------------------------------------------------------------------------


class Next(Entered):
    """The message comes while it is waited for."""

    least = 1
    count = 0

    async def call(self) -> Any:
        self.sending = asyncio.create_task(self.other.send(self.topic, "late"))
        return await self.messages.next(LONG)

    async def check(self) -> None:
        message = self.result if self.is_done else await self.messages.next(LONG)
        assert message is not None
        assert message.id == await self.sending
        await message.ack()
        await super().check()


class Iterate(Entered):
    """Cancelled between two messages or while one is settled, iteration goes on with the next."""

    async def call(self) -> Any:
        await self.pulled()

    async def pulled(self) -> None:
        if len(self.handled) < SENT:
            async for message in self.messages:
                self.handled.append(message.id)
                await message.ack()
                if len(self.handled) == SENT:
                    break

    async def check(self) -> None:
        await self.pulled()
        assert self.handled == self.sent
        await super().check()


class Settle(Entered):
    """The first of three, of one key: the others wait for it."""

    least = 1

    async def prepare(self) -> None:
        await super().prepare()
        message = await self.messages.next(LONG)
        assert message is not None
        self.message: Delivery = message

    async def others(self) -> None:
        for id in self.sent[1:]:
            message = await self.messages.next(LONG)
            assert message is not None
            assert message.id == id
            await message.ack()


class Ack(Settle):
    async def call(self) -> Any:
        await self.message.ack()

    async def check(self) -> None:
        await self.others()
        await super().check()


class Reject(Settle):
    async def call(self) -> Any:
        await self.message.reject("no")

    async def check(self) -> None:
        await self.others()
        [letter] = await buried(self.other, self.topic)
        assert letter.original_id == self.message.id
        await super().check()


class Retry(Settle):
    async def call(self) -> Any:
        await self.message.retry(delay=60.0)

    async def check(self) -> None:
        await self.others()
        self.ground.clock.advance(61.0)
        again = await self.messages.next(LONG)
        assert again is not None
        assert (again.id, again.retry_count) == (self.message.id, 1)
        await again.ack()
        await super().check()


class Wait(Entered):
    """Who waits for a subscription to end is cancelled: that goes on."""

    least = 1
    subscribes = True

    async def prepare(self) -> None:
        await super().prepare()
        await self.all_handled.wait()

    async def call(self) -> Any:
        stopping = asyncio.get_running_loop().call_later(_A_WHILE, self.consumer.stop)
        try:
            await self.consumer.wait()
        finally:
            stopping.cancel()

    async def check(self) -> None:
        if self.consumer.health().healthy:  # else it was asked to stop before
            await self.other.send(self.topic, "more")
        await super().check()


ENTERING: Final = [EnterConsume, EnterSubscribe, EnterPlain, EnterLegacy, EnterTwo]
PULLING: Final = [Next, Iterate, Ack, Reject, Retry, Wait]


@each(ENTERING, "ahead")
async def test_who_is_cancelled_while_it_joins_gives_up_what_it_has(
    ground: Ground, kind: type[Case], how: How, place: Place
) -> None:
    await cancelled_everywhere(scene_of(ground, kind), how)


@each(PULLING, "behind")
async def test_a_cancelled_pull_or_settlement_loses_nothing(
    ground: Ground, kind: type[Case], how: How, place: Place
) -> None:
    await cancelled_everywhere(scene_of(ground, kind), how, at_least=kind.least)


async def test_a_partition_that_was_given_to_a_consumer_that_is_cancelled_is_given_back(ground: Ground) -> None:
    """The server had given it, and its answer was on its way: nobody has to wait until the lease has run out."""
    case = EnterConsume(ground)
    await case.prepare()
    async with case.other.consume(case.topic, group="before"):
        pass  # so that the server knows the script
    hold = ground.proxy.hold(Script.named("partition_acquire").sha.encode(), once=True)
    entering = asyncio.create_task(case.consumer.__aenter__())
    await asyncio.wait_for(hold.caught.wait(), LONG)
    await eventually(lambda: _is_owned(case), "the server has given it")
    entering.cancel()
    hold.release()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(entering, LONG)
    assert not await _is_owned(case)
    await case.check()
    await case.end()


async def _is_owned(case: Consumed) -> bool:
    return (await case.other.admin.describe_group(case.topic, "g")).unowned == ()


async def test_what_is_lost_while_another_topic_is_being_joined_is_taken_again(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = EnterTwo(ground)
    await case.prepare()
    look, seen = case.broker._registry.fetch, list[TopicLike]()
    joining, go_on = asyncio.Event(), asyncio.Event()

    async def slow_look(topic: TopicLike) -> Topic:
        seen.append(topic)
        if len(seen) == 4:  # each topic is looked at twice, the second time by the new member
            joining.set()
            await go_on.wait()
        return await look(topic)

    monkeypatch.setattr(case.broker._registry, "fetch", slow_look)
    entering = asyncio.create_task(case.consumer.__aenter__())
    await joining.wait()
    first = await case.messages.next(LONG)
    assert case.consumer.owned == {case.topic: (0,)}
    await case.other.admin.reset_group(case.topic, "g", "earliest", force=True)
    again = await case.messages.next(LONG)
    assert first is not None
    assert again is not None
    assert again.id == first.id
    assert "mistake" not in caplog.text
    go_on.set()
    await entering
    assert case.consumer.health().healthy
    await case.consumer.aclose()
    await case.end()
