"""The queue without ``await``, and the private server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Self, TypeVar

import conquiet as core
from conquiet import Address, ConfigError, DbFactory, DbTx, QueueConfig, QueueMessage
from conquiet.sync._bridge import Facade, blocking, items, passing
from conquiet.sync._portal import call
from conquiet.sync._signals import StoppedBySignals
from conquiet.sync._transaction import CallersFactory, callers_handler
from conquiet.wire.address import AddressLike

__all__ = ["EmbeddedRedis", "QueueConsumer", "RedisStreamsQueue"]

_Tx = TypeVar("_Tx", bound=DbTx)


class EmbeddedRedis(Facade[core.EmbeddedRedis]):
    __doc__ = core.EmbeddedRedis.__doc__
    _core_is_inherited = True

    def __init__(
        self,
        *,
        appendonly: bool = False,
        unix_socket: bool | None = None,
        port: int | None = None,
        directory: str | PathLike[str] | None = None,
        binary: str | PathLike[str] | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            core.EmbeddedRedis,
            appendonly=appendonly,
            unix_socket=unix_socket,
            port=port,
            directory=directory,
            binary=binary,
            settings=settings,
        )

    open = blocking(core.EmbeddedRedis.open)
    close = blocking(core.EmbeddedRedis.aclose)

    @property
    def url(self) -> str:
        return self._core().url

    @property
    def version(self) -> str:
        return self._core().version

    @property
    def software(self) -> str:
        return self._core().software

    @property
    def pid(self) -> int:
        return self._core().pid

    @property
    def directory(self) -> Path:
        return self._core().directory


class RedisStreamsQueue(Facade[core.RedisStreamsQueue]):
    __doc__ = core.RedisStreamsQueue.__doc__

    def __init__(self, client: AddressLike, config: QueueConfig) -> None:
        super().__init__(core.RedisStreamsQueue, Address.of(client), config)

    @classmethod
    def connect(cls, url: str, config: QueueConfig) -> Self:
        return cls(url, config)

    @property
    def config(self) -> QueueConfig:
        return self._core().config

    open = blocking(core.RedisStreamsQueue.open)
    close = blocking(core.RedisStreamsQueue.aclose)
    enqueue = blocking(core.RedisStreamsQueue.enqueue)
    enqueue_many = blocking(core.RedisStreamsQueue.enqueue_many)
    read = blocking(core.RedisStreamsQueue.read)
    ack = blocking(core.RedisStreamsQueue.ack)
    claim_stale = blocking(core.RedisStreamsQueue.claim_stale)
    backlog_stats = blocking(core.RedisStreamsQueue.backlog_stats)


class QueueConsumer(StoppedBySignals[core.QueueConsumer]):
    __doc__ = core.QueueConsumer.__doc__

    def __init__(self, queue: RedisStreamsQueue, *, handle_signals: bool = True) -> None:
        if not isinstance(queue, RedisStreamsQueue):
            raise ConfigError(f"queue must be a conquiet.sync.RedisStreamsQueue, not {queue!r}")
        super().__init__(core.QueueConsumer, queue, handle_signals=handle_signals)

    @property
    def config(self) -> QueueConfig:
        return self._core().config

    @property
    def stopping(self) -> bool:
        return self._core().stopping

    stop = passing(core.QueueConsumer.stop)
    next = blocking(core.QueueConsumer.next)
    ack = blocking(core.QueueConsumer.ack)

    def iter_messages(self) -> Iterator[QueueMessage]:
        with self._signals():
            yield from items(self._core().iter_messages())

    def run(self, *, handler: Callable[[QueueMessage, _Tx], None], db_factory: DbFactory[_Tx]) -> None:
        with self._signals():
            on_caller = CallersFactory(db_factory)
            call(lambda: self._core().run(handler=callers_handler(handler), db_factory=on_caller))

    def _wants_signals(self) -> bool:
        return bool(self._recipe[2]["handle_signals"])
