"""Plain streams as topics: what ``RedisStreamsQueue`` writes is consumed, and the other way round."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conquiet import ConfigError, PayloadError, QueueConfig, RedisStreamsQueue, Reject, UnknownTopicError
from conquiet.kit.clock import ManualClock
from conquiet.message import Message
from conquiet.topics import Broker
from conquiet.wire.keys import Keys
from tests.topics.consuming import Recorder, buried, finished, impatient
from tests.topics.staging import Stage

pytestmark = pytest.mark.cluster_too


@pytest.fixture
async def broker(url: str, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(url, namespace=keys.namespace, clock=clock) as broker:
        yield broker


@pytest.fixture
def stream() -> str:
    return f"t:{secrets.token_hex(6)}:orders"


async def test_a_consumer_reads_what_the_queue_wrote(broker: Broker, url: str, stream: str) -> None:
    """spec 3: No meta found => assume partitionCount=1 and stream key = topic."""
    async with RedisStreamsQueue.connect(url, QueueConfig(stream, "queue", "c")) as queue:
        ids = [await queue.enqueue({"number": number}) for number in range(5)]
    seen, topic = Recorder(), broker.legacy(stream)
    async with broker.subscribe(topic, group="g", handler=seen, options=impatient()) as subscription:
        await finished(broker, topic, "g")
        assert subscription.owned == {stream: (0,)}
    assert [message.id for message in seen.messages] == ids
    assert seen.payloads == [{"number": number} for number in range(5)]
    first = seen.messages[0]
    assert (first.topic, first.partition, first.key, first.headers) == (stream, 0, None, {"partitionId": "0"})
    assert first.timestamp_ms == int(ids[0].split("-")[0])


async def test_the_queue_reads_what_the_broker_wrote(broker: Broker, url: str, stream: str) -> None:
    topic = broker.legacy(stream)
    async with RedisStreamsQueue.connect(url, QueueConfig(stream, "queue", "c")) as queue:
        id = await broker.send(topic, {"number": 1})
        [message] = await queue.read()
        assert (message.id, message.payload) == (id, {"number": 1})


@pytest.mark.any_server
async def test_a_stream_under_the_bare_name_is_a_topic(broker: Broker, stage: Stage, keys: Keys) -> None:
    bare = f"{keys.namespace}:orders"
    await stage.call(bare, "XADD", bare, "*", "data", '{"a":1}')
    seen = Recorder()
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient()):
        await broker.send("orders", {"a": 2})
        await seen.saw(2)
    assert seen.payloads == [{"a": 1}, {"a": 2}]


@pytest.mark.any_server
async def test_no_meta_and_no_stream_is_no_topic(broker: Broker) -> None:
    with pytest.raises(UnknownTopicError, match="orders"):
        async with broker.subscribe("orders", group="g", handler=Recorder(), options=impatient()):
            pytest.fail("entered")
    assert await broker.admin.list_topics() == []


@pytest.mark.any_server
async def test_a_legacy_stream_need_not_exist_yet(broker: Broker, stream: str) -> None:
    seen, topic = Recorder(), broker.legacy(stream)
    async with broker.subscribe(topic, group="g", handler=seen, options=impatient()):
        await broker.send(topic, {"a": 1})
        await seen.saw(1)


@pytest.mark.any_server
@pytest.mark.parametrize(
    "more", [{"key": "k"}, {"headers": {"a": "b"}}, {"message_id": "m"}, {"max_retries": 1}, {"delay": 1.0}]
)
async def test_what_a_legacy_stream_cannot_carry_is_refused(
    broker: Broker, stage: Stage, stream: str, more: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="legacy"):
        await broker.send(broker.legacy(stream), {"a": 1}, **more)
    assert await stage.call(stream, "EXISTS", stream) == 0


@pytest.mark.any_server
@pytest.mark.parametrize("payload", [None, 1, "text", [1]])
async def test_only_objects_are_payloads_of_a_legacy_stream(broker: Broker, stream: str, payload: object) -> None:
    with pytest.raises(PayloadError):
        await broker.send(broker.legacy(stream), payload)


@pytest.mark.any_server
async def test_requeue_is_refused_for_a_legacy_stream(broker: Broker, stream: str) -> None:
    with pytest.raises(ConfigError, match="requeue"):
        async with broker.subscribe(
            broker.legacy(stream), group="g", handler=Recorder(), options=impatient(mode="requeue")
        ):
            pytest.fail("entered")


async def test_retries_dead_letters_and_replay_work_on_a_legacy_stream(broker: Broker, stream: str) -> None:
    async def fail(message: Message) -> None:
        if message.replayed_from is None:
            raise Reject("no") if message.retry_count else RuntimeError

    seen, topic = Recorder(fail), broker.legacy(stream)
    async with broker.subscribe(topic, group="g", handler=seen, options=impatient()):
        id = await broker.send(topic, {"a": 1})
        [letter] = await buried(broker, topic)
        assert (letter.original_id, letter.payload, letter.attempts) == (id, {"a": 1}, 2)
        assert await broker.admin.replay(topic) == 1
        await seen.saw(3)
        await finished(broker, topic, "g")
    assert {message.id for message in seen.messages} == {id}


@pytest.mark.any_server
async def test_what_the_queue_would_refuse_is_buried(broker: Broker, stage: Stage, stream: str) -> None:
    await stage.call(stream, "XADD", stream, "*", "data", "{not json")
    await stage.call(stream, "XADD", stream, "*", "data", "{}", "more", "x")
    await stage.call(stream, "XADD", stream, "*", "data", '{"a":1}')
    seen, topic = Recorder(), broker.legacy(stream)
    async with broker.subscribe(topic, group="g", handler=seen, options=impatient()):
        letters = await buried(broker, topic, 2)
        await finished(broker, topic, "g")
    assert seen.payloads == [{"a": 1}]
    assert {letter.reason for letter in letters} == {"malformed"}


@pytest.mark.any_server
async def test_start_is_kept_on_a_legacy_stream(broker: Broker, stream: str) -> None:
    topic = broker.legacy(stream)
    await broker.send(topic, {"old": 1})
    seen = Recorder()
    async with broker.subscribe(topic, group="g", handler=seen, options=impatient(start="latest")):
        await broker.send(topic, {"new": 1})
        await seen.saw(1)
    assert seen.payloads == [{"new": 1}]


@pytest.mark.any_server
async def test_two_consumers_share_the_one_partition_of_a_legacy_stream(broker: Broker, stream: str) -> None:
    topic, one, two = broker.legacy(stream), Recorder(), Recorder()
    async with (
        broker.subscribe(topic, group="g", handler=one, options=impatient()),
        broker.subscribe(topic, group="g", handler=two, options=impatient()),
    ):
        for number in range(5):
            await broker.send(topic, {"number": number})
        await finished(broker, topic, "g")
    assert [len(one.messages), len(two.messages)] == [5, 0]
