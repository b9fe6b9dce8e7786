"""A consumer of whole streams: each has one living owner, and a dead one is replaced."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, ClassVar, Final, Self

from conquiet.balance.consumer import Consumer
from conquiet.balance.events import StreamAdded, StreamDisowned, StreamEvent
from conquiet.balance.lease import StreamLease
from conquiet.balance.ledger import Ledger
from conquiet.balance.options import BalanceOptions, KeyspaceHint
from conquiet.balance.running import Runner, StreamHandler
from conquiet.errors import ConfigError, StreamNotOwnedError
from conquiet.kit import rules
from conquiet.kit.clock import SYSTEM_CLOCK, Clock
from conquiet.kit.ids import incarnation, process_name
from conquiet.kit.loopthread import forks
from conquiet.kit.service import Background
from conquiet.kit.signals import stop_on_signals
from conquiet.wire.address import Address, AddressLike
from conquiet.wire.keys import BalanceKeys
from conquiet.wire.link import Link

__all__ = ["StreamBalancer"]

_LONGEST_NAME: Final = 1024


class StreamBalancer:
    """Hands whole streams of a service to its consumers, of which this is one.

    Every unfinished stream has exactly one owner that is alive, if there is one with room for it. An owner that
    dies, or is not heard of for ``lease_ttl`` seconds, is replaced; if it comes back, it can change nothing, for its
    epoch is over. With ``auto_claim`` lost streams are taken over at once; without, ``StreamExpired`` tells of them,
    and ``claim`` takes them, but for those that a consumer finds when it begins: it takes them over in any case.
    ``done_stream`` finishes a stream; ending the consumer only releases what it owns.

    A consumer owns at most ``max_streams``, and takes no more than its fair share while others have room. With
    ``rebalance`` it also gives away what is more than that when others join; by default only :meth:`run` does. With
    ``progress_timeout`` a stream is not held for longer than that without a sign that work on it goes on.

    Lost streams are found by looking at the deadlines of all leases. ``keyspace_hint="listen"`` makes it look at once
    when the server tells of one, too; ``"enable"`` also asks the server to tell, and leaves its other notifications.
    """

    _lease_type: ClassVar[type[StreamLease]] = StreamLease

    def __init__(
        self,
        client: AddressLike,
        *,
        service: str,
        consumer: str | None = None,
        lease_ttl: float = 15.0,
        max_streams: int = 1000,
        auto_claim: bool = False,
        rebalance: bool | None = None,
        progress_timeout: float | None = None,
        sweep_interval: float | None = None,
        event_buffer: int = 1000,
        keyspace_hint: KeyspaceHint | None = None,
        handle_signals: bool = True,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        options = BalanceOptions(
            service=service,
            consumer=_default_consumer() if consumer is None else consumer,
            lease_ttl=lease_ttl,
            max_streams=max_streams,
            auto_claim=auto_claim,
            rebalance=rebalance,
            progress_timeout=progress_timeout,
            sweep_interval=sweep_interval,
            event_buffer=event_buffer,
            keyspace_hint=keyspace_hint,
            handle_signals=handle_signals,
            clock=clock,
        )
        self._options = options
        self._me = f"{options.consumer}#{incarnation()}"
        self._ledger = Ledger(Link(Address.of(client)), BalanceKeys(service), self._me, options.lease_ttl, clock)
        self._consumer = Consumer(self._ledger, options, self._lease_type)
        self._holding = self._consumer.holding
        self._background = Background()
        self._signals = ExitStack()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Task[None] | None = None
        self._is_open = False
        self._forks = forks()

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        service: str,
        consumer: str | None = None,
        lease_ttl: float = 15.0,
        max_streams: int = 1000,
        auto_claim: bool = False,
        rebalance: bool | None = None,
        progress_timeout: float | None = None,
        sweep_interval: float | None = None,
        event_buffer: int = 1000,
        keyspace_hint: KeyspaceHint | None = None,
        handle_signals: bool = True,
        clock: Clock = SYSTEM_CLOCK,
    ) -> Self:
        """A consumer of the service at the server of that URL."""
        return cls(
            url,
            service=service,
            consumer=consumer,
            lease_ttl=lease_ttl,
            max_streams=max_streams,
            auto_claim=auto_claim,
            rebalance=rebalance,
            progress_timeout=progress_timeout,
            sweep_interval=sweep_interval,
            event_buffer=event_buffer,
            keyspace_hint=keyspace_hint,
            handle_signals=handle_signals,
            clock=clock,
        )

    @property
    def consumer(self) -> str:
        """The name under which it is known in Redis: the configured one and a part that is new each time."""
        return self._me

    @property
    def owned(self) -> Mapping[str, StreamLease]:
        """The streams that it owns now."""
        return {lease.stream: lease for lease in self._holding.leases()}

    # --- life -------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Begin to look for streams. ``async with`` does it; whoever only adds streams needs not."""
        self._check_process()
        if self._is_open or self._closing is not None:
            raise ConfigError("a balancer can be entered once: make another")
        self._is_open = True
        self._loop = asyncio.get_running_loop()
        try:
            await self._consumer.open()
        except BaseException:
            await self.aclose()
            raise
        if self._options.handle_signals:
            self._signals.enter_context(stop_on_signals(self.stop))

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def stop(self) -> None:
        """Let ``events`` and ``run`` end; returns at once, safe from any thread and from signal handlers."""
        if self._loop is not None:
            with suppress(RuntimeError):  # that loop has been closed, and all is over
                self._loop.call_soon_threadsafe(self._consumer.terminate, "stopped")

    async def aclose(self) -> None:
        """Release what is owned, unfinished as it is, and leave. Takes a few seconds at most; may be called again.

        In a forked child it releases nothing: what is owned is the parent's.
        """
        if self._forks != forks():
            await self._ledger.link.aclose()
            return
        if self._closing is None:
            self._signals.close()
            self._consumer.terminate("closed")
            # A task of its own: who is cancelled while it waits for the end leaves nothing half done.
            self._closing = self._background.start(self._consumer.aclose(was_open=self._is_open), "close")
        await asyncio.shield(self._closing)

    # --- producing --------------------------------------------------------------------------------------------

    async def add_stream(self, stream: str, info: Mapping[str, Any] | None = None) -> str:
        """Hand a stream in to be owned by somebody; the ID of its entry. Unfinished ones are not added again."""
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
        if self._closing is None:  # what is closed still tells what it has to
            self._check_open()
        while (event := await self._consumer.outlet.next()) is not None:
            yield event

    async def claim(self, stream: str) -> StreamLease:
        """Own a stream that nobody has; ``AlreadyClaimedError`` if somebody does, and nothing is changed.

        It is the caller's wish, so ``max_streams`` is no limit for it.
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
        run in threads, where ``lease.owned`` tells of a loss.
        """
        self._check_open()
        consumer = self._consumer
        if consumer.runner is not None:
            raise ConfigError("the balancer runs a handler already")
        runner = Runner(handler, self._options.max_streams, self._options.clock, consumer.finish)
        consumer.run(runner)
        try:
            async for event in self.events():
                if isinstance(event, StreamAdded) and (lease := self._holding.get(event.stream)) is not None:
                    runner.start(lease)
                elif isinstance(event, StreamDisowned):
                    runner.cancel(event.stream, event.epoch)
        finally:
            await runner.aclose()
            consumer.runner = None

    def _mine(self, stream: str) -> StreamLease:
        self._check_process()
        lease = self._consumer.mine(_stream(stream))
        if lease is None and self._closing is None:
            self._check_open()
        if lease is None:
            raise StreamNotOwnedError(f"stream {stream!r} is not, or no longer, this consumer's")
        return lease

    def _check_process(self) -> None:
        if self._forks != forks():
            raise ConfigError("the balancer was made before a fork and is the parent's: make another here")

    def _check_open(self) -> None:
        self._check_process()
        if not self._is_open or self._closing is not None:
            raise ConfigError("the balancer is not open: use it within 'async with'")


def _stream(value: object) -> str:
    stream = rules.text("stream", value)
    if len(stream.encode()) > _LONGEST_NAME:
        raise ConfigError(f"stream must be at most {_LONGEST_NAME} bytes long, not {len(stream.encode())}")
    return stream


def _default_consumer() -> str:
    given = os.environ.get("POD_NAME") or os.environ.get("POD_IP")
    return re.sub(r"[^A-Za-z0-9._-]", "-", given)[:200] if given else process_name()
