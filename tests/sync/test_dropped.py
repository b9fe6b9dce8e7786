"""What nobody refers to any more and nobody closed: its connections are closed by the loop, soon."""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from conquiet.sync import Broker, JobQueue, QueueConfig, RedisStore, RedisStreamsQueue
from tests.sync.looking import Eye, named, until

pytestmark = pytest.mark.any_server


def used_broker(url: str, name: str) -> Broker:
    broker = Broker.connect(url, namespace=name)
    broker.create_topic("orders")
    broker.send("orders", 1)
    return broker


def used_jobs(url: str, name: str) -> JobQueue:
    queue = JobQueue(RedisStore.connect(url), name)
    queue.enqueue({"n": 1})
    return queue


def used_queue(url: str, name: str) -> RedisStreamsQueue:
    queue = RedisStreamsQueue.connect(url, QueueConfig(name, "group", "consumer", block_ms=1))
    queue.enqueue({"n": 1})
    queue.read()
    return queue


KINDS: dict[str, Callable[[str, str], Any]] = {
    "broker": used_broker,
    "jobs": used_jobs,
    "queue": used_queue,
}


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Any:
    """Which is not what closes them."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_closed(url: str, eye: Eye, kind: str) -> None:
    name, url = named(url)
    made = KINDS[kind](url, name)
    assert eye.clients(name)
    del made
    until(lambda: not eye.clients(name), "the end of its connections")


def test_many_of_them_one_after_the_other_do_not_add_up(url: str, eye: Eye) -> None:
    name, url = named(url)
    sent = pickle.dumps(Broker.connect(url, namespace=name))
    most = 0
    for number in range(30):
        broker = pickle.loads(sent)
        broker.create_topic(f"t{number}")
        most = max(most, len(eye.clients(name)))
    assert most <= 3
    del broker
    until(lambda: not eye.clients(name), "the end of their connections")


def test_what_it_gave_away_keeps_it(url: str, eye: Eye) -> None:
    name, url = named(url)
    admin, send = used_broker(url, name).admin, used_broker(url, name).send
    queue = JobQueue(RedisStore.connect(url), name)  # whose store has no other name
    for _ in range(3):
        assert admin.list_topics() == ["orders"]
        send("orders", 2)
        queue.enqueue({"n": 1})
    assert len(eye.clients(name)) == 3
    collector = used_broker(url, name).collector()  # which has connections of its own
    try:
        until(lambda: len(eye.clients(name)) == 3, "the broker's connection is closed")
        assert [family.name for family in collector.collect()]
    finally:
        collector.close()


def test_a_forked_child_leaves_it_to_its_parent(url: str, eye: Eye) -> None:
    name, url = named(url)
    broker = used_broker(url, name)
    [before] = eye.clients(name)
    child = os.fork()
    if child == 0:
        del broker
        os._exit(0)
    os.waitpid(child, 0)
    broker.send("orders", 2)
    assert list(eye.clients(name)) == [before]
