"""A consumer of whole streams: each has one living owner, and a dead one is replaced."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar, Final, Self, Unpack

from conquiet.balance.consumer import Consumer
from conquiet.balance.events import StreamAdded, StreamDisowned, StreamEvent
from conquiet.balance.lease import StreamLease
from conquiet.balance.ledger import Ledger
from conquiet.balance.options import BalanceKeywords, BalanceOptions
from conquiet.balance.running import Runner, StreamHandler
from conquiet.errors import ConfigError, StreamNotOwnedError
from conquiet.kit import rules
from conquiet.kit.ids import incarnation
from conquiet.kit.lifecycle import Life
from conquiet.kit.opened import Opened
from conquiet.kit.options import takes
from conquiet.kit.service import MOMENT, to_its_end
from conquiet.wire.address import Address, AddressLike
from conquiet.wire.connections import Connections
from conquiet.wire.keys import BalanceKeys

__all__ = ["StreamBalancer"]

_log = logging.getLogger("conquiet.balance")
_LONGEST_NAME: Final = 1024


class StreamBalancer(Opened):
    """Hands whole streams of a service to its consumers, of which this is one.

    Every unfinished stream has exactly one owner that is alive, if there is one with room for it. An owner that
    dies, or is not heard of for ``lease_ttl`` seconds, is replaced; if it comes back, it can change nothing, for its
    epoch is over. With ``auto_claim`` lost streams are taken over at once; without, ``StreamExpired`` tells of them,
    and ``claim`` takes them, but for those that a consumer finds when it begins: it takes them over in any case.
    ``done_stream`` finishes a stream; ending the consumer only releases what it owns.

    A consumer owns at most ``max_streams``, and takes no more than its fair share while others have room. With
    ``rebalance`` it also gives away what is more than that when others join; by default only :meth:`run` does. With
    ``progress_timeout`` a stream is not held for longer than that without a sign that work on it goes on.

    A consumer finds lost streams by looking at the deadlines of all leases. ``keyspace_hint="listen"`` makes it look at
    once when the server notifies it; ``"enable"`` also turns these notifications on, and leaves the others as they are.
    """

    _lease_type: ClassVar[type[StreamLease]] = StreamLease

    @takes(BalanceOptions)
    def __init__(self, client: AddressLike, **options: Unpack[BalanceKeywords]) -> None:
        self._options = taken = BalanceOptions(**options)
        self._me = f"{taken.name}#{incarnation()}"
        link = Connections(Address.of(client))
        self._ledger = Ledger(link, BalanceKeys(taken.service), self._me, taken.lease_ttl, taken.clock)
        self._consumer = Consumer(self._ledger, taken, self._lease_type)
        name = f"consumer {self._me!r} of service {taken.service!r}"
        stop = partial(self._consumer.terminate, "stopped")
        self._life = Life(name, _log, handle_signals=taken.handle_signals, on_stop=stop)
        self._open = ExitStack()
        self._drained = 0.0
        """Seconds of its drain time that the handlers had when the last run ended."""

    @classmethod
    @takes(BalanceOptions)
    def connect(cls, url: str, **options: Unpack[BalanceKeywords]) -> Self:
        """A consumer of the service at the server of that URL."""
        return cls(url, **options)

    @property
    def consumer(self) -> str:
        """The name under which it is known in Redis: the configured one and a part that is new each time."""
        return self._me

    @property
    def owned(self) -> Mapping[str, StreamLease]:
        """The streams that it owns now."""
        return {lease.stream: lease for lease in self._consumer.streams.leases}

    # --- life -------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Begin to look for streams. ``async with`` does it; a producer that only adds streams need not."""
        self._check_process()
        if self._life.is_lived or self._life.is_leaving:
            raise ConfigError("a balancer can be entered once: make another")
        self._open.enter_context(self._life.lived())
        try:
            await self._consumer.open()
        except BaseException:
            await self.aclose()
            raise

    def stop(self) -> None:
        """Let ``events`` and ``run`` end; returns at once, safe from any thread and from signal handlers."""
        self._life.stop()

    async def aclose(self) -> None:
        """Release what is owned, unfinished as it is, and leave; may be called again.

        Takes ``drain_timeout`` plus a second at most: what could not be released by then, since the server does not
        answer, others have when its lease has run out. Cancelled meanwhile, it leaves all the same, and raises the
        cancellation afterwards. In a forked child it releases nothing: what is owned is the parent's.
        """
        if self._life.is_inherited:
            await self._ledger.link.aclose()
            return
        was_open = self._life.is_lived
        if not self._life.is_leaving:
            self._consumer.terminate("closed")
        with self._open.pop_all():
            seconds = max(self._options.drain_timeout - self._drained, 0.0)
            await self._life.leave(partial(self._consumer.drain, was_open), self._consumer.close, seconds)

    # --- producing --------------------------------------------------------------------------------------------

    async def add_stream(self, stream: str, info: Mapping[str, Any] | None = None) -> str:
        """Add a stream for a consumer to own; returns the ID of its entry. An unfinished one is not added again."""
        name = _stream(stream)
        if info is not None and not isinstance(info, Mapping):
            raise ConfigError(f"info must be a mapping, not {info!r}")
        id, is_new = await self._ledger.add(name, info or {})
        if is_new:
            self._consumer.metrics.added(1)
        return id

    # --- consuming --------------------------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[StreamEvent]:
        """What happens to streams, until exactly one ``StreamTerminated`` ends it."""
        self._check_process()
        if not self._life.is_leaving:  # what is closed still tells what it has to
            self._check_open()
        while (event := await self._consumer.event_buffer.next()) is not None:
            yield event

    async def claim(self, stream: str) -> StreamLease:
        """Own a stream without an owner; ``AlreadyClaimedError`` if it has one, and nothing is changed.

        ``max_streams`` does not limit it: the caller asks for this stream.
        """
        self._check_open()
        return await self._consumer.claim(_stream(stream))

    async def done_stream(self, stream: str) -> None:
        """Finish an owned stream: it is forgotten, and may be added anew."""
        await self._consumer.finish(self._mine(stream))

    async def release_stream(self, stream: str) -> None:
        """Give an owned stream back, unfinished, so that another can have it at once."""
        await self._consumer.release(self._mine(stream))

    async def run(self, handler: StreamHandler) -> None:
        """Call ``handler(stream, lease)`` for each stream that is owned, until :meth:`stop`.

        What others leave is taken over, and given away when others join. A handler that returns has finished its
        stream; one that raises is called again after a while; one whose stream is lost is cancelled. Plain functions
        run in threads, where ``lease.owned`` tells of a loss. At the end handlers are cancelled, and have half of
        ``drain_timeout`` to end.
        """
        self._check_open()
        consumer = self._consumer
        if consumer.runner is not None:
            raise ConfigError("the balancer runs a handler already")
        runner = Runner(
            handler,
            self._options.max_streams,
            self._options.drain_timeout / 2,
            self._options.clock,
            consumer.lines,
            consumer.finish,
            consumer.late,
        )
        consumer.run(runner)
        try:
            for held in consumer.told:  # of before, for instance of a run that was cancelled
                runner.start(held)
            async for event in self.events():
                if isinstance(event, StreamAdded) and (lease := consumer.streams.get(event.stream)) is not None:
                    runner.start(lease)
                elif isinstance(event, StreamDisowned):
                    runner.cancel(event.stream, event.epoch)
        finally:
            loop = asyncio.get_running_loop()
            began = loop.time()
            try:
                await to_its_end(runner.aclose(), "end", self._options.drain_timeout / 2 + MOMENT)
            finally:
                consumer.runner = None
                self._drained = loop.time() - began

    def _mine(self, stream: str) -> StreamLease:
        self._check_process()
        lease = self._consumer.mine(_stream(stream))
        if lease is None and not self._life.is_leaving:
            self._check_open()
        if lease is None:
            raise StreamNotOwnedError(f"stream {stream!r} is not, or no longer, this consumer's")
        return lease

    def _check_process(self) -> None:
        if self._life.is_inherited:
            raise ConfigError("the balancer was made before a fork and is the parent's: make another here")

    def _check_open(self) -> None:
        self._check_process()
        if not self._life.is_lived or self._life.is_leaving:
            raise ConfigError("the balancer is not open: use it within 'async with'")


def _stream(value: object) -> str:
    stream = rules.text("stream", value)
    if len(stream.encode()) > _LONGEST_NAME:
        raise ConfigError(f"stream must be at most {_LONGEST_NAME} bytes long, not {len(stream.encode())}")
    return stream
