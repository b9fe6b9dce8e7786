"""Waiting for what happens to a queue in Redis: all waiters of a store share one connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from conquiet.errors import QueueError
from conquiet.kit.service import Background
from conquiet.wire.connections import Connections
from conquiet.wire.interrupt import Interrupt
from conquiet.wire.keys import JobKeys
from conquiet.wire.parser import Reply
from conquiet.wire.scripts import Script, run
from conquiet.wire.streams import pack, position

__all__ = ["NOW", "Waiter", "Watch"]

_WATCH: Final = Script.named("jobs_watch")
_PART: Final = Script.named("jobs_part")
NOW: Final = "now"
"""The mark of a claim after which there may be more at once."""
_SLICE: Final = 10.0
"""How long one read lasts; after a read without waiters, the watch ends."""
_REQUEST: Final = 60.0
"""How long the queue goes on telling which jobs end after it was asked to."""
_REPEAT: Final = 20.0
_PAGE: Final = 1000
"""Far less than the stream of ended jobs holds: a page that is not full was the last, and nothing was missed."""
_SOON: Final = 0.1
"""Seconds in which a worker that was told of jobs should claim, and a worker that claimed in vain should wait."""
_MOMENT: Final = 0.2
"""Seconds for which leaving waits until the server knows of it."""

_Position: TypeAlias = tuple[int, int]


@dataclass(slots=True, eq=False)
class Waiter:
    """A caller that waits for the end of a job, or for news after ``marks``, which has a position in each stream."""

    marks: Mapping[str, _Position] = field(default_factory=dict[str, _Position])
    event: asyncio.Event = field(default_factory=asyncio.Event)
    error: QueueError | None = None

    def check(self) -> None:
        """Raise what went wrong while waiting, as an error of this waiter's own."""
        if self.error is not None:
            raise QueueError(str(self.error)) from self.error.__cause__ or self.error


class Watch:
    """Listens to one queue as long as a caller waits, and a little longer.

    Reading the streams changes nothing on the server. The position in each is kept here, and every waiter says from
    where on it wants to know, so that nothing falls between two reads.

    The server tells one store of a job, and the watch tells one waiter of that store. A waiter that was told, or has
    left, is to claim soon: else another is told in its place, of this store or, if it has none, of another.
    """

    def __init__(
        self, link: Connections, keys: JobKeys, name: str, offset: Callable[[], int], gone: Callable[[Watch], None]
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._link = link
        self._keys = keys
        self._name = name
        self._own = keys.news_of(name)
        self._offset = offset
        self._gone = gone
        self._owed: asyncio.TimerHandle | None = None
        self._is_missing = False
        self._listeners: set[Waiter] = set()
        self._ends: dict[str, set[Waiter]] = {}
        self._heard: dict[str, _Position] = {}
        """Up to where the news were read: those to all, and those to this store."""
        self._ended: str | None = None
        self._interrupt = Interrupt()
        self._asked = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self._used = time.monotonic()
        self._background = Background()
        self._reading: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def is_over(self) -> bool:
        """Whether it listens no more, or is about to end: all tasks of the loop may have been cancelled."""
        reading = self._reading
        return self._closed or (reading is not None and (reading.done() or reading.cancelling() > 0))

    # --- who waits --------------------------------------------------------------------------------------------

    async def listen(self, mark: str) -> Waiter | None:
        """A waiter for news after ``mark``; ``None`` if there already was some. To be left with :meth:`leave`."""
        if mark == NOW:
            return None
        to_all, _, to_this = mark.partition("/")
        waiter = Waiter({self._keys.news: position(to_all), self._own: position(to_this)})
        self._used = time.monotonic()
        for stream, begin in waiter.marks.items():
            if self._heard.get(stream, begin) > begin:
                # What was heard may be lost to the server itself, after a failover: then it is no news any more.
                self._heard[stream] = await self._last(stream)
                if self._heard[stream] > begin:
                    return None
        if not self._heard.keys() >= waiter.marks.keys():
            self._interrupt.request()
        self._heard = {**waiter.marks, **self._heard}
        self._listeners.add(waiter)
        self._start()
        self.settle()
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
        """Forget a waiter; one for news is to claim soon, or another is told in its place."""
        self._used = time.monotonic()
        if waiter in self._listeners:
            self._listeners.discard(waiter)
            self.owe(is_missing=True)
        waiting = self._ends.get(id) if id is not None else None
        if waiting is not None and id is not None:
            waiting.discard(waiter)
            if not waiting:
                del self._ends[id]

    @property
    def is_awaited(self) -> bool:
        """Whether a caller waits for news here, or has claimed and is about to wait."""
        return bool(self._listeners) or (self._owed is not None and not self._is_missing)

    def owe(self, *, is_missing: bool = False) -> None:
        """A caller counts as waiting and will wait soon; or it was told or has left, and is missing until it claims."""
        self._is_missing |= is_missing
        if self._owed is None and not self._closed:
            self._owed = self.loop.call_later(_SOON, self._pay)

    def settle(self) -> None:
        """A caller claims or waits."""
        self._is_missing = False
        if self._owed is not None:
            self._owed.cancel()
            self._owed = None

    async def aclose(self) -> None:
        """Stop, and fail all waiters; another store is told of the jobs that no waiter here will claim."""
        is_idle = self._owed is not None or bool(self._listeners)
        self._gone(self)
        self._fail(self._closing())
        self._closed = True
        self.settle()
        if is_idle:
            with suppress(TimeoutError):
                async with asyncio.timeout(_MOMENT):
                    await self._part()
        await self._background.aclose()

    def _pay(self) -> None:
        """Tell another waiter of a job: the one that was told has not claimed, and may have left."""
        self._owed, is_missing = None, self._is_missing
        if self._listeners and is_missing:
            self._told(1)
        elif not self._listeners and not self._closed:
            self._background.start(self._part(), "part")

    async def _part(self) -> None:
        with suppress(QueueError):  # others look for themselves after a while
            await run(self._link, self._keys.news, _PART(self._keys.all(), self._offset(), self._name))

    def _told(self, count: int) -> None:
        """This store was told of so many jobs: as many who wait are to look."""
        _wake([waiter for waiter in self._listeners if not waiter.event.is_set()][:count])
        self.owe(is_missing=True)

    # --- the one reader ---------------------------------------------------------------------------------------

    async def _last(self, stream: str) -> _Position:
        """The last news that the server knows of."""
        reply = await self._link.call(stream, pack("XREVRANGE", stream, "+", "-", "COUNT", 1))
        return position(reply[0][0].decode()) if reply else (0, 0)

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
        self._heard.setdefault(self._keys.news, position(heard.decode()))
        if self._ended is None:
            self._ended = ended.decode()
            self._interrupt.request()
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
                self._interrupt = Interrupt()
                self._take(await self._link.read(self._after(), _PAGE, _SLICE, self._interrupt))
        except QueueError as error:
            self._fail(error)
        finally:
            self._over()

    def _over(self, _: object = None) -> None:
        """The reading task has ended, perhaps before its first step."""
        self._gone(self)
        self._closed = True
        self._fail(self._closing())

    def _closing(self) -> QueueError:
        return QueueError(f"queue {self._keys.queue!r} is not watched any more: its connection was closed")

    def _after(self) -> dict[str, str]:
        """From where on to read each stream; that of ended jobs only after a caller has waited for one."""
        after = {stream: f"{milliseconds}-{count}" for stream, (milliseconds, count) in self._heard.items()}
        return after if self._ended is None else after | {self._keys.ended: self._ended}

    def _take(self, reply: Reply | None) -> None:
        for name, entries in reply or ():
            stream, last = name.decode(), entries[-1][0].decode()
            if stream != self._keys.ended:
                self._heard[stream] = position(last)
            if stream == self._keys.news:
                _wake(waiter for waiter in self._listeners if waiter.marks[stream] < self._heard[stream])
                continue
            if stream == self._own:
                self._told(sum(int(fields[1]) for _, fields in entries))
                continue
            self._ended = last
            if len(entries) == _PAGE:
                # More may have gone by than the stream holds: let all waiters look.
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
