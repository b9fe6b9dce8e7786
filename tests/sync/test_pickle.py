"""Facades travel as recipes: to threads of Spark, to spawned processes, into closures."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from conquiet.sync import (
    ConfigError,
    EmbeddedRedis,
    QueueConfig,
    QueueConsumer,
    QueueError,
    RedisStreamsQueue,
)
from tests.sync.looking import Eye, named
from tests.sync.programs import run
from tests.sync.scripts import spawns

pytestmark = [pytest.mark.any_server, pytest.mark.slow]

SECRET = "s3cr3t-w0rd"


def pickled(protocol: int) -> Callable[[Any], Any]:
    return lambda thing: pickle.loads(pickle.dumps(thing, protocol))


WAYS: dict[str, Callable[[Any], Any]] = {
    **{f"protocol {number}": pickled(number) for number in range(2, pickle.HIGHEST_PROTOCOL + 1)},
    "copy": copy.copy,
    "deep copy": copy.deepcopy,
}


@pytest.mark.parametrize("used", [True, False], ids=["used", "unused"])
@pytest.mark.parametrize("way", WAYS)
def test_a_queue_comes_back_with_connections_of_its_own(
    url: str, eye: Eye, config: QueueConfig, way: str, used: bool
) -> None:
    name, url = named(url)
    original = RedisStreamsQueue.connect(url, config)
    if used:
        original.enqueue({"n": 0})
    with WAYS[way](original) as twin:
        assert type(twin) is RedisStreamsQueue
        assert twin.config == config
        id = twin.enqueue({"n": 1})
        assert len(eye.clients(name)) == 1 + used
    original.enqueue({"n": 2})
    assert eye.payloads(config.stream_key)[id] == {"n": 1}
    original.close()


async def test_a_queue_by_client_leaves_the_client_behind(url: str, config: QueueConfig) -> None:
    async with Redis.from_url(url, db=3, decode_responses=True) as client:
        with RedisStreamsQueue(client, config) as original, pickled(5)(original) as twin:
            id = twin.enqueue({"n": 1})
            [message] = original.read()
            assert (message.id, message.payload) == (id, {"n": 1})
            assert await client.xlen(config.stream_key) == 1  # in the database that the client uses


def test_a_consumer_takes_its_queue_along(queue: RedisStreamsQueue) -> None:
    queue.enqueue_many({"n": n} for n in range(2))
    consumer = QueueConsumer(queue, handle_signals=False)
    assert consumer.next() is not None
    consumer.stop()
    twin_queue, twin = pickled(5)((queue, consumer))
    with twin_queue:
        assert not twin.stopping
        message = twin.next()
        assert message.payload == {"n": 1}
        twin.ack(message)
    assert pickled(5)(twin).config == queue.config


def test_what_belongs_together_stays_together(queue: RedisStreamsQueue) -> None:
    twin, consumer = pickled(5)((queue, QueueConsumer(queue)))
    twin.open()
    twin.close()
    with pytest.raises(QueueError, match="closed"):
        consumer.next()
    assert queue.enqueue({"n": 1})


def test_an_entered_consumer_can_be_sent(queue: RedisStreamsQueue) -> None:
    queue.enqueue({"n": 1})
    with QueueConsumer(queue) as consumer:
        twin_queue, twin = pickled(5)((queue, consumer))
        with twin_queue, twin:
            assert twin.next().payload == {"n": 1}


def test_a_closed_queue_comes_back_open(url: str, config: QueueConfig) -> None:
    with RedisStreamsQueue.connect(url, config) as queue:
        queue.enqueue({"n": 1})
    with pytest.raises(QueueError, match="closed"):
        queue.enqueue({"n": 2})
    with pickled(5)(queue) as twin:
        assert twin.read()[0].payload == {"n": 1}


def test_a_message_can_be_acknowledged_elsewhere(queue: RedisStreamsQueue, eye: Eye) -> None:
    queue.enqueue({"n": 1})
    [message] = queue.read()
    sent_queue, sent = pickled(5)((queue, message))
    assert sent == message
    assert sent.payload == {"n": 1}
    with sent_queue:
        sent_queue.ack(sent)
    assert eye.pending(queue.config.stream_key) == []


def test_a_method_can_be_sent(queue: RedisStreamsQueue, eye: Eye) -> None:
    """As methods of any object that can be: ``pool.map(queue.enqueue, payloads)``."""
    queue.enqueue({"n": 1})
    twin, enqueue = pickled(5)((queue, queue.enqueue))
    with twin:
        id = enqueue({"n": 2})
    assert eye.payloads(queue.config.stream_key)[id] == {"n": 2}


@pytest.mark.parametrize("script", [spawns.by_url, spawns.by_client], ids=["url", "client"])
def test_a_spawned_process_can_use_it(url: str, config: QueueConfig, script: Callable[..., None]) -> None:
    name, named_url = named(url)
    assert run(script, named_url, url, name, config.stream_key) == ["fine"]


def test_a_server_does_not_travel() -> None:
    """It belongs to the process that opened it; what arrives is the same kind of server, not open."""
    with EmbeddedRedis(settings={"maxmemory": "64mb"}) as server:
        twin: EmbeddedRedis = pickled(5)(server)
        with pytest.raises(ConfigError, match="not open"):
            _ = twin.url
        twin.close()
        with twin:
            assert (twin.pid, twin.url) != (server.pid, server.url)
            with RedisStreamsQueue.connect(server.url, QueueConfig("s", "g", "c")) as queue:
                queue.enqueue({"n": 1})
            with RedisStreamsQueue.connect(twin.url, QueueConfig("s", "g", "c")) as queue:
                assert queue.backlog_stats().length == 0
        assert server.version


def test_a_password_travels_and_never_shows(config: QueueConfig) -> None:
    with EmbeddedRedis(settings={"requirepass": SECRET}) as server:
        assert SECRET in server.url
        queue = RedisStreamsQueue.connect(server.url, config)
        by_client = RedisStreamsQueue(Redis.from_url(server.url), config)
        for original in (queue, by_client, QueueConsumer(queue)):
            assert SECRET.encode() in pickle.dumps(original)
            twin = pickled(5)(original)
            shown = [*map(repr, (original, twin, vars(original), vars(twin))), str(original), f"{twin}"]
            assert SECRET not in "".join(shown)
        with pickled(5)(queue) as twin:
            assert twin.enqueue({"n": 1})
        assert SECRET not in repr(server)


def test_a_password_does_not_show_in_errors(config: QueueConfig) -> None:
    queue = RedisStreamsQueue.connect(f"redis://someone:{SECRET}@127.0.0.1:1", config)
    with pytest.raises(QueueError) as caught:
        queue.enqueue({"n": 1})
    assert SECRET not in f"{caught.value!r} {caught.value} {caught.value.__cause__!r}"
    assert SECRET not in repr(pickled(5)(caught.value))
