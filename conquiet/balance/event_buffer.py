"""Events on their way to the user: bounded, in order, and ended by exactly one that says why."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from conquiet.balance.events import StreamAdded, StreamDisowned, StreamEvent, StreamTerminated

__all__ = ["EventBuffer"]


class EventBuffer:
    """Holds events until they are asked for.

    No stream is taken, and none is told to have expired, while ``room`` is 0: so at most ``most`` of these wait. The
    loss of an owned stream is never held up: at most one waits for each stream that the reader was told to own. If a
    stream is lost before its addition was read, neither of the two is told.
    """

    def __init__(self, most: int, is_owned: Callable[[str, int], bool], freed: Callable[[], None]) -> None:
        self._most = most
        self._is_owned = is_owned
        self._freed = freed
        self._waiting: deque[StreamEvent] = deque()
        self._news = asyncio.Event()
        self._is_closed = self._has_ended = False
        self._untold: set[tuple[str, int]] = set()

    @property
    def room(self) -> int:
        """How many more events may wait."""
        return 0 if self._is_closed else max(0, self._most - len(self._waiting))

    def will_tell(self, stream: str, epoch: int) -> bool:
        """Whether this addition has not been read yet."""
        return (stream, epoch) in self._untold

    def put(self, event: StreamEvent) -> None:
        """Tell this; after the end nothing is told any more."""
        if self._is_closed:
            return
        if isinstance(event, StreamAdded):
            self._untold.add((event.stream, event.epoch))
        elif isinstance(event, StreamDisowned) and (event.stream, event.epoch) in self._untold:
            return
        self._is_closed = isinstance(event, StreamTerminated)
        self._waiting.append(event)
        self._news.set()

    async def next(self) -> StreamEvent | None:
        """The next event, waiting for one; ``None`` after the last."""
        while not self._has_ended:
            while self._waiting:
                is_full, event = not self.room, self._waiting.popleft()
                if is_full:
                    self._freed()
                if self._is_worth_telling(event):
                    self._has_ended = isinstance(event, StreamTerminated)
                    return event
            self._news.clear()
            await self._news.wait()
        self._news.set()  # other readers have to learn it too
        return None

    def _is_worth_telling(self, event: StreamEvent) -> bool:
        if not isinstance(event, StreamAdded):
            return True
        self._untold.discard((event.stream, event.epoch))
        return self._is_closed or self._is_owned(event.stream, event.epoch)
