"""The way from Spark's processes to a topic: opened where it is needed, closed when that is done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from pyspark import TaskContext

from conquiet.errors import ConfigError, QueueError
from conquiet.spark.failures import Patience
from conquiet.spark.options import Place
from conquiet.sync._portal import call
from conquiet.topics.outside import Instance, Registry, Topic
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.interrupt import Interrupt
from conquiet.wire.keys import Keys
from conquiet.wire.parser import Reply
from conquiet.wire.scripts import Call

__all__ = ["connected", "find", "heard", "not_legacy", "opened"]

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class PatientInstance(Instance):
    """Asks again while the server is away. All that Spark's processes ask may be asked twice."""

    patience: Patience = field(default_factory=lambda: Patience(0))

    async def ask(self, command: str, key: str, *words: str | bytes | int) -> Reply:
        """The reply to one command on ``key``."""
        return await self._patiently(key, partial(Instance.ask, self, command, key, *words))

    async def run(self, key: str, call: Call) -> Reply:
        """The reply to one script on ``key``."""
        return await self._patiently(key, partial(Instance.run, self, key, call))

    async def insist(self, calls: Sequence[tuple[str, Call]]) -> list[Reply]:
        """The replies to scripts, each with one of its keys."""
        key = calls[0][0] if calls else ""
        return await self._patiently(key, partial(Instance.insist, self, calls))

    def _patiently(self, key: str, ask: Callable[[], Awaitable[R]]) -> Awaitable[R]:
        return self.patience.ask(self.clock, key, ask)


def opened(place: Place) -> Instance:
    """A way to ``place`` that connects with the first call; ``ConfigError`` for a URL that cannot be one.

    A server that goes away is waited for. One that is not there when a query or a write begins is the user's to see at
    once, but not where a task begins, which is in the middle of them.
    """
    patience = Patience(place.patience, begun=TaskContext.get() is not None)
    return PatientInstance(Connections(Address.of(place.url)), Keys(place.namespace), patience=patience)


@contextmanager
def connected(place: Place) -> Generator[Instance]:
    """A way to ``place``, closed at the end of the block."""
    instance = opened(place)
    try:
        yield instance
    finally:
        call(instance.link.aclose)


async def heard(instance: Instance, after: Mapping[str, str], seconds: float) -> bool:
    """Wait up to ``seconds`` for an entry of these streams, each behind an ID; whether there is one."""
    interrupt = Interrupt()

    async def hear(streams: Mapping[str, str]) -> None:
        if await instance.link.read(streams, 1, seconds, interrupt):
            interrupt.request()  # the others need not wait any more

    is_cluster = instance.link.address.kind == "cluster"
    try:
        await asyncio.gather(*map(hear, [{stream: id} for stream, id in after.items()] if is_cluster else [after]))
    except QueueError:  # whoever asks next learns of it
        await instance.clock.sleep(seconds)
    return interrupt.requested


async def find(instance: Instance, place: Place) -> Topic:
    """The topic as it is now; ``UnknownTopicError`` if there is none. Nothing is written: streams ask very often."""
    return await Registry(instance).existing(place.topic)


def not_legacy(topic: Topic) -> Topic:
    """``topic``, unless it is a plain stream, which cannot hold what rows have."""
    if topic.legacy:
        raise ConfigError(f"{topic.name!r} is a plain stream, not a topic: create_topic makes one to write to")
    return topic
