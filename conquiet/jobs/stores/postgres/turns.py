"""Which listener looks for a new job, and when: a notice reaches all listeners, and one look is enough.

The notice of a few jobs names them. Each process that listens has a place among the others, and the first job's ID says
whose turn it is: that process looks at once, the next a few milliseconds later, and so on. The process that takes the
jobs tells the others, and those whose turn has not come do not look.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final
from zlib import crc32

__all__ = ["Turns"]

_STEP: Final = 0.02
"""Seconds between two turns, while all of them fit into ..."""
_LAST: Final = 0.1
"""... the seconds after which everyone has had a turn."""
_SOON: Final = 0.1
"""Seconds in which a waiter that was woken should claim; after that the others are woken."""


@dataclass(slots=True)
class Turns:
    """What one process has heard of, and when it is to look."""

    wake: Callable[[str, int | None], int]
    """Wakes so many waiters of a queue, or all; how many it has woken."""
    place: int = 0
    listeners: int = 1
    _heard: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """Jobs of each queue that are not known to be taken."""
    _claims: Counter[str] = field(default_factory=Counter[str])
    _woken: Counter[str] = field(default_factory=Counter[str])

    def stand(self, mine: int, all_of_them: Iterable[int]) -> None:
        """Take a place among the listeners, by the numbers of their connections."""
        others = sorted({*all_of_them, mine})
        self.place, self.listeners = others.index(mine), len(others)

    def heard(self, queue: str, ids: Sequence[str]) -> None:
        """Jobs are there: look when it is this process's turn, unless they are taken before."""
        self._heard.setdefault(queue, set()).update(ids)
        turn = (self.place + crc32(ids[0].encode())) % self.listeners
        if turn:
            pause = turn * min(_STEP, _LAST / self.listeners)
            asyncio.get_running_loop().call_later(pause, self._look, queue, ids)
        else:
            self._look(queue, ids)

    def taken(self, queue: str, ids: Iterable[str]) -> None:
        """Another process has these jobs."""
        if queue in self._heard:
            self._heard[queue].difference_update(ids)

    def claims(self, queue: str) -> bool:
        """A worker of this process claims; whether other processes may be about to look for the same jobs."""
        self._claims[queue] += 1
        is_woken = self._woken[queue] > 0
        if is_woken:
            self._woken[queue] -= 1
        return is_woken or bool(self._heard.get(queue))

    def _look(self, queue: str, ids: Sequence[str]) -> None:
        heard = self._heard.get(queue, set())
        left = heard.intersection(ids)
        heard -= left
        woken = self.wake(queue, len(left)) if left else 0
        if woken:
            self._woken[queue] += woken
            due = self._claims[queue] + woken
            asyncio.get_running_loop().call_later(_SOON, self._check, queue, due)

    def _check(self, queue: str, due: int) -> None:
        """Wake all if one that was woken has not claimed: it may have been cancelled."""
        if self._claims[queue] < due:
            self._woken[queue] = 0
            self.wake(queue, None)
