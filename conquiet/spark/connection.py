"""The way from Spark's processes to a topic: opened where it is needed, closed when that is done."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from conquiet.errors import ConfigError
from conquiet.spark.options import Place
from conquiet.sync._portal import call
from conquiet.topics.outside import Instance, Registry, Topic
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.keys import Keys

__all__ = ["connected", "find", "not_legacy", "opened"]


def opened(place: Place) -> Instance:
    """A way to ``place`` that connects with the first call; ``ConfigError`` for a URL that cannot be one."""
    return Instance(Connections(Address.of(place.url)), Keys(place.namespace))


@contextmanager
def connected(place: Place) -> Generator[Instance]:
    """A way to ``place``, closed at the end of the block."""
    instance = opened(place)
    try:
        yield instance
    finally:
        call(instance.link.aclose)


async def find(instance: Instance, place: Place) -> Topic:
    """The topic as it is now; ``UnknownTopicError`` if there is none. Nothing is written: streams ask very often."""
    return await Registry(instance).existing(place.topic)


def not_legacy(topic: Topic) -> Topic:
    """``topic``, unless it is a plain stream, which cannot hold what rows have."""
    if topic.legacy:
        raise ConfigError(f"{topic.name!r} is a plain stream, not a topic: create_topic makes one to write to")
    return topic
