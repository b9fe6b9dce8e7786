"""A plain handler and a plain database for the core's ``run``, all of it on the calling thread."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar, cast

from conquiet.message import QueueMessage
from conquiet.queue import DbFactory, DbTx
from conquiet.sync._portal import on_caller, plain

__all__ = ["CallersFactory", "callers_handler"]

_Tx = TypeVar("_Tx", bound=DbTx)


class _CallersTx(Generic[_Tx]):
    def __init__(self, tx: _Tx) -> None:
        self.tx = tx

    async def commit(self) -> None:
        await on_caller(self.tx.commit)()

    async def rollback(self) -> None:
        await on_caller(self.tx.rollback)()


class CallersFactory(Generic[_Tx]):
    """Begins, commits and rolls back where the caller waits."""

    def __init__(self, factory: DbFactory[_Tx]) -> None:
        self._begin = plain("db_factory.begin", factory.begin)

    async def begin(self) -> _CallersTx[_Tx]:
        """A transaction begun on the calling thread."""
        return _CallersTx(cast("_Tx", await on_caller(self._begin)()))


def callers_handler(
    handler: Callable[[QueueMessage, _Tx], None],
) -> Callable[[QueueMessage, _CallersTx[_Tx]], Coroutine[Any, Any, None]]:
    """``handler`` for the core: it runs on the calling thread, with the transaction as its factory made it."""
    run = on_caller(plain("handler", handler, "message", "tx"))

    async def handle(message: QueueMessage, tx: _CallersTx[_Tx]) -> None:
        await run(message, tx.tx)

    return handle
