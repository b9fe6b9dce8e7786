"""The one private event loop of the process, in a daemon thread, and what a fork does to it.

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
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from conquiet.errors import ConquietError

__all__ = ["PRIVATE_LOOP", "LoopThread", "forks", "on_private_loop", "outlive_fork"]

_T = TypeVar("_T")

_GRACE: Final = 2.0

_living: weakref.WeakSet[object] = weakref.WeakSet()
_attic: list[object] = []
_forks = 0


def outlive_fork(thing: object) -> None:
    """Keep ``thing`` from being finalised in processes that are forked from this one while it lives."""
    _living.add(thing)


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


async def on_private_loop(work: Coroutine[Any, Any, _T]) -> _T:
    """The outcome of ``work``, run on the private loop, whichever loop the caller is on."""
    loop = PRIVATE_LOOP.loop()
    if asyncio.get_running_loop() is loop:
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


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
