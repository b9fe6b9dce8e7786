"""Waiting at one node for new entries, beside the loop that takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from conquiet.errors import QueueError
from conquiet.kit.policy import Backoff
from conquiet.kit.retrying import Lines
from conquiet.kit.service import Background
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.partition import Row
from conquiet.wire import streams
from conquiet.wire.interrupt import Interrupt

__all__ = ["News"]

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
