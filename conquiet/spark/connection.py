"""The way from Spark's processes to a topic: opened where it is needed, closed when that is done."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from conquiet.errors import ConfigError
from conquiet.spark.options import Place
from conquiet.sync._portal import call
from conquiet.topics.outside import Registry, Site, Topic
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.keys import Keys

__all__ = ["connected", "find", "not_legacy", "opened"]


def opened(place: Place) -> Site:
    """A way to ``place`` that connects with the first call; ``ConfigError`` for a URL that cannot be one."""
    return Site(Connections(Address.of(place.url)), Keys(place.namespace))


@contextmanager
def connected(place: Place) -> Generator[Site]:
    """A way to ``place``, closed at the end of the block."""
    site = opened(place)
    try:
        yield site
    finally:
        call(site.link.aclose)


async def find(site: Site, place: Place) -> Topic:
    """The topic as it is now; ``UnknownTopicError`` if there is none. Nothing is written: streams ask very often."""
    return await Registry(site).existing(place.topic)


def not_legacy(topic: Topic) -> Topic:
    """``topic``, unless it is a plain stream, which cannot hold what rows have."""
    if topic.legacy:
        raise ConfigError(f"{topic.name!r} is a plain stream, not a topic: create_topic makes one to write to")
    return topic
