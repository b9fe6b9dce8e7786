"""Sending, cancelled wherever it waits: what was confirmed is there once, and the broker works on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest

from conquiet import Outgoing, Retention, TopicDefaults
from conquiet.errors import QueueError
from tests.contracts.topics_cancellation import (
    EVERYWHERE,
    Case,
    Ground,
    Place,
    each,
    ground_at,
    says_closed,
    scene_of,
    servers,
)
from tests.rigs.cancelling import How, cancelled_at, cancelled_everywhere
from tests.rigs.waiting import LONG, eventually

pytestmark = servers


@pytest.fixture
async def ground(url: str) -> AsyncIterator[Ground]:
    async with ground_at(url) as ground:
        yield ground


class Send(Case):
    async def call(self) -> Any:
        return await self.broker.send(self.topic, "sent", key="k")

    async def check(self) -> None:
        again = await self.broker.send(self.topic, "again")
        written = await self.ground.payloads(self.topic)
        assert written.pop(f"0/{again}") == b'"again"'
        assert len(written) <= 1
        if self.is_done:
            assert written == {f"0/{self.result}": b'"sent"'}


class SendToUnknown(Send):
    """The topic is made by the way."""

    async def prepare(self) -> None:
        self.broker = self.ground.broker(auto_create=TopicDefaults(partitions=1))

    async def check(self) -> None:
        await super().check()
        assert self.topic in await self.other.admin.list_topics()


class SendOnce(Case):
    """With an ID, which makes it safe to repeat."""

    async def call(self) -> Any:
        return await self.broker.send(self.topic, "sent", message_id="m-1")

    async def check(self) -> None:
        again = await self.broker.send(self.topic, "sent", message_id="m-1")
        assert await self.ground.payloads(self.topic) == {f"0/{again}": b'"sent"'}
        assert not self.is_done or self.result == again


class SendLater(Case):
    async def call(self) -> Any:
        return await self.broker.send(self.topic, "sent", message_id="m-1", delay=60.0)

    async def check(self) -> None:
        again = await self.broker.send(self.topic, "sent", message_id="m-1", delay=60.0)
        key = self.ground.keys.delayed(self.ground.keys.partition(self.topic, 0))
        assert await self.ground.stage.call(key, "ZCARD", key) == 1
        assert not self.is_done or self.result == again


class SendBatch(Case):
    """To several partitions at once, of which each has a limit."""

    messages: ClassVar = [Outgoing(n, key=f"k{n % 7}", message_id=f"m-{n}") for n in range(40)]

    async def prepare(self) -> None:
        await self.other.create_topic(self.topic, partitions=3, retention=Retention(max_len=1000))

    async def call(self) -> Any:
        return await self.broker.send_batch(self.topic, self.messages)

    async def check(self) -> None:
        again = await self.broker.send_batch(self.topic, self.messages)
        written = await self.ground.payloads(self.topic, 3)
        assert [int(written[f"{id.partition}/{id}"]) for id in again] == list(range(40))
        assert len(written) == 40
        assert not self.is_done or self.result == again


class SendPlainBatch(Case):
    async def prepare(self) -> None:
        await self.other.create_topic(self.topic, partitions=3)

    async def call(self) -> Any:
        return await self.broker.send_batch(self.topic, [Outgoing(n, key=f"k{n}") for n in range(1500)])

    async def check(self) -> None:
        again = await self.broker.send(self.topic, "again")
        written = await self.ground.payloads(self.topic, 3)
        assert written.pop(f"{again.partition}/{again}") == b'"again"'
        counts = Counter(written.values())
        assert max(counts.values(), default=1) == 1
        assert not self.is_done or len(counts) == 1500


class SendToLegacy(Case):
    async def prepare(self) -> None:
        self.stream = f"{self.ground.namespace}:{self.topic}"

    async def call(self) -> Any:
        return await self.broker.send(self.broker.legacy(self.stream), {"n": 1})

    async def check(self) -> None:
        again = await self.broker.send(self.broker.legacy(self.stream), {"n": 2})
        found = await self.ground.stage.call(self.stream, "XRANGE", self.stream, "-", "+")
        assert found.pop() == [again.encode(), [b"data", b'{"n":2}']]
        assert len(found) <= 1
        assert not self.is_done or found == [[self.result.encode(), [b"data", b'{"n":1}']]]


class CreateTopic(Case):
    async def prepare(self) -> None:
        pass

    async def call(self) -> Any:
        await self.broker.create_topic(self.topic, partitions=3)

    async def check(self) -> None:
        await self.broker.create_topic(self.topic, partitions=3)
        assert (await self.other.admin.describe_topic(self.topic)).partitions == 3
        assert self.topic in await self.other.admin.list_topics()


@each([Send, SendToUnknown, SendOnce, SendLater, SendBatch, SendPlainBatch, SendToLegacy, CreateTopic], *EVERYWHERE)
async def test_a_cancelled_send_can_be_repeated_and_disturbs_nobody(
    ground: Ground, kind: type[Case], how: How, place: Place
) -> None:
    await cancelled_everywhere(scene_of(ground, kind, place), how, at_least=kind.points(place))


# --- the broker itself ------------------------------------------------------------------------------------------------


class Enter(Case):
    async def call(self) -> Any:
        return await self.broker.__aenter__()

    async def check(self) -> None:
        if self.is_done:
            assert await self.broker.send(self.topic, 1)
            return
        await eventually(lambda: self.ground.proxy.open_connections == 0, "nothing is left open")
        await says_closed(self.broker)


class Block(Case):
    """Entering, sending and leaving."""

    async def call(self) -> Any:
        async with self.broker:
            return await self.broker.send(self.topic, 1)

    async def check(self) -> None:
        await eventually(lambda: self.ground.proxy.open_connections == 0, "nothing is left open")
        await says_closed(self.broker)
        assert len(await self.ground.payloads(self.topic)) <= 1


class Close(Case):
    """With two connections, and with calls on their way that had stood in line."""

    least = 1

    async def prepare(self) -> None:
        await super().prepare()
        await self.broker.send(self.topic, "large" * 20_000)
        self.hold = self.ground.proxy.hold(f"held in {self.topic}".encode())
        first, *self.sending = [
            asyncio.create_task(self.broker.send(self.topic, payload))
            for payload in ("first", f"held in {self.topic}", f"held in {self.topic}")
        ]
        await first
        await self.hold.caught.wait()

    async def call(self) -> Any:
        await self.broker.aclose()

    async def check(self) -> None:
        async with asyncio.timeout(LONG):
            outcomes = await asyncio.gather(*self.sending, return_exceptions=True)
        assert all(isinstance(outcome, QueueError) for outcome in outcomes)
        await eventually(lambda: self.ground.proxy.open_connections == 0, "nothing is left open")
        await says_closed(self.broker)

    async def end(self) -> None:
        self.hold.release()
        await super().end()


@each([Enter, Block, Close], "ahead")
async def test_a_broker_that_is_cancelled_while_it_opens_or_closes_is_closed(
    ground: Ground, kind: type[Case], how: How, place: Place
) -> None:
    await cancelled_everywhere(scene_of(ground, kind), how, at_least=kind.least)


@pytest.mark.parametrize("how", ["task", "scope"])
@pytest.mark.parametrize("kind", [Send, SendBatch, CreateTopic])
async def test_who_is_cancelled_does_not_wait_for_a_server_that_is_silent(
    ground: Ground, kind: type[Case], how: How
) -> None:
    case = kind(ground)
    await case.prepare()
    await case.broker.open()
    hold = ground.proxy.hold(b"")
    for _ in range(3):  # the second and third on connections of their own, which are not even made
        assert (await cancelled_at(1, how, case.made)).was_raised
    hold.release()
    await case.check()
    await case.end()
