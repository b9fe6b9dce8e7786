"""Runs a handler inside a database transaction, with any driver, sync or async."""

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

from conquiet.kit.handlers import is_async
from conquiet.kit.service import to_its_end
from conquiet.message import QueueMessage

__all__ = ["DbFactory", "DbTx", "Handler", "Transactions"]

_log = logging.getLogger("conquiet.queue")
_ROLLBACK: Final = 10.0
_PATIENCE: Final = 10.0
"""Seconds for which a cancelled run waits for what its thread is doing, which cannot be stopped."""
_ATTEMPTS: Final = 3
"""How often a rollback is begun that was itself cancelled, as by code that cancels all tasks."""


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
"""Handles a message within a transaction; may be ``async``."""


class Transactions(Generic[_Tx]):
    """Runs a handler in one transaction a message: commit if it returns, rollback whatever else happens."""

    def __init__(self, handler: Handler[_Tx], factory: DbFactory[_Tx]) -> None:
        self._handler = handler
        self._begin = factory.begin
        self._thread: ThreadPoolExecutor | None = None
        if not (is_async(handler) or is_async(factory.begin)):
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
        begun: list[_Tx] = []
        try:
            tx = await self._call(self._begun, begun)
            begun[:] = [tx]
            await self._call(self._handler, message, tx)
            await self._call(self._committed, begun)
        except BaseException as error:
            await self._roll_back(begun, error)
            raise

    def _begun(self, begun: list[_Tx]) -> Any:
        tx = self._begin()
        if not inspect.isawaitable(tx):
            begun.append(tx)  # here, because a cancelled run hears no more of what a thread returns
        return tx

    def _committed(self, begun: list[_Tx]) -> Any:
        done = begun[0].commit()
        if not inspect.isawaitable(done):
            begun.clear()  # here, too: what is committed is not rolled back, whether or not the run hears of it
        return done

    async def _roll_back(self, begun: list[_Tx], error: BaseException) -> None:
        def rollback() -> Any:
            # Looked up only now: on the thread, after a begin or commit that was under way when the run was cancelled.
            return begun[0].rollback() if begun else None

        deadline = anyio.current_time() + _ROLLBACK
        is_over = False

        async def undo() -> None:
            nonlocal is_over
            with anyio.move_on_after(deadline - anyio.current_time()) as scope:
                try:
                    await self._call(rollback, patient=False)
                except Exception as failure:
                    _log.exception("rollback failed")
                    error.add_note(f"The rollback failed too: {failure!r}")
            if scope.cancelled_caught:
                error.add_note(f"The rollback was given up after {_ROLLBACK:g} s.")
            is_over = True

        # A cancelled run must not leave the transaction open, also if it or the rollback is cancelled again.
        cancelled: asyncio.CancelledError | None = None
        for _ in range(_ATTEMPTS):
            try:
                await to_its_end(undo(), "rollback")
            except asyncio.CancelledError as again:
                cancelled = again
            if is_over:
                break
        if cancelled is not None:
            raise cancelled

    async def _call(self, function: Callable[..., Any], *args: Any, patient: bool = True) -> Any:
        result = function(*args) if self._thread is None else await self._on_thread(partial(function, *args), patient)
        return await result if inspect.isawaitable(result) else result

    async def _on_thread(self, function: Callable[[], Any], patient: bool) -> Any:
        context = copy_context()
        future = asyncio.get_running_loop().run_in_executor(self._thread, lambda: context.run(_outcome, function))
        try:
            result, error = await asyncio.shield(future)
        except asyncio.CancelledError:
            # A cancelled caller finds the transaction ended; after a while, the thread ends it alone.
            if patient:
                with anyio.move_on_after(_PATIENCE, shield=True):
                    await asyncio.wait([future])
            raise
        if error is not None:
            raise error
        return result


def _outcome(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What a call returned or raised, as a value: a future takes no ``StopIteration``, and would never be done."""
    try:
        return function(), None
    except BaseException as error:
        return None, error
