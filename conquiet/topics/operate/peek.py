"""A look at messages without a group: nothing is delivered by it, and nothing changes."""

from __future__ import annotations

import asyncio
import datetime as dt
import heapq
from collections import deque
from contextlib import suppress
from typing import Final, TypeAlias

from conquiet.errors import MalformedMessageError
from conquiet.kit import entry_ids, rules
from conquiet.message import Message
from conquiet.topics.codec import Codec
from conquiet.topics.format import envelope
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.pace import Pace
from conquiet.topics.server.topics import Topic

__all__ = ["Since", "messages"]

Since: TypeAlias = str | float | dt.datetime

_LARGEST_PAGE: Final = 500
_MOST_LOOKED_AT: Final = 10_000
"""Entries of a partition among which those of a key are looked for."""


async def messages(
    instance: Instance,
    topic: Topic,
    codec: Codec,
    count: int,
    since: Since,
    *,
    newest: bool,
    partition: int | None,
    key: str | None,
) -> list[Message]:
    """Up to ``count`` messages since a time or after an entry: the first or the newest ones, in the order of IDs."""
    places = range(topic.partitions) if partition is None else [topic.check_partition(partition)]
    after = _place(since)
    looks = [_Look(instance, topic, place, after, newest, count // len(places) + 1, key) for place in places]
    found = [_message(topic, codec, *entry) for entry in await _merged(looks, rules.integer("count", count, least=1))]
    return found[::-1] if newest else found


def _place(since: Since) -> str:
    """The ID after which messages are looked for."""
    if isinstance(since, str) and since != "earliest":
        return entry_ids.checked("since", since)
    return entry_ids.start("since", since)


class _Look:
    """The entries of one partition in one direction, page by page, and only as many as are asked for."""

    def __init__(
        self, instance: Instance, topic: Topic, index: int, after: str, newest: bool, limit: int, key: str | None
    ) -> None:
        self.index = index
        self.entries: deque[tuple[str, list[bytes]]] = deque()
        self._instance = instance
        self._stream = topic.stream(instance.keys, index)
        self._after, self._newest = f"({after}", newest
        self._at = "+" if newest else self._after
        self._key = None if key is None else envelope.text_of("key", key)
        self._pace = Pace(min(limit, _LARGEST_PAGE) if key is None else _LARGEST_PAGE)
        self._left = _MOST_LOOKED_AT if key is not None else entry_ids.LARGEST
        self._is_over = False

    @property
    def rank(self) -> tuple[int, int, int]:
        """Where its next entry stands among those of all partitions."""
        ms, seq = entry_ids.order(self.entries[0][0])
        return (-ms, -seq, -self.index) if self._newest else (ms, seq, self.index)

    async def fill(self) -> bool:
        """Whether there is a next entry."""
        while not self.entries and not self._is_over:
            words = ("XREVRANGE", self._at, self._after) if self._newest else ("XRANGE", self._at, "+")
            asked = min(self._pace.count, self._left)
            page = await self._instance.ask(words[0], self._stream, *words[1:], "COUNT", asked)
            self._pace.saw(page)
            self._left -= len(page)
            self._is_over = len(page) < asked or not self._left
            self._at = f"({page[-1][0].decode()}" if page else self._at
            self.entries.extend((id.decode(), entry) for id, entry in page if self._is_wanted(entry))
        return bool(self.entries)

    def _is_wanted(self, entry: list[bytes]) -> bool:
        return self._key is None or dict(zip(entry[::2], entry[1::2], strict=True)).get(b"key") == self._key


async def _merged(looks: list[_Look], count: int) -> list[tuple[int, str, list[bytes]]]:
    """The first ``count`` entries of all: their partitions, IDs and fields."""
    filled = await asyncio.gather(*(look.fill() for look in looks))
    heap = [(look.rank, look) for look, is_there in zip(looks, filled, strict=True) if is_there]
    heapq.heapify(heap)
    found: list[tuple[int, str, list[bytes]]] = []
    while heap and len(found) < count:
        _, look = heap[0]
        found.append((look.index, *look.entries.popleft()))
        if await look.fill():
            heapq.heapreplace(heap, (look.rank, look))
        else:
            heapq.heappop(heap)
    return found


def _message(topic: Topic, codec: Codec, index: int, id: str, entry: list[bytes]) -> Message:
    message = Message()
    message.topic, message.partition, message.group, message.epoch = topic.name, index, "", 0
    with suppress(MalformedMessageError):
        envelope.fill(message, id, entry, codec)
        return message
    envelope.fill_blank(message, id, entry)
    return message
