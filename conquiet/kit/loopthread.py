"""The threads of the library: the one private event loop, in a daemon, and those that run what blocks.

A forked child has the parent's loop, sockets and epoll set, but not its thread. Were the garbage collector to
find an inherited connection there, closing it would edit the epoll set that the child *shares with the parent*,
and the parent's next command would hang. So the child keeps all of it for ever, unused, and starts anew.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from conquiet.errors import ConquietError

__all__ = [
    "PRIVATE_LOOP",
    "LoopThread",
    "Threads",
    "forks",
    "leave_behind",
    "new_lock",
    "on_private_loop",
    "outlive_fork",
]

_T = TypeVar("_T")

_GRACE: Final = 2.0

_living: weakref.WeakSet[object] = weakref.WeakSet()
_attic: list[object] = []
_forks = 0


def outlive_fork(thing: object) -> None:
    """Keep ``thing`` from being finalised in processes that are forked from this one while it lives."""
    _living.add(thing)


def leave_behind(thing: object) -> None:
    """In a forked child: keep what is the parent's for ever, unused."""
    _attic.append(thing)


def new_lock() -> AbstractContextManager[bool]:
    """A lock for what threads share and hold for moments only."""
    return threading.Lock()


def forks() -> int:
    """How many forks lie between the first process and this one: what was made at another count is not ours."""
    return _forks


class LoopThread:
    """A loop in a daemon thread, started by the first caller, never at import."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self.building = threading.RLock()
        """To be held while something is built that all threads share."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.ended = False
        """Whether the process is exiting: no more calls then."""

    def loop(self) -> asyncio.AbstractEventLoop:
        """The running loop; from any thread."""
        loop = self._loop
        if loop is not None:
            return loop
        with self._lock:
            if self.ended:
                raise ConquietError("the interpreter is shutting down: no more calls can be made")
            if self._loop is None:
                self._start()
            assert self._loop is not None
            return self._loop

    def is_current_thread(self) -> bool:
        """Whether the caller already runs on the private loop, where waiting for it would never end."""
        return self._thread is threading.current_thread()

    def _start(self) -> None:
        loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(loop,), name=self._name, daemon=True)
        self._loop = loop
        self._thread.start()

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.close()

    def leave_behind(self) -> None:
        """In a forked child: put the parent's loop where nothing touches it; the next call starts another."""
        _attic.append((self._loop, self._thread, self._lock, self.building))
        self._lock = threading.Lock()
        self.building = threading.RLock()
        self._loop = self._thread = None

    def shut_down(self) -> None:
        """At exit: cancel what runs, wait a moment for it, end the thread. Best effort."""
        with self._lock:
            self.ended = True
            loop, thread, self._loop = self._loop, self._thread, None
        if loop is None or thread is None:
            return
        with contextlib.suppress(RuntimeError, TimeoutError, asyncio.CancelledError):
            asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result(_GRACE)
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(loop.stop)
            thread.join(_GRACE)


class Threads:
    """Up to ``most`` threads for functions that block; belongs to one loop.

    Daemons, unlike an executor's: a program that ends does not wait for them, and what they have not done by then was
    simply not done.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._started = self._busy = 0

    def run(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        """The outcome of ``work``, run in a thread; as many at a time as there may be threads."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_T] = loop.create_future()

        def job() -> None:
            try:
                settle = partial(self._succeed, done, work())
            except BaseException as error:
                settle = partial(self._fail, done, error)
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(settle)

        self._busy += 1
        if self._busy > self._started and self._started < self._most:
            self._started += 1
            threading.Thread(target=self._work, name=f"{self._name}-{self._started}", daemon=True).start()
        self._jobs.put(job)
        return done

    def close(self) -> None:
        """Let the threads end once they have done what they were given."""
        for _ in range(self._started):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _succeed(self, done: asyncio.Future[_T], result: _T) -> None:
        self._busy -= 1
        if not done.done():
            done.set_result(result)

    def _fail(self, done: asyncio.Future[_T], error: BaseException) -> None:
        self._busy -= 1
        if isinstance(error, StopIteration):  # which no future takes: it would never be done
            error = RuntimeError("the function raised StopIteration")
        if not done.done():
            done.set_exception(error)


async def on_private_loop(work: Coroutine[Any, Any, _T]) -> _T:
    """The outcome of ``work``, run on the private loop, whichever loop the caller is on."""
    loop = PRIVATE_LOOP.loop()
    if asyncio.get_running_loop() is loop:
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


def result_from_private_loop(work: Coroutine[Any, Any, _T], seconds: float) -> _T:
    """The outcome of ``work``, run on the private loop, for a thread that waits; cancelled after ``seconds``."""
    running = asyncio.run_coroutine_threadsafe(work, PRIVATE_LOOP.loop())
    try:
        return running.result(seconds)
    finally:
        running.cancel()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


def _after_fork_in_child() -> None:
    global _forks
    _forks += 1
    _attic.extend(_living)
    PRIVATE_LOOP.leave_behind()


PRIVATE_LOOP: Final = LoopThread("conquiet-sync")

os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(PRIVATE_LOOP.shut_down)
