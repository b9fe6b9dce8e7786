"""The one clone of a store on which all its workers renew their leases."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from conquiet.jobs.store import JobStore
from conquiet.kit.loopthread import forks, leave_behind, new_lock

__all__ = ["HeartbeatStore", "SharesHeartbeats"]


class HeartbeatStore:
    """One clone of a store for all who renew leases on the private loop, so that many queues share its connections.

    It is made for the first of them and closed when the last has gone. A forked child makes its own.
    """

    def __init__(self, origin: JobStore, clone: Callable[[], JobStore] | None = None) -> None:
        self._origin = origin
        self._clone = clone or origin.clone
        self._lock = new_lock()
        self._store: JobStore | None = None
        self._users = 0
        self._forks = forks()

    def borrow(self) -> tuple[JobStore, Callable[[], Coroutine[Any, Any, None]]]:
        """The clone, and how to give it back, on the private loop; to give it back twice does nothing more."""
        if self._forks != forks():
            leave_behind((self._store, self._lock))
            self._store, self._users, self._forks, self._lock = None, 0, forks(), new_lock()
        with self._lock:
            store = self._store = self._store or self._clone()
            self._users += 1
        borrowed = [store]

        async def give_back() -> None:
            if borrowed and self._is_last(borrowed.pop()):
                await store.aclose()

        return store, give_back

    def _is_last(self, store: JobStore) -> bool:
        with self._lock:
            if store is not self._store:  # the parent's
                return False
            self._users -= 1
            if self._users:
                return False
            self._store = None
            return store is not self._origin


class SharesHeartbeats:
    """A store whose workers share one clone of it for their heartbeats."""

    heartbeats: HeartbeatStore
    """By which they come to it."""
