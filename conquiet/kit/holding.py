"""The one holder of leases: it renews what is held, tells of what is lost, and ends with its owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Hashable, Iterable
from contextlib import contextmanager, suppress
from typing import Any, Final, Generic, TypeVar

from conquiet.kit.clock import Clock
from conquiet.kit.keepalive import Keepalive
from conquiet.kit.loopthread import on_private_loop
from conquiet.kit.retrying import Lines

__all__ = ["TAKEN", "Holder"]

_L = TypeVar("_L")
_log = logging.getLogger("conquiet.kit")
TAKEN: Final = "another consumer has it"
"""Why a lease is lost of which the server says so."""
_LATE: Final = 0.6
"""The part of a lease's time after which a renewal is overdue: there should have been one after a third."""


class Holder(Generic[_L]):
    """Renews every lease three times in its life, on the private loop, where a handler that blocks its own loop cannot
    delay it.

    ``renew`` asks the server to prolong leases and returns those that belong to others now; it runs on the private loop
    and needs connections of its own, which ``close`` closes. A renewal that is not answered in time says nothing, and
    is repeated soon. ``lost`` hears of each lost lease and why, and ``answered`` of each answer, both on the loop of
    :meth:`open`. If that loop is closed without :meth:`aclose`, nothing is renewed any more.
    """

    def __init__(
        self,
        key: Callable[[_L], Hashable],
        renew: Callable[[list[_L]], Awaitable[Collection[_L]]],
        lost: Callable[[_L, str], None],
        close: Callable[[], Coroutine[Any, Any, None]],
        ttl: float,
        clock: Clock,
        name: str,
        lines: Lines,
        answered: Callable[[], None] | None = None,
    ) -> None:
        self._key = key
        self._renew = renew
        self._lost = lost
        self._close = close
        self._ttl = ttl
        self._clock = clock
        self._name = name
        self._answered = answered
        self._ending: list[_L] = []
        self._held: dict[Hashable, _L] = {}
        self._refused: set[Hashable] = set()
        """Lost leases of which the owner's loop may not know yet: it may be blocked."""
        self._answered_at = 0.0
        """Local time of the last renewal that was answered."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keepalive = Keepalive(self._beat, ttl / 3, clock, self._abandoned, lines)

    async def open(self) -> None:
        """Begin to renew."""
        self._loop = asyncio.get_running_loop()
        await self._keepalive.start()

    async def aclose(self) -> None:
        """Renew nothing more."""
        try:
            await self._keepalive.aclose()
        finally:  # also when there is no time left
            await on_private_loop(self._close())

    def __len__(self) -> int:
        return len(self._held)

    @property
    def leases(self) -> list[_L]:
        """All that are held."""
        return list(self._held.values())

    def get(self, key: Hashable) -> _L | None:
        """The lease of this key, if it is held."""
        return self._held.get(key)

    def has(self, lease: _L) -> bool:
        """Whether a lease is held and not lost, as far as the last renewal told."""
        key = self._key(lease)
        return key in self._held and key not in self._refused

    def add(self, leases: Iterable[_L], asked: float) -> None:
        """Hold leases that were asked for at local time ``asked``; the next beat renews them."""
        if not self._held:
            self._answered_at = asked
        key = self._key
        self._held.update([(key(lease), lease) for lease in leases])

    def forget(self, key: Hashable) -> None:
        """Hold no lease of this key any longer."""
        if self._refused:
            self._refused.discard(key)
        self._held.pop(key, None)

    def drop(self, lease: _L) -> bool:
        """Hold this lease no longer; whether it was held, and not another of the same key."""
        key = self._key(lease)
        is_held = self._held.get(key) is lease
        if is_held:
            self.forget(key)
        return is_held

    def lose(self, lease: _L, reason: str = TAKEN) -> None:
        """Drop a lease that is held no more, and tell why; not one that is ending, or was dropped meanwhile."""
        if not self._is_ending(lease) and self.drop(lease):
            self._lost(lease, reason)

    @contextmanager
    def ending(self, lease: _L) -> Generator[None]:
        """Within the block the server is asked to end a lease: it is neither renewed, nor lost by what it says."""
        self._ending.append(lease)
        try:
            yield
        finally:
            self._ending[:] = [one for one in self._ending if one is not lease]

    def _is_ending(self, lease: _L) -> bool:
        return any(one is lease for one in self._ending)

    async def catch_up(self, asked: float | None = None) -> None:
        """Renew at once if no renewal was possible for a while: what has run out is ours until others take it.

        ``asked`` is the local time since when the lease could not be renewed, if that is not the last answer's.
        """
        since = self._answered_at if asked is None else asked
        if self._held and self._clock.monotonic() - since > self._ttl * _LATE:
            await self.beat()

    async def beat(self) -> None:
        """Renew now."""
        await on_private_loop(self._beat())

    # --- on the private loop ----------------------------------------------------------------------------------

    async def _beat(self) -> None:
        asked = self._clock.monotonic()
        leases = self.leases
        if self._ending:
            leases = [lease for lease in leases if not self._is_ending(lease)]
        gone = await self._renew(leases)
        self._answered_at = max(self._answered_at, asked)
        self.refused(gone)

    def refused(self, gone: Collection[_L]) -> None:
        """For ``renew``, before it raises what became of others: the server says that these are not held any more."""
        if gone:
            self._refused.update(map(self._key, gone))
        if gone or self._answered is not None:
            assert self._loop is not None
            with suppress(RuntimeError):  # that loop has been closed, and all is over
                self._loop.call_soon_threadsafe(self._after_beat, gone)

    async def _abandoned(self) -> None:
        if self._held:
            _log.warning("%s: the event loop was closed: %d leases run out", self._name, len(self._held))
            self._held.clear()
        await self._close()

    # --- on the owner's loop ----------------------------------------------------------------------------------

    def _after_beat(self, gone: Collection[_L]) -> None:
        for lease in gone:
            self.lose(lease)
        if self._answered is not None:
            self._answered()
