"""Looks for streams: new ones in the input, and those whose owner is gone."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from conquiet.balance.ledger import Late, Ledger, Swept, Taken
from conquiet.balance.strays import Strays
from conquiet.errors import QueueError
from conquiet.kit.retrying import Lines, Retrying
from conquiet.wire.capabilities import is_group_lost
from conquiet.wire.interrupt import Interrupt
from conquiet.wire.streams import streams_of

if TYPE_CHECKING:
    from conquiet.balance.consumer import Consumer

__all__ = ["Watch"]

_log = logging.getLogger("conquiet.balance")
_PATIENCE: Final = 5.0
"""Seconds for which the reader waits for news at a time."""
_COURTESY: Final = 1.0
"""Seconds for which a consumer leaves to others what is more than its share."""


class Watch:
    """Two loops: one reads the input, one looks for leases that have run out by the server's time.

    Both outlive any failure of the server. News in the input, a released stream, or room where there was none wakes
    them at once; an expiry notification may, and nothing depends on it.
    """

    def __init__(self, ledger: Ledger, finder: Consumer, strays: Strays, interval: float, lines: Lines) -> None:
        self._lines = lines
        self._ledger = ledger
        self._finder = finder
        self._strays = strays
        self._interval = interval
        self._look = asyncio.Event()
        self._room = asyncio.Event()
        self._interrupt = Interrupt()
        self._last_id = "0-0"
        self._last_news = "0-0"
        self._late: set[tuple[str, int]] = set()
        self._deferred_at: float | None = None
        """Local time since when others have been given precedence."""
        self._left_at: float | None = None
        """Local time since when lost streams have been left to others."""
        self._page = "-"
        self._has_recovered = False

    def hurry(self) -> None:
        """Look for lost streams now."""
        self._look.set()

    def freed(self) -> None:
        """There is room again."""
        self._room.set()
        self._look.set()
        self._interrupt.request()

    # --- new streams ---------------------------------------------------------------------------------------------

    async def read(self) -> None:
        """Take new streams, for as long as this runs."""
        retrying = Retrying(self._lines, self._ledger.clock)
        while True:
            try:
                await self._read_once()
                retrying.succeeded()
            except Exception as error:
                await retrying.failed(f"service {self._ledger.keys.service!r}: cannot read new streams", error)

    async def _read_once(self) -> None:
        """Take what there is, else wait."""
        ledger, finder = self._ledger, self._finder
        self._room.clear()
        if finder.room <= 0:
            await self._listen(_PATIENCE, self._room)
            return
        await self._strays.settle()
        async with self._strays.asking():
            asked = ledger.clock.monotonic()
            hungry = self._deferred_at is not None and asked >= self._deferred_at + _COURTESY
            taken = await self._group_made(lambda: ledger.take(finder.room, finder.held, hungry=hungry))
            finder.set_aside(taken.set_aside)
            for given in taken.given:
                finder.found(given, asked)
        self._last_id = taken.last_id
        if not taken.deferred:
            self._deferred_at = None
        elif self._deferred_at is None:
            self._deferred_at = asked
        if not (taken.given or taken.set_aside or taken.merged):
            await self._listen(_COURTESY if taken.deferred else _PATIENCE, None)

    async def _listen(self, seconds: float, room: asyncio.Event | None) -> None:
        """Wait for a new stream, or for one that was released."""
        keys = self._ledger.keys
        self._interrupt = Interrupt()
        if room is not None and room.is_set():
            return
        ids = {keys.news: self._last_news}
        if room is None:
            ids[keys.input] = self._last_id
        reply = await self._ledger.link.read(ids, 1, seconds, self._interrupt)
        heard = streams_of(reply)
        if keys.news in heard:
            self._last_news = next(rows[-1][0] for name, rows in reply or () if name == keys.news.encode()).decode()
            self.hurry()

    async def _group_made(self, ask: Callable[[], Awaitable[Taken]]) -> Taken:
        try:
            return await ask()
        except QueueError as error:
            if not is_group_lost(error):
                raise
            _log.warning("the consumer group %r was gone and is created again", self._ledger.keys.group)
            await self._ledger.open()
            return await ask()

    # --- lost streams ----------------------------------------------------------------------------------------------

    async def sweep(self) -> None:
        """Look for streams without an owner, for as long as this runs."""
        retrying, pause = Retrying(self._lines, self._ledger.clock), 0.0
        while True:
            await self._ledger.clock.wait(self._look, pause)
            self._look.clear()
            try:
                pause = await self._sweep_once()
                retrying.succeeded()
            except Exception as error:
                service = self._ledger.keys.service
                await retrying.failed(f"service {service!r}: cannot look for lost streams", error, self._look)
                pause = 0.0  # that was the pause: the next look is not left to the next round

    async def _sweep_once(self) -> float:
        """Take what may be taken, tell of the rest; how long to wait before the next look."""
        ledger, finder = self._ledger, self._finder
        began = ledger.clock.monotonic()
        hungry = self._left_at is not None and began >= self._left_at + _COURTESY
        await self._strays.settle()
        await self._recover()
        late: list[Late] = []
        skip = 0
        while True:
            async with self._strays.asking():
                asked, most = ledger.clock.monotonic(), finder.room if finder.takes_over else 0
                swept = await ledger.sweep(most, finder.held, hungry=hungry, skip=skip)
                for given in swept.given:
                    finder.found(given, asked)
            late += [lost for lost in swept.late if not finder.owns(lost.stream, lost.epoch)]  # soon renewed
            skip += swept.staying
            if swept.is_last or (finder.takes_over and most <= len(swept.given)):
                break  # of what it would take and has no room for, it need not see all
        finder.swept(swept)
        told = [lost for lost in late if (lost.stream, lost.epoch) in self._late or finder.missing(lost)]
        self._late = {(lost.stream, lost.epoch) for lost in told}
        self._left_at = (self._left_at or began) if late and finder.takes_over else None
        return self._pause(swept)

    async def _recover(self) -> None:
        """Look for what was left behind without a lease: everything at first, then a page at a time."""
        is_first = self._page == "-" and not self._has_recovered
        while True:
            following, aside = await self._ledger.recover(self._page)
            self._page = following or "-"
            self._finder.set_aside(aside)
            if not is_first or not following:
                break
        self._has_recovered = True

    def _pause(self, swept: Swept) -> float:
        # At different moments, so that not all come at once for the same stream.
        pause = min(self._interval * (0.5 + random.random() / 2), self._strays.pause)
        if self._left_at is not None:
            return _COURTESY
        return pause if swept.next_ms is None else min(pause, swept.next_ms / 1000 + 0.05 + random.random() * 0.05)
