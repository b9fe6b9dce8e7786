"""Streams that the server has given to this consumer, and the consumer does not know of: an answer was lost."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from conquiet.balance.ledger import Given, Ledger
from conquiet.errors import AlreadyClaimedError, ConfigError

if TYPE_CHECKING:
    from conquiet.balance.consumer import Consumer

__all__ = ["Strays"]

_LOOKS: Final = 2
"""A question whose connection broke may reach the server after the next one: a second look follows."""
_FIRST: Final = "-"


class Strays:
    """A caller asks for streams within :meth:`asking`, so that one question is on its way at a time.

    If it is not answered, for whatever reason, the server may have given streams all the same, and would keep them
    for this consumer until the leases end. So what is the consumer's by the server's word, and unknown to it, is looked
    for before the next question, and a second time as long after that as a heartbeat takes. It is owned then, in a new
    epoch; or given back, if its caller was told of a failure.
    """

    def __init__(self, ledger: Ledger, keeper: Consumer, hurry: Callable[[], None]) -> None:
        self._ledger = ledger
        self._keeper = keeper
        self._hurry = hurry
        self._asking = asyncio.Lock()
        self._due = -math.inf
        self._unwanted: set[str] = set()
        self.looks = 0
        """How many looks are to come."""

    @property
    def pause(self) -> float:
        """Seconds until the next look."""
        return max(0.0, self._due - self._ledger.clock.monotonic()) if self.looks else math.inf

    def doubt(self, *unwanted: str) -> None:
        """An answer did not come. The users of these streams were already told that the consumer does not own them."""
        self.looks, self._due = _LOOKS, -math.inf
        self._unwanted.update(unwanted)
        self._hurry()

    @asynccontextmanager
    async def asking(self, *wished: str) -> AsyncGenerator[None]:
        """Ask for streams within the block, and own those that are given before it ends.

        ``wished`` are those whose asker is told of a failure.
        """
        async with self._asking:
            try:
                yield
            except (AlreadyClaimedError, ConfigError):
                raise  # that was an answer
            except BaseException:
                self.doubt(*wished)
                raise
            self._unwanted.difference_update(wished)

    async def settle(self) -> None:
        """Look, if it is time to."""
        if self.pause > 0:
            return
        async with self._asking:
            if self.pause > 0:
                return  # another task has looked meanwhile
            looks, after = self.looks, _FIRST
            while after:
                asked = self._ledger.clock.monotonic()
                page, after = await self._page(after, self._keeper.known)
                await self._take_in(page, asked)
            if self.looks == looks:  # no further doubt since
                self.looks -= 1
                self._due = self._ledger.clock.monotonic() + self._ledger.ttl / 3
            if not self.looks:
                self._unwanted.clear()

    async def all(self, known: Collection[str]) -> list[Given]:
        """All there are at the end, beside the ``known`` entries, owned until they are released."""
        found: list[Given] = []
        async with self._asking:
            after = _FIRST if self.looks else ""
            while after:
                page, after = await self._page(after, known)
                found += page
        return found

    async def _page(self, after: str, known: Collection[str]) -> tuple[list[Given], str]:
        ids, after = await self._ledger.pending(after)
        unknown = [id for id in ids if id not in known]
        return await self._ledger.regrant(unknown) if unknown else [], after

    async def _take_in(self, page: list[Given], asked: float) -> None:
        unwanted: list[tuple[str, int]] = []
        for given in page:
            if given.stream in self._unwanted or self._keeper.room <= 0:
                unwanted.append((given.stream, given.epoch))
            else:
                self._keeper.found(given, asked)
        if unwanted:
            await self._ledger.release(unwanted)
