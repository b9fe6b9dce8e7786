"""A handler inside a database transaction, whatever the database's driver is like."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Any, Final, Generic, Protocol, Self, TypeAlias, TypeVar

import anyio

from conquiet.message import QueueMessage

__all__ = ["DbFactory", "DbTx", "Handler", "Transactions"]

_log = logging.getLogger("conquiet.queue")
_ROLLBACK: Final = 10.0


class DbTx(Protocol):
    """A transaction under way; a driver's connection will often do. Methods may be ``async``."""

    def commit(self) -> Any:
        """Make its effects durable."""
        ...

    def rollback(self) -> Any:
        """Undo its effects."""
        ...


_Tx = TypeVar("_Tx", bound=DbTx)
_Tx_co = TypeVar("_Tx_co", bound=DbTx, covariant=True)


class DbFactory(Protocol[_Tx_co]):
    """Begins transactions; ``begin`` may be ``async``."""

    def begin(self) -> _Tx_co | Awaitable[_Tx_co]:
        """A new transaction."""
        ...


Handler: TypeAlias = Callable[[QueueMessage, _Tx], Awaitable[None] | None]
"""What is done with a message within a transaction; may be ``async``."""


class Transactions(Generic[_Tx]):
    """Runs a handler in one transaction a message: commit if it returns, rollback whatever else happens."""

    def __init__(self, handler: Handler[_Tx], factory: DbFactory[_Tx]) -> None:
        self._handler = handler
        self._begin = factory.begin
        self._thread: ThreadPoolExecutor | None = None
        if not (_is_async(handler) or _is_async(factory.begin)):
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="conquiet-transaction")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    async def handle(self, message: QueueMessage) -> None:
        """Returns after the commit; raises what the handler, the commit or a cancellation raised."""
        tx: _Tx = await self._call(self._begin)
        try:
            await self._call(self._handler, message, tx)
            await self._call(tx.commit)
        except BaseException as error:
            await self._roll_back(tx, error)
            raise

    async def _roll_back(self, tx: _Tx, error: BaseException) -> None:
        # Shielded: a cancelled run must not leave the transaction open.
        with anyio.move_on_after(_ROLLBACK, shield=True) as scope:
            try:
                await self._call(tx.rollback)
            except Exception as failure:
                _log.exception("rollback failed")
                error.add_note(f"The rollback failed too: {failure!r}")
        if scope.cancelled_caught:
            error.add_note(f"The rollback was given up after {_ROLLBACK:g} s.")

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        result = function(*args) if self._thread is None else await self._on_thread(function, *args)
        return await result if inspect.isawaitable(result) else result

    async def _on_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        work = partial(copy_context().run, _outcome, function, *args)
        future: asyncio.Future[tuple[Any, BaseException | None]] = asyncio.get_running_loop().run_in_executor(
            self._thread, work
        )
        try:
            result, error = await asyncio.shield(future)
        except asyncio.CancelledError:
            # A thread cannot be stopped: wait, since a rollback behind its back would tear the transaction.
            with anyio.CancelScope(shield=True):
                await asyncio.wait([future])
            raise
        if error is not None:
            raise error
        return result


def _outcome(function: Callable[..., Any], *args: Any) -> tuple[Any, BaseException | None]:
    """What a call returned or raised, as a value: a future takes no ``StopIteration``, and would never be done."""
    try:
        return function(*args), None
    except BaseException as error:
        return None, error


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )
