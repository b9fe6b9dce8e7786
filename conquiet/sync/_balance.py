"""Balanced streams without ``await``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Self, Unpack, cast

from conquiet import balance as core
from conquiet.balance import StreamEvent
from conquiet.balance.options import BalanceKeywords, BalanceOptions
from conquiet.kit.options import takes
from conquiet.message import QueueMessage
from conquiet.sync._bridge import blocking, items, passing
from conquiet.sync._portal import call, plain
from conquiet.sync._signals import StoppedBySignals
from conquiet.wire.address import Address, AddressLike

__all__ = ["StreamBalancer", "StreamLease"]


class StreamLease(core.StreamLease):
    __doc__ = core.StreamLease.__doc__

    def read(self, count: int = 100, block_ms: int | None = None) -> list[QueueMessage]:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        return call(super().read, count, block_ms)

    def commit(self, message: QueueMessage | str) -> None:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        call(super().commit, message)

    def messages(self) -> Iterator[QueueMessage]:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        return items(core.StreamLease.messages(cast("core.StreamLease", _Awaited(self))))

    read.__doc__ = core.StreamLease.read.__doc__
    commit.__doc__ = core.StreamLease.commit.__doc__
    messages.__doc__ = core.StreamLease.messages.__doc__


class _Awaited:
    """A lease as the core sees it, whose methods are awaited."""

    def __init__(self, lease: StreamLease) -> None:
        self._lease = lease

    def __getattr__(self, name: str) -> Any:
        if name in ("commit", "read"):
            return partial(getattr(core.StreamLease, name), self._lease)
        return getattr(self._lease, name)


class _Balancer(core.StreamBalancer):
    _lease_type = StreamLease


class StreamBalancer(StoppedBySignals[core.StreamBalancer]):
    __doc__ = core.StreamBalancer.__doc__

    @takes(BalanceOptions)
    def __init__(self, client: AddressLike, **options: Unpack[BalanceKeywords]) -> None:
        super().__init__(_Balancer, Address.of(client), **options)

    @classmethod
    @takes(BalanceOptions)
    def connect(cls, url: str, **options: Unpack[BalanceKeywords]) -> Self:
        return cls(url, **options)

    @property
    def consumer(self) -> str:
        return self._core().consumer

    @property
    def owned(self) -> Mapping[str, StreamLease]:
        return cast("Mapping[str, StreamLease]", self._core().owned)

    open = blocking(core.StreamBalancer.open)
    close = blocking(core.StreamBalancer.aclose)
    stop = passing(core.StreamBalancer.stop)
    add_stream = blocking(core.StreamBalancer.add_stream)
    done_stream = blocking(core.StreamBalancer.done_stream)
    release_stream = blocking(core.StreamBalancer.release_stream)

    def events(self) -> Iterator[StreamEvent]:
        yield from items(self._core().events())

    def claim(self, stream: str) -> StreamLease:
        return cast("StreamLease", call(self._core().claim, stream))

    def run(self, handler: Callable[[str, StreamLease], Any]) -> None:
        with self._signals():
            call(self._core().run, cast("Any", plain("handler", handler, "stream", "lease")))

    def _wants_signals(self) -> bool:
        return self._core()._options.handle_signals
