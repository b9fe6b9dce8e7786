"""In which order the deliveries of one partition may be handled: at most one of a key at a time. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from conquiet.kit.entry_ids import order as id_order
from conquiet.topics.consume.delivery import Delivery
from conquiet.topics.options import Order

__all__ = ["KeyOrder", "Parked"]

_ALL: Final = "\0all"
"""Stands for every key where a partition is handled strictly in order."""


@dataclass(frozen=True, slots=True)
class Parked:
    """What is remembered of a delivery that waits for its next attempt: not its body."""

    id: str
    key: str | None
    content: int
    """A hash of the entry."""

    @classmethod
    def of(cls, delivery: Delivery) -> Parked:
        """What is to be remembered of a delivery."""
        return cls(delivery.id, delivery.key, delivery.content)


class KeyOrder:
    """Who has each key, and who waits for it.

    Under ``block_key`` a parked delivery keeps its key, or its place in front of those behind it; under
    ``block_partition`` the whole partition counts as one key. Where batches are handled there are no keys.
    """

    def __init__(self, order: Order, *, keyless: bool = False) -> None:
        self.blocks = order != "unordered"
        """Whether a failed message holds up those behind it."""
        self.is_keyless = keyless
        self._is_one = order == "block_partition"
        self._waiting: dict[str, deque[Delivery | Parked]] = {}
        self.waiting = 0
        """How many deliveries wait behind another of their key."""

    def _key(self, key: str | None) -> str | None:
        if self.is_keyless:
            return None
        return _ALL if self._is_one else key

    def admit(self, delivery: Delivery) -> bool:
        """Whether a delivery may run now; else it waits until the one before it with the same key is done."""
        key = _ALL if self._is_one else delivery.key
        if key is None or self.is_keyless:
            return True
        waiting = self._waiting.get(key)
        if waiting is None:
            self._waiting[key] = deque()
            return True
        waiting.append(delivery)
        self.waiting += 1
        return False

    def admit_parked(self, parked: Parked) -> None:
        """One was taken over that waits for its next attempt."""
        key = self._key(parked.key)
        if self.blocks and key is not None:
            if key in self._waiting:
                self._waiting[key].append(parked)
            else:
                self._waiting[key] = deque()

    def admit_due(self, delivery: Delivery, parked: Parked | None) -> bool:
        """Whether one that was parked may run now: it has its key, or its place behind the one that has it."""
        if parked is None or not self.blocks:
            return self.admit(delivery)
        key = self._key(delivery.key)
        waiting = None if key is None else self._waiting.get(key)
        if waiting and parked in waiting:
            waiting[waiting.index(parked)] = delivery
            self.waiting += 1
            return False
        return True

    def park(self, parked: Parked) -> Delivery | None:
        """A delivery that ran is parked: the one that may run instead."""
        if not self.blocks:
            return self.release(parked.key)
        key = self._key(parked.key)
        if key is not None:
            self._waiting.setdefault(key, deque())
        return None

    def release(self, key: str | None) -> Delivery | None:
        """The delivery that had the key is done: the one that may run now."""
        key = _ALL if self._is_one else key
        if key is None or self.is_keyless:
            return None
        waiting = self._waiting.get(key)
        if not waiting:
            self._waiting.pop(key, None)
            return None
        following = waiting.popleft()
        if isinstance(following, Parked):  # it goes on waiting, now with the key
            return None
        self.waiting -= 1
        return following

    def forget_parked(self, parked: Parked) -> Delivery | None:
        """One that was parked never falls due: the one that may run now, if it was held up by that."""
        key = self._key(parked.key)
        waiting = None if key is None else self._waiting.get(key)
        if waiting and parked in waiting:
            waiting.remove(parked)
            return None
        return self.release(parked.key) if self.blocks else None

    def shed(self, count: int) -> list[Delivery]:
        """Forget up to so many that wait, the newest first; none in front of one that stays."""
        last = [one for queue in self._waiting.values() for one in _at_the_end(queue)]
        gone = sorted(last, key=lambda one: id_order(one.id), reverse=True)[:count]
        for delivery in gone:
            self._waiting[self._key(delivery.key) or ""].remove(delivery)
        self.waiting -= len(gone)
        return gone

    def forget_waiting(self, started: Iterable[Delivery]) -> None:
        """Forget all but those that have begun, which keep their keys."""
        self._waiting.clear()
        self.waiting = 0
        for delivery in started:
            key = self._key(delivery.key)
            if key is not None:
                self._waiting[key] = deque()

    def behind(self, delivery: Delivery) -> str | None:
        """The ID of the next one that waits until ``delivery`` is done."""
        key = self._key(delivery.key)
        waiting = None if key is None else self._waiting.get(key)
        return waiting[0].id if waiting else None


def _at_the_end(queue: deque[Delivery | Parked]) -> list[Delivery]:
    """The deliveries of a queue with no parked one behind them."""
    found: list[Delivery] = []
    for one in reversed(queue):
        if isinstance(one, Parked):
            break
        found.append(one)
    return found
