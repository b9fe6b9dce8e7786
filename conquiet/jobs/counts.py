"""How many jobs a queue has, in which state, and for how long they wait."""

from __future__ import annotations

from collections.abc import Mapping

from conquiet.jobs.job import JobState

__all__ = ["JobCounts"]


class JobCounts(dict[JobState, int]):
    """How many jobs are in each state, by state. Those that are ready are due, or scheduled for later."""

    def __init__(self, states: Mapping[JobState, int], scheduled: int = 0, oldest_ms: int | None = None) -> None:
        super().__init__({state: states.get(state, 0) for state in JobState})
        self.scheduled = scheduled
        """Ready, but not to be claimed yet."""
        self.due = self[JobState.READY] - scheduled
        """To be claimed now."""
        self.oldest_age = None if oldest_ms is None else max(0, oldest_ms) / 1000
        """For how many seconds the job that has waited longest could have been claimed; ``None`` if none is due."""
