"""From where on claims look for jobs: from the beginning, or for a while from where the last one stopped. Pure.

A claim reads what is in line from the beginning, and passes over the entries of jobs that others have claimed. As a
rule PostgreSQL has removed those. While a transaction elsewhere is open that might still see them, it cannot, and every
look from the beginning costs more than the one before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

__all__ = ["Looks", "Place"]

_DEAR: Final = 25.0
"""Milliseconds from which on a look is dear ..."""
_DEAR_EACH: Final = 0.25
"""... and how many more for each job that it found."""
_REST: Final = 10
"""A look from the beginning comes at most after so many times the time that the last one took."""
_SLACK: Final = 1000
"""Milliseconds for which a job may have been on its way into the line."""


class Place(NamedTuple):
    """Where a job stands in line; places compare as the jobs follow."""

    urgency: int
    """The priority, negated."""
    ready_ms: int
    number: int


@dataclass(slots=True)
class Looks:
    """What one process knows of the line of one queue."""

    _last: Place | None = None
    _dear: int = field(default=0)
    _until: float = 0.0

    def begin(self, now: float) -> Place | None:
        """After which place to look, at this moment; ``None`` is from the beginning."""
        return self._last if now < self._until else None

    def left(self, now: float) -> float:
        """In how many seconds a claim should look from the beginning."""
        return max(0.0, self._until - now)

    def looked(self, now: float, took_ms: float, jobs: int) -> None:
        """A look from the beginning has found so many. Two dear ones in a row are no accident."""
        is_dear = took_ms > _DEAR + _DEAR_EACH * jobs
        self._dear = self._dear + 1 if is_dear else 0
        self._until = now + _REST * took_ms / 1000 if self._dear >= 2 else 0.0

    def found(self, last: Place | None, is_all: bool, store_ms: int) -> None:
        """A look has come as far as ``last``; ``is_all`` if nothing was left after it, at that time of the store."""
        last = last or self._last
        if last is not None and is_all:
            # Who gets in line from now on, in the same priority, is not ready since long.
            last = max(last, Place(last.urgency, store_ms - _SLACK, 0))
        self._last = last
