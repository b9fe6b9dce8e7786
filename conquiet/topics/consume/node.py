"""What the loop of one node remembers from turn to turn."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from conquiet.kit.retrying import Lines, Retrying
from conquiet.topics.consume.news import News
from conquiet.topics.consume.owned import Owned
from conquiet.topics.consume.partition import Partition
from conquiet.topics.consume.requests import Request
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.partition import Row
from conquiet.wire.address import Endpoint

__all__ = ["Node"]

_MOST_POLLS: Final = 10


class Node:
    """A node, what is waited for there, and how its loop is woken."""

    def __init__(self, home: Endpoint, instance: Instance, lines: Lines) -> None:
        self.home = home
        self.event = asyncio.Event()
        """Set when the loop is to look again."""
        self.news = News(instance, lines, self.event.set)
        self.retrying = Retrying(lines, instance.clock)
        self.has_lingered = False
        self._turn = -1
        self._instance = instance
        self._seen: tuple[str, Endpoint] = ("", home)
        """A partition, and the node where it was last."""
        self._opened = 0
        """How many connections the node has had."""
        self._poll_at = 0.0
        self._until = 0.0
        self._listening: dict[str, str] = {}

    async def is_another(self, mine: Sequence[Owned]) -> bool:
        """Whether it may have lost its last writes: a failover made it another, or a restart its connection."""
        opened, self._opened = self._opened, self._instance.link.opened(self.home)
        if opened != self._opened:
            return True
        if mine and self._instance.link.address.kind != "single":
            stream = mine[0].stream
            seen, self._seen = self._seen, (stream, await self._instance.link.home(stream))
            return seen[0] == stream and seen != self._seen
        return False

    def in_turn(self, some: Sequence[Partition]) -> Sequence[Partition]:
        """``some``, beginning with another each time: with little room, each has its share of it."""
        if not some:
            return some
        self._turn += 1
        start = self._turn % len(some)
        return [*some[start:], *some[:start]]

    def begin(self, until: float) -> None:
        """Forget what was waited for; it is looked again at local time ``until`` at the latest."""
        self._until = until
        self._listening = {}

    def note(self, stream: str, request: Request) -> None:
        """A partition wants nothing now, and waits for something."""
        if request.until is not None and request.until < self._until:
            self._until = request.until
        if request.listens is not None:
            self._listening[stream] = request.listens

    def rest(self, now: float, poll_timeout: float) -> float:
        """Listen for news; how long to wait for something that falls due, or for a wake."""
        if self._listening:
            first = max(self._listening, key=self._listening.__getitem__)
            self.news.listen(self._listening, first, poll_timeout)
        return max(self._until - now, 0.001)

    def hear(self, now: float, poll_timeout: float, owned: Mapping[str, Owned]) -> Mapping[str, Row | None]:
        """The streams that are to be asked for new entries, with the first of these where it is known.

        After a failure all of them: asked one by one, each tells whether it was the one. From time to time some
        without news: a wait does not tell of what was replayed, delayed, or is on another slot.
        """
        heard = self.news.heard()
        if heard is None or self.news.failures or self._instance.link.address.kind == "cluster":
            return heard or {}
        found = {stream: row for stream, row in heard.items() if row is not None}
        if found or now < self._poll_at:
            return found
        self._poll_at = now + poll_timeout
        silent = sorted(heard.keys() & owned.keys(), key=lambda stream: owned[stream].partition.asked_at)
        return dict.fromkeys(silent[:_MOST_POLLS])
