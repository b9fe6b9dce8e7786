"""An owned stream in the hands of its user: its name, its fencing epoch, and its data."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from conquiet.balance.ledger import Given, Ledger
from conquiet.errors import ConfigError, QueueError, StreamNotOwnedError
from conquiet.kit import entry_ids, rules
from conquiet.message import QueueMessage
from conquiet.wire.interrupt import Interrupt
from conquiet.wire.lease import Lease
from conquiet.wire.streams import read_entries_of, xread

__all__ = ["StreamLease"]

_PAGE: Final = 100
_WAIT_MS: Final = 5_000


class StreamLease:
    """A stream that its holder owns until another consumer takes it over.

    ``epoch`` grows with each change of owner: a handler that writes elsewhere can pass it on, so that the store refuses
    a lower one. ``read`` begins behind the last ``commit`` of the owner before. A holder that lost the stream
    can commit nothing; the next owner reads again what was read and not committed.
    """

    def __init__(self, given: Given, ledger: Ledger, lease: Lease) -> None:
        self._given = given
        self._ledger = ledger
        self._lease = lease
        self._interrupt = Interrupt()
        self._last: str | None = None
        self.progressed_at = ledger.clock.monotonic()
        """Local time of the last sign that the holder gets on with it."""
        self.waiting = 0
        """How many reads wait for entries: a holder that waits is not stuck."""

    @property
    def stream(self) -> str:
        """The name of the stream."""
        return self._given.stream

    @property
    def info(self) -> Mapping[str, Any]:
        """What was handed in along with it."""
        return self._given.info

    @property
    def epoch(self) -> int:
        """Higher than that of any owner before."""
        return self._given.epoch

    @property
    def entry_id(self) -> str:
        """Of its entry in the service's input stream."""
        return self._given.entry_id

    @property
    def owned(self) -> bool:
        """Whether no other consumer can own the stream now, as far as can be told without asking."""
        return self._lease.is_safe(self._ledger.clock.monotonic())

    def __repr__(self) -> str:
        return f"StreamLease(stream={self.stream!r}, epoch={self.epoch})"

    def progress(self) -> None:
        """Say that the work goes on, where there is a ``progress_timeout``; reading and committing say so too."""
        self.progressed_at = self._ledger.clock.monotonic()

    async def read(self, count: int = 100, block_ms: int | None = None) -> list[QueueMessage]:
        """The next entries of the stream, waiting up to ``block_ms`` for the first; none if there are none."""
        rules.integer("count", count, least=1)
        if block_ms is not None:
            rules.integer("block_ms", block_ms, least=1)
        self._check()
        self.progress()
        if self._last is None:
            self._last = await self._ledger.position(self.stream)
        after = {self.stream: self._last}
        link = self._ledger.link
        self.waiting += 1
        try:
            if block_ms is None:
                reply = await link.call(self.stream, xread(after, count=count))
            else:
                reply = await link.read(after, count, block_ms / 1000, self._interrupt)
        except QueueError:
            self._check()  # at the end the connection may be gone first
            raise
        finally:
            self.waiting -= 1
        self._check()
        found = [QueueMessage(self.stream, "", id.decode(), fields) for id, fields in read_entries_of(reply)]
        if found:
            self._last = found[-1].id
        self.progress()
        return found

    async def commit(self, message: QueueMessage | str) -> None:
        """All entries up to this one are done: the next owner begins behind it. ``StreamNotOwnedError`` if there
        is one already, and nothing is changed."""
        id = message.id if isinstance(message, QueueMessage) else message
        if isinstance(message, QueueMessage) and message.stream != self.stream:
            raise ConfigError(f"{message!r} is not of stream {self.stream!r}")
        if not entry_ids.is_entry_id(id):
            raise ConfigError(f"message must be an entry or its ID, as in '1526919030474-55', not {message!r}")
        await self._ledger.move(self.stream, self.epoch, id)
        self.progress()

    async def messages(self) -> AsyncIterator[QueueMessage]:
        """Each entry of the stream behind the last commit, without end; asking for the next commits the one before.

        Ends when the stream is lost or released.
        """
        done: QueueMessage | None = None
        self._rewind()  # a loop before that was left early has read more than it gave
        try:
            while True:
                for message in await self.read(_PAGE, _WAIT_MS):
                    if done is not None:
                        await self.commit(done)
                    done = message
                    yield message
                    self._check()
                if done is not None:
                    await self.commit(done)
                    done = None
        except StreamNotOwnedError:
            return

    def renewed(self, asked: float) -> None:
        """The server prolonged it when it was asked to at local time ``asked``."""
        self._lease.renewed(1, asked)

    def end(self) -> None:
        """It is over: a read that waits returns."""
        self._lease.lost = True
        self._interrupt.request()

    def _rewind(self) -> None:
        """Read again what was read and not committed, as another owner would."""
        self._last = None

    def _check(self) -> None:
        if not self.owned:
            raise StreamNotOwnedError(f"stream {self.stream!r} is not, or no longer, the caller's")
