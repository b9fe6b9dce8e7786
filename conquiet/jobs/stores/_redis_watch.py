"""Waiting for what happens to a queue in Redis: one blocked connection for all who wait in a process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from conquiet.errors import QueueError
from conquiet.kit.service import Background
from conquiet.wire.interrupt import Interrupt
from conquiet.wire.keys import JobKeys
from conquiet.wire.link import Link
from conquiet.wire.parser import Reply
from conquiet.wire.scripts import Script, run
from conquiet.wire.streams import pack

__all__ = ["Waiter", "Watch"]

_WATCH: Final = Script.named("jobs_watch")
_SLICE: Final = 10.0
"""How long one blocked read lasts; after one in which nobody waited, the connection is closed."""
_REQUEST: Final = 60.0
"""How long the queue goes on telling which jobs end after it was asked to."""
_REPEAT: Final = 20.0
_PAGE: Final = 1000
"""Far less than the stream of ended jobs holds: a page that is not full was the last, and nothing was missed."""


@dataclass(slots=True, eq=False)
class Waiter:
    """One who waits: for the end of a job, or for news after ``mark``."""

    mark: tuple[int, int] = (0, 0)
    event: asyncio.Event = field(default_factory=asyncio.Event)
    error: QueueError | None = None

    def check(self) -> None:
        """Raise what went wrong while waiting, as an error of this waiter's own."""
        if self.error is not None:
            raise QueueError(str(self.error)) from self.error.__cause__ or self.error


class Watch:
    """Listens to one queue as long as anybody waits, and a little longer.

    Reading the streams changes nothing on the server. The position in each is kept here, and every waiter says from
    where on it wants to know, so that nothing falls between two reads.
    """

    def __init__(self, link: Link, keys: JobKeys, gone: Callable[[Watch], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self._link = link
        self._keys = keys
        self._gone = gone
        self._blocking = Link(link.address)
        self._listeners: set[Waiter] = set()
        self._ends: dict[str, set[Waiter]] = {}
        self._heard: tuple[int, int] | None = None
        self._ended = "$"
        self._asked = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self._used = time.monotonic()
        self._background = Background()
        self._reading: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def is_over(self) -> bool:
        """Whether it listens no more, or is about to: somebody may have cancelled all tasks."""
        reading = self._reading
        return self._closed or (reading is not None and (reading.done() or reading.cancelling() > 0))

    # --- who waits --------------------------------------------------------------------------------------------

    async def listen(self, mark: str) -> Waiter | None:
        """A waiter for news after ``mark``; ``None`` if there already was some. To be left with :meth:`leave`."""
        waiter = Waiter(_position(mark))
        self._used = time.monotonic()
        if self._heard is not None and self._heard > waiter.mark:
            # What was heard may be lost to the server itself, after a failover: then it is no news any more.
            self._heard = await self._last()
            if self._heard > waiter.mark:
                return None
        if self._heard is None:
            self._heard = waiter.mark
        self._listeners.add(waiter)
        self._start()
        return waiter

    async def expect(self, id: str) -> Waiter:
        """A waiter for the end of a job: whatever ends after this is told to it. To be left with :meth:`leave`."""
        waiter = Waiter()
        self._ends.setdefault(id, set()).add(waiter)
        try:
            self._start()
            await self._ask()
        except BaseException:
            self.leave(waiter, id)
            raise
        return waiter

    def leave(self, waiter: Waiter, id: str | None = None) -> None:
        """Forget a waiter."""
        self._used = time.monotonic()
        self._listeners.discard(waiter)
        waiting = self._ends.get(id) if id is not None else None
        if waiting is not None and id is not None:
            waiting.discard(waiter)
            if not waiting:
                del self._ends[id]

    async def aclose(self) -> None:
        """Stop, and fail whoever still waits."""
        self._gone(self)
        self._fail(self._closing())
        self._closed = True
        await self._blocking.aclose()
        await self._background.aclose()

    # --- the one reader ---------------------------------------------------------------------------------------

    async def _last(self) -> tuple[int, int]:
        """The last news that the server knows of."""
        reply = await self._link.call(self._keys.news, pack("XREVRANGE", self._keys.news, "+", "-", "COUNT", 1))
        return _position(reply[0][0].decode()) if reply else (0, 0)

    async def _ask(self) -> None:
        """Make sure that the queue tells which jobs end; once for all who come at the same time."""
        if time.monotonic() < self._asked + _REPEAT:
            return
        if self._asking is None or self._asking.done():
            self._asking = self._background.start(self._request(), "watch")
        asking = self._asking
        await asyncio.wait([asking])
        if asking.cancelled():
            raise self._closing()
        error = asking.exception()
        if isinstance(error, QueueError):
            raise QueueError(str(error)) from error.__cause__
        asking.result()

    async def _request(self) -> None:
        asked = time.monotonic()
        words = round(_REQUEST * 1000)
        heard, ended = await run(self._link, self._keys.news, _WATCH(self._keys.all(), words))
        if self._heard is None:
            self._heard = _position(heard.decode())
        if self._ended == "$":
            self._ended = ended.decode()
        if asked >= self._asked + _REQUEST:
            # The queue had stopped telling, because this process was frozen, say.
            _wake(waiter for waiting in self._ends.values() for waiter in waiting)
        self._asked = asked

    def _start(self) -> None:
        if self._closed:
            raise self._closing()
        self._used = time.monotonic()
        if self._reading is None:
            self._reading = self._background.start(self._read(), "watch")
            self._reading.add_done_callback(self._over)

    async def _read(self) -> None:
        try:
            while self._listeners or self._ends or time.monotonic() < self._used + _SLICE:
                if self._ends:
                    await self._ask()
                self._take(await self._blocking.wait(self._keys.news, self._command(), _SLICE, Interrupt()))
        except QueueError as error:
            self._fail(error)
        finally:
            self._over()
            await self._blocking.aclose()

    def _over(self, _: object = None) -> None:
        """Nobody reads any more, or ever did: the task may have been cancelled before its first step."""
        self._gone(self)
        self._closed = True
        self._fail(self._closing())

    def _closing(self) -> QueueError:
        return QueueError(f"queue {self._keys.queue!r} is not watched any more: its connection was closed")

    def _command(self) -> bytes:
        milliseconds, count = self._heard or (0, 0)
        streams = (self._keys.news, self._keys.ended, f"{milliseconds}-{count}", self._ended)
        return pack("XREAD", "COUNT", _PAGE, "BLOCK", round(_SLICE * 1000), "STREAMS", *streams)

    def _take(self, reply: Reply) -> None:
        for stream, entries in reply or ():
            if stream.decode() == self._keys.news:
                self._heard = _position(entries[-1][0].decode())
                _wake(waiter for waiter in self._listeners if waiter.mark < self._heard)
                continue
            self._ended = entries[-1][0].decode()
            if len(entries) == _PAGE:
                # More may have gone by than the stream holds: let everybody look.
                _wake(waiter for waiting in self._ends.values() for waiter in waiting)
                continue
            for _, fields in entries:
                for id in fields[1::2]:
                    _wake(self._ends.get(id.decode(), ()))

    def _fail(self, error: QueueError) -> None:
        for waiter in [*self._listeners, *(one for waiting in self._ends.values() for one in waiting)]:
            waiter.error = waiter.error or error
            waiter.event.set()


def _wake(waiters: Iterable[Waiter]) -> None:
    for waiter in waiters:
        waiter.event.set()


def _position(id: str) -> tuple[int, int]:
    """An entry's ID as numbers, which compare as the entries do."""
    milliseconds, _, count = id.partition("-")
    return int(milliseconds or 0), int(count or 0)
