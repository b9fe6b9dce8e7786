"""One node: the wait for news there, and what its loop remembers from turn to turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from conquiet.errors import QueueError
from conquiet.kit.policy import Backoff
from conquiet.kit.retrying import Lines, Retrying
from conquiet.kit.service import Background
from conquiet.topics.consume.owned import Owned
from conquiet.topics.consume.partition import Partition
from conquiet.topics.consume.requests import Request
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.partition import Row
from conquiet.wire import streams
from conquiet.wire.address import Endpoint
from conquiet.wire.interrupt import Interrupt

__all__ = ["Node"]

_MOST_POLLS: Final = 10
_AFTER_ERROR: Final = Backoff(base=0.05, cap=2.0, kind="exponential")
_MOST_FAILURES: Final = 10
_SLOT: Final = 0.1
_RATE: Final = 30
"""A Cluster lets a command block on the streams of one slot. The others are asked, in all, so often a second."""


class News:
    """One blocked read for all partitions of a node that can take something new; it has no effect on the server.

    The read goes on while the loop does other things. ``wake`` is called when it has ended, one way or the other.
    """

    def __init__(self, instance: Instance, lines: Lines, wake: Callable[[], None]) -> None:
        self._instance = instance
        self._lines = lines
        self._wake = wake
        self._background = Background()
        self._task: asyncio.Task[dict[str, Row]] | None = None
        self._asked: Mapping[str, str] = {}
        self._interrupt = Interrupt()
        self._listen_at = 0.0
        self.failures = 0
        """How often in a row it could not be waited for news."""
        self.heard_at = 0.0
        """Until when it was listened, by local time."""

    @property
    def is_waiting(self) -> bool:
        """Whether the read is under way."""
        return self._task is not None and not self._task.done()

    def listen(self, after: Mapping[str, str], first: str, seconds: float) -> None:
        """Wait for entries of the streams ``after``, each behind its ID, up to so many seconds.

        In a Cluster for those of ``first`` only. If other streams are waited for now, that is ended, and ``wake`` tells
        when to ask again. After a failure it waits for nothing for a while.
        """
        if self._task is not None:
            if not after.keys() <= self._asked.keys():
                self._interrupt.request()
            return
        if self._instance.clock.monotonic() < self._listen_at:
            return
        heard = after
        if self._instance.link.address.kind == "cluster":
            heard = {first: after[first]}
            seconds = min(seconds, max(_SLOT, len(after) / _RATE))
        self._asked, self._interrupt = after, Interrupt()
        self._task = self._background.start(self._listen(heard, seconds), "news")
        self._task.add_done_callback(lambda _: self._wake())

    def heard(self) -> dict[str, Row | None] | None:
        """If the read has ended: the streams that it was about, each with its first new entry if it has one.

        ``None`` while it goes on, and if it was interrupted.
        """
        task = self._task
        if task is None or not task.done():
            return None
        self._task = None
        self.heard_at = self._instance.clock.monotonic()
        try:
            found = task.result()
        except QueueError as error:
            self._listen_at = self.heard_at + _AFTER_ERROR.delay(self.failures)
            self.failures = min(self.failures + 1, _MOST_FAILURES)
            self._lines.warn("cannot wait for news, asking from time to time", error, is_new=self.failures == 1)
            return dict.fromkeys(self._asked)
        self.failures = 0
        if self._interrupt.requested and not found:
            return None
        return {stream: found.get(stream) for stream in self._asked}

    async def aclose(self) -> None:
        """Wait no more."""
        await self._background.aclose()

    async def _listen(self, after: Mapping[str, str], seconds: float) -> dict[str, Row]:
        command = streams.xread(after, block_ms=max(round(seconds * 1000), 1))
        reply = await self._instance.link.wait(next(iter(after)), command, seconds, self._interrupt)
        return {stream.decode(): rows[0] for stream, rows in reply or ()}


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
