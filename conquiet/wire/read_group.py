"""Streams that one command can read, and the callers that wait for entries of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from redis.exceptions import ResponseError

from conquiet.errors import QueueError
from conquiet.kit.entry_ids import order
from conquiet.kit.service import Background
from conquiet.wire.interrupt import Interrupt
from conquiet.wire.line import CLOSED
from conquiet.wire.parser import Reply
from conquiet.wire.streams import MOST_ARGUMENTS, Entry, pack, xread
from conquiet.wire.turns import Turns

if TYPE_CHECKING:
    from conquiet.wire.connections import Connections

__all__ = ["ReadGroup"]

_LONG: Final = 5.0
_SHORT: Final = 0.4
"""Seconds for which a read blocks where others wait for their turn: with 8 at a time, 20 reads a second."""
_LINGER: Final = 5.0
"""Seconds for which a stream is listened to after its reader left: most readers come back for more."""
_APART: Final = 0.05
"""Seconds between two interruptions of one read: all readers that came meanwhile share the second."""
_PACE: Final = 1e-5
"""Seconds of rest for each stream of a read that brought something, so that many streams cost no more than a share of
the time: each of them is named again in the next read."""
_REST_AT: Final = 50
_REST_MOST: Final = 0.05
_EACH_APART: Final = 0.05
"""Seconds for each stream that was asked for alone, before it is asked for again."""
_EACH_MOST: Final = 1.0
_ALIVE: Final = 1.0
"""Seconds for which an answer of a node counts as a sign of life."""
_MOST_STREAMS: Final = MOST_ARGUMENTS // 2 - 100
"""How many streams are read by one command before another is begun; a caller may come with some at once."""
_PING: Final = pack("PING")
_LATE: Final = object()


class _Caller:
    """A caller that waits: for which streams, and the promise of an answer."""

    __slots__ = ("after", "answer", "count", "found")

    def __init__(self, after: Mapping[str, str], count: int, loop: asyncio.AbstractEventLoop) -> None:
        self.after = after
        self.count = count
        self.found: list[tuple[bytes, Sequence[Entry]]] = []
        self.answer: asyncio.Future[Reply | None] = loop.create_future()

    def take(self, stream: str, name: bytes, begin: str, entries: Sequence[Entry]) -> bool:
        """Keep what is for this caller of the ``entries`` of a read from behind ``begin``; whether there is any."""
        mine = _behind(entries, begin, self.after[stream])
        if mine:
            self.found.append((name, mine if len(mine) <= self.count else mine[: self.count]))
        return bool(mine)

    def succeed(self, reply: Reply | None) -> None:
        if not self.answer.done():
            self.answer.set_result(reply)

    def fail(self, error: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # who has left does not ask for it


class ReadGroup:
    """Streams that one command can read: all of a server, or those of one slot of a Cluster.

    ``_positions`` says from behind which entry the next read begins in each stream. A stream stays in it for a while
    after its last reader left, until it has news without a reader.
    """

    def __init__(self, link: Connections, background: Background, turns_of: Callable[[str], Awaitable[Turns]]) -> None:
        self._link = link
        self._background = background
        self._turns_of = turns_of
        self._loop = asyncio.get_running_loop()
        self._callers: dict[str, set[_Caller]] = {}
        self._positions: dict[str, str] = {}
        self._left: dict[str, tuple[float, int]] = {}
        """Streams without a reader: since when, and how many entries the last one asked for."""
        self._turns: Turns | None = None
        self._reading: asyncio.Task[None] | None = None
        self._interrupt: Interrupt | None = None
        self._interrupted_at = float("-inf")
        self._renewal: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[Reply] | None = None

    # --- one caller -----------------------------------------------------------------------------------------------

    async def read(self, after: Mapping[str, str], count: int, seconds: float, interrupt: Interrupt) -> Reply | None:
        """As :meth:`SharedRead.read`; the failures of Redis as they are."""
        began = self._loop.time()
        if self._must_look_first(after):
            stream = next(iter(after))
            [reply] = await self._link.call_many(stream, (xread(after, count=count),))
            if isinstance(reply, Exception):
                raise reply
            self._is_heard()
            if reply:
                return reply
        caller = _Caller(after, count, self._loop)
        with interrupt.waking(lambda: caller.succeed(None)):
            if interrupt.requested:
                return None
            self._join(caller)
            timer = self._loop.call_at(began + seconds, caller.succeed, _LATE)
            try:
                reply = await caller.answer
            finally:
                timer.cancel()
                self._leave(caller)
        if reply is not _LATE:
            return reply
        await self._see_alive(next(iter(after)), began)
        return None

    def _must_look_first(self, after: Mapping[str, str]) -> bool:
        """Whether it would take long until a read covers ``after``, or would disturb the others for nothing."""
        if self.is_running and self._covers(after):
            return False
        return self._interrupt is not None or (self._turns is not None and self._turns.are_scarce)

    @property
    def has_room(self) -> bool:
        """Whether one command can read some more streams."""
        return len(self._positions) < _MOST_STREAMS

    def knows(self, stream: str) -> bool:
        """Whether the stream is listened to here."""
        return stream in self._positions

    @property
    def is_running(self) -> bool:
        """Whether a read is under way, or about to be."""
        return self._reading is not None and not self._reading.done()

    def _covers(self, after: Mapping[str, str]) -> bool:
        """Whether all news behind ``after`` will be told without a further command."""
        return all(
            (begin := self._positions.get(stream)) is not None and not _is_before(id, begin)
            for stream, id in after.items()
        )

    def _join(self, caller: _Caller) -> None:
        is_covered = self._covers(caller.after)
        for stream, id in caller.after.items():
            self._callers.setdefault(stream, set()).add(caller)
            self._left.pop(stream, None)
            begin = self._positions.get(stream)
            if begin is None or _is_before(id, begin):
                self._positions[stream] = id
        if not self.is_running:
            self._reading = self._background.start(self._run(), "shared-read")
            self._reading.add_done_callback(self._over)
        elif not is_covered:
            self._begin_anew()

    def _leave(self, caller: _Caller) -> None:
        for stream in caller.after:
            waiting = self._callers.get(stream)
            if waiting is not None:
                waiting.discard(caller)
                if not waiting:
                    del self._callers[stream]
                    self._left[stream] = (self._loop.time(), caller.count)

    async def _see_alive(self, stream: str, since: float) -> None:
        """Silence means that nothing came only if the server is there: ask one that has not answered since then."""
        if self._turns is not None and self._turns.heard_at > min(since, self._loop.time() - _ALIVE):
            return
        asking = self._asking
        if asking is None or asking.done():
            asking = self._asking = self._background.start(self._link.call_many(stream, (_PING,)), "ping")
            asking.add_done_callback(_heed)
        await asyncio.wait((asking,))
        if asking.cancelled():
            raise ConnectionError(CLOSED)
        error = asking.exception()
        if error is not None:
            raise error.__cause__ or error
        self._is_heard()

    def _is_heard(self) -> None:
        if self._turns is not None:
            self._turns.heard_at = self._loop.time()

    # --- the read -------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while self._callers:
            try:
                self._turns = turns = await self._turns_of(next(iter(self._callers)))
                interrupt, is_long = await turns.begin()
                try:
                    if self._callers:  # it may have been long until it was its turn
                        await self._read(interrupt, _LONG if is_long else _SHORT)
                finally:
                    turns.end(interrupt)
            except QueueError as error:
                cause = error.__cause__ or error
                if isinstance(cause, ResponseError):
                    await self._ask_each()
                else:
                    self._fail(cause)

    async def _read(self, interrupt: Interrupt, seconds: float) -> None:
        """One command, and what becomes of its reply."""
        self._forget_strays()
        asked = dict(self._positions)
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None
        self._interrupt = interrupt
        command = xread(asked, count=self._count(), block_ms=round(seconds * 1000))
        try:
            reply = await self._link.wait(next(iter(asked)), command, seconds, interrupt, harmless=True)
        finally:
            self._interrupt = None
        if reply or not interrupt.requested:
            self._is_heard()
        if reply:
            self._give(asked, reply)
            if len(asked) >= _REST_AT:
                await asyncio.sleep(min(len(asked) * _PACE, _REST_MOST))

    def _forget_strays(self) -> None:
        before = self._loop.time() - _LINGER
        for stream in [stream for stream, (left_at, _) in self._left.items() if left_at < before]:
            self._forget(stream)

    def _count(self) -> int:
        wanted = [caller.count for waiting in self._callers.values() for caller in waiting]
        return max(*wanted, *(count for _, count in self._left.values()), 1)

    def _forget(self, stream: str) -> None:
        self._left.pop(stream, None)
        self._positions.pop(stream, None)

    def _give(self, asked: Mapping[str, str], reply: Reply) -> None:
        """Tell each caller what came for it."""
        answered: set[_Caller] = set()
        for name, entries in reply:
            stream = name.decode()
            waiting = self._callers.get(stream)
            if waiting is None:
                self._forget(stream)
                continue
            takers = [caller for caller in waiting if caller.take(stream, name, asked[stream], entries)]
            begins = [caller.after[stream] for caller in waiting if caller not in takers]
            if takers:
                begins.append(entries[-1][0].decode())
            self._positions[stream] = begins[0] if len(begins) == 1 else min(begins, key=order)
            answered.update(takers)
        for caller in answered:
            self._leave(caller)
            caller.succeed(caller.found)

    # --- when it cannot go on ---------------------------------------------------------------------------------------

    def _begin_anew(self) -> None:
        """Interrupt the read, if one is running, so that the next covers those who came."""
        if self._interrupt is None or self._renewal is not None:
            return
        pause = self._interrupted_at + _APART - self._loop.time()
        if pause > 0:
            self._renewal = self._loop.call_later(pause, self._request)
        else:
            self._request()

    def _request(self) -> None:
        self._renewal = None
        if self._interrupt is not None:
            self._interrupted_at = self._loop.time()
            self._interrupt.request()

    async def _ask_each(self) -> None:
        """A read of many fails with any of them: each caller gets the answer to a question of its own."""
        for stream in list(self._left):
            self._forget(stream)
        callers = list(dict.fromkeys(caller for waiting in self._callers.values() for caller in waiting))
        if not callers:
            return
        commands = [xread(caller.after, count=caller.count) for caller in callers]
        try:
            replies = await self._link.call_many(next(iter(callers[0].after)), commands)
        except QueueError as error:
            self._fail(error.__cause__ or error)
            return
        answered = [(caller, reply) for caller, reply in zip(callers, replies, strict=True) if reply]
        for caller, reply in answered:
            self._dismiss(caller)
            if isinstance(reply, Exception):
                caller.fail(reply)
            else:
                caller.succeed(reply)
        if not answered:  # as while a slot moves
            await asyncio.sleep(min(_EACH_APART * len(callers), _EACH_MOST))

    def _dismiss(self, caller: _Caller) -> None:
        """Let a caller go, and do not listen to its streams any longer."""
        self._leave(caller)
        for stream in caller.after:
            if stream not in self._callers:
                self._forget(stream)

    def _fail(self, error: BaseException) -> None:
        for caller in [caller for waiting in self._callers.values() for caller in waiting]:
            self._dismiss(caller)
            caller.fail(error)

    def _over(self, reading: asyncio.Task[None]) -> None:
        """The task has ended, or was cancelled, perhaps before its first step."""
        if reading is not self._reading:
            return
        if self._renewal is not None:
            self._renewal.cancel()
        error = None if reading.cancelled() else reading.exception()
        self._fail(error or ConnectionError(CLOSED))
        self._positions.clear()
        self._left.clear()


def _heed(asking: asyncio.Task[Reply]) -> None:
    """Retrieve the error, though the caller may have left."""
    if not asking.cancelled():
        asking.exception()


def _behind(entries: Sequence[Entry], begin: str, after: str) -> Sequence[Entry]:
    """Those of the ``entries`` of a read from ``begin`` that are for a reader who is at ``after``."""
    if begin == after:
        return entries
    mark = order(after)
    return [entry for entry in entries if order(entry[0].decode()) > mark]


def _is_before(one: str, other: str) -> bool:
    return one != other and order(one) < order(other)
