"""What owners do beside their messages goes on whatever goes wrong with it, and a probe can tell."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conquiet.errors import Reject
from conquiet.kit.clock import ManualClock
from conquiet.message import Message, Outgoing
from conquiet.topics import Broker, Retention
from conquiet.topics.server import dead_letters, retention
from conquiet.wire.keys import Keys
from tests.rigs.waiting import eventually
from tests.topics.consuming import Recorder, buried, finished, impatient

pytestmark = pytest.mark.any_server


@pytest.fixture
async def broker(url: str, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(url, namespace=keys.namespace, clock=clock) as broker:
        yield broker


class _Broken:
    """Raises what nobody expects, as long as it is told to, for one of the partitions."""

    def __init__(self, works: Any) -> None:
        self.calls, self.is_broken, self._works = 0, True, works

    async def __call__(self, instance: Any, topic: Any, partition: int, *args: Any) -> Any:
        if self.is_broken and partition == 0:
            self.calls += 1
            raise ValueError("nobody expects this")
        return await self._works(instance, topic, partition, *args)


async def test_a_trim_that_fails_unexpectedly_is_told_of_and_tried_again(
    broker: Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retention, "trim", broken := _Broken(retention.trim))
    await broker.create_topic("orders", partitions=2, retention=Retention(delete_acked=True, trim_interval=5.0))
    async with broker.subscribe("orders", group="g", handler=Recorder(), options=impatient()) as subscription:
        await broker.send_batch("orders", [Outgoing(number, partition=number % 2) for number in range(4)])
        await finished(broker, "orders", "g")
        clock.advance(6)
        await eventually(lambda: broken.calls >= 2, "it is tried again")
        assert await _length(broker, 1) == 0
        health = subscription.health()
        assert (health.healthy, health.failures) == (False, 1)
        [told] = [record for record in caplog.records if record.exc_info]
        assert (told.levelno, told.name) == (logging.ERROR, "conquiet.topics")
        broken.is_broken = False
        clock.advance(6)
        await eventually(lambda: _is_empty(broker, 0), "the other partition is trimmed")
        await eventually(lambda: subscription.health().healthy, "all is well")


async def _length(broker: Broker, partition: int) -> int:
    return (await broker.admin.describe_topic("orders")).by_partition[partition].length


async def _is_empty(broker: Broker, partition: int) -> bool:
    return await _length(broker, partition) == 0


async def test_letters_whose_forwarding_fails_unexpectedly_arrive_later(
    broker: Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handle(message: Message) -> None:
        raise Reject("no")

    await broker.create_topic("orders", partitions=1)
    monkeypatch.setattr(dead_letters, "forward", broken := _Broken(dead_letters.forward))
    async with broker.subscribe("orders", group="g", handler=handle, options=impatient()) as subscription:
        await broker.send("orders", 1)
        await eventually(lambda: broken.calls >= 1, "it is tried")
        await eventually(lambda: not subscription.health().healthy, "a probe can tell")
        clock.advance(1)
        await eventually(lambda: broken.calls >= 2, "it is tried again")
        broken.is_broken = False
        await buried(broker, "orders")
        await eventually(lambda: subscription.health().healthy, "all is well")


async def test_a_partition_that_went_to_another_is_no_worry_any_more(
    broker: Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "trim", _Broken(retention.trim))
    await broker.create_topic("orders", partitions=2, retention=Retention(delete_acked=True))
    async with broker.subscribe("orders", group="g", handler=Recorder(), options=impatient()) as one:
        await eventually(lambda: not one.health().healthy, "a probe can tell")
        options = impatient(partition_modulo=2, partition_remainder=0)
        async with broker.subscribe("orders", group="g", handler=Recorder(), options=options) as other:
            await eventually(lambda: other.owned["orders"] == (0,), "the other takes it")
            await eventually(lambda: one.health().healthy, "it is the other's worry")
