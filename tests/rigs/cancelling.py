"""Cancels a call at its first, second, ... suspension, until it completes before the cancellation; and what is left.

A suspension is a moment at which the call gives the event loop away: each is a place where a cancellation can arrive.
"""

from __future__ import annotations

import asyncio
import threading
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, TypeVar

import anyio

from conquiet.kit.loopthread import PRIVATE_LOOP
from tests.rigs.waiting import LONG, eventually

__all__ = [
    "HOWS",
    "Call",
    "Cancelled",
    "How",
    "Scene",
    "cancelled_at",
    "cancelled_everywhere",
    "followed",
    "nothing_left",
]

How: TypeAlias = Literal["task", "late task", "scope"]
HOWS: Final[tuple[How, ...]] = ("task", "late task", "scope")
"""By ``task.cancel()``, once, while the call waits; in the same moment as what it waits for, so that the answer is
there and nobody takes it; or by an anyio scope, which cancels again at each wait until it is left."""

_MOST_POINTS: Final = 2_000
_T = TypeVar("_T")
Call: TypeAlias = Callable[[], Awaitable[Any]]
Scene: TypeAlias = Callable[[], AbstractAsyncContextManager[Call]]


@dataclass(frozen=True)
class Cancelled:
    """What became of one call."""

    point: int
    has_arrived: bool
    """Whether the call came to the point, and so was cancelled; false if it had completed before."""
    was_raised: bool
    """Whether the call ended by that cancellation; it may also have been past the place where it still matters."""
    result: Any = None


async def cancelled_at(point: int, how: How, call: Call) -> Cancelled:
    """Make ``call`` and cancel it at its suspension number ``point``, the first being 1. Its own errors are raised."""
    trigger = _Trigger(point, is_late=how == "late task")
    token = _trigger.set(trigger)
    calling = asyncio.ensure_future(_by_scope(trigger, call) if how == "scope" else _by_task(trigger, call))
    _trigger.reset(token)
    try:
        async with asyncio.timeout(LONG):
            await asyncio.wait([calling])
    except TimeoutError:
        calling.cancel()
        raise AssertionError(f"cancelled at suspension {point} ({how}), the call does not end") from None
    return calling.result()


async def cancelled_everywhere(scene: Scene, how: How, *, at_least: int = 3) -> list[Cancelled]:
    """Cancel the call of a new ``scene`` at each of its suspensions; what became of each, the last one uncancelled.

    The scene gives the call, and checks after it, when it is left, that everything is as it should be.
    """
    found: list[Cancelled] = []
    while not found or found[-1].has_arrived:
        assert len(found) < _MOST_POINTS, "the call never completes"
        async with scene() as call:
            found.append(await cancelled_at(len(found) + 1, how, call))
    assert len(found) > at_least, f"only {len(found) - 1} suspensions: that is not the call that was meant"
    return found


def followed(work: Callable[..., Coroutine[Any, Any, _T]]) -> Callable[..., Coroutine[Any, Any, _T]]:
    """``work``, whose suspensions are points as well where a call leads to it in a task of its own."""

    async def counted(*args: Any, **options: Any) -> _T:
        trigger = _trigger.get()
        return await (work(*args, **options) if trigger is None else _counted(work(*args, **options), trigger))

    return counted


# --- how it is cancelled --------------------------------------------------------------------------------------


class _Trigger:
    """Cancels when it has counted to the point."""

    def __init__(self, point: int, *, is_late: bool) -> None:
        self.point = point
        self.is_late = is_late
        self.count = 0
        self.has_arrived = False
        self.cancel: Callable[[], object] = lambda: None
        self._last: object = None

    def suspended(self, waits_for: object) -> None:
        """The call gives the loop away until ``waits_for`` is there."""
        if waits_for is not None and waits_for is self._last:
            return  # what is followed, and awaited by the call itself
        self._last = waits_for
        self.count += 1
        if self.count != self.point:
            return
        if self.is_late and isinstance(waits_for, asyncio.Future):
            waits_for.add_done_callback(lambda _: self._pull())  # before the one by which the task goes on
        else:
            self._pull()

    def _pull(self) -> None:
        self.has_arrived = True
        self.cancel()


_trigger: ContextVar[_Trigger | None] = ContextVar("trigger", default=None)


async def _by_task(trigger: _Trigger, call: Call) -> Cancelled:
    task = asyncio.current_task()
    assert task is not None
    trigger.cancel = task.cancel
    try:
        result = await _counted(_awaited(call()), trigger)
    except asyncio.CancelledError:
        if not trigger.has_arrived:
            raise
        return Cancelled(trigger.point, True, True)
    finally:
        while task.cancelling():
            task.uncancel()
    return Cancelled(trigger.point, trigger.has_arrived, False, result)


async def _by_scope(trigger: _Trigger, call: Call) -> Cancelled:
    with anyio.CancelScope() as scope:
        trigger.cancel = scope.cancel
        result = await _counted(_awaited(call()), trigger)
        return Cancelled(trigger.point, trigger.has_arrived, False, result)
    assert scope.cancelled_caught
    return Cancelled(trigger.point, True, True)


async def _awaited(awaitable: Awaitable[_T]) -> _T:
    return await awaitable


@types.coroutine
def _counted(coroutine: Coroutine[Any, Any, _T], trigger: _Trigger) -> Generator[Any, Any, _T]:
    """As ``await coroutine``, telling ``trigger`` of each suspension."""
    sent: Any = None
    thrown: BaseException | None = None
    try:
        while True:
            try:
                waits_for = coroutine.send(sent) if thrown is None else coroutine.throw(thrown)
            except StopIteration as end:
                result: _T = end.value
                return result
            trigger.suspended(waits_for)
            sent, thrown = None, None
            try:
                sent = yield waits_for
            except BaseException as error:
                thrown = error
    finally:
        thrown = None  # held here, it would hold all that the call had, until the next garbage collection


# --- what is left ---------------------------------------------------------------------------------------------


def _tasks() -> set[str]:
    """The library's tasks on the running loop and on the private one, by name and number."""
    loops = [asyncio.get_running_loop(), *([PRIVATE_LOOP._loop] if PRIVATE_LOOP._loop is not None else [])]
    tasks = [task for loop in loops for task in asyncio.all_tasks(loop)]
    return {f"{task.get_name()} {id(task)}" for task in tasks if task.get_name().startswith("conquiet")}


def _threads() -> set[str]:
    return {f"{one.name} {one.ident}" for one in threading.enumerate() if one is not PRIVATE_LOOP._thread}


@asynccontextmanager
async def nothing_left(connections: Callable[[], int] = lambda: 0) -> AsyncGenerator[None]:
    """Of what is begun in the block, no task, no thread and no connection is there after it.

    ``connections`` tells how many there are, for instance those of a proxy. What ends by itself has a moment for it.
    """
    tasks, threads, count = _tasks(), _threads(), connections()
    yield
    await eventually(lambda: not _tasks() - tasks, "no task is left", LONG)
    await eventually(lambda: not _threads() - threads, "no thread is left", LONG)
    await eventually(lambda: connections() <= count, "no connection is left", LONG)
