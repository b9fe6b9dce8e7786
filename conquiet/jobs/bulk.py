"""Many jobs brought back, called off or removed, by what they have in common: a page at a time."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypedDict

from conquiet.errors import ConfigError, JobStateError, UnknownJobError
from conquiet.jobs.job import TRANSITIONS, Event, Job, JobState
from conquiet.jobs.store import JobPage
from conquiet.kit import rules

__all__ = ["JobBatch", "JobFilter", "JobFilterKeywords", "change_many"]

_AT_ONCE: Final = 50
"""How many jobs are changed side by side."""


class JobFilterKeywords(TypedDict, total=False):
    """:class:`JobFilter` as type checkers see it at a call."""

    error: str | None
    task: str | None
    key: str | None
    after: dt.datetime | None
    before: dt.datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """What jobs have in common; what is ``None`` is not asked for.

    ``error`` is the class of the last error, as in ``"ValueError"``, or its whole first line, as in ``"cancelled"``.
    ``after`` and ``before`` are held against the time at which a job finished, or was enqueued if it is not finished.
    """

    error: str | None = None
    task: str | None = None
    key: str | None = None
    after: dt.datetime | None = None
    before: dt.datetime | None = None

    def __post_init__(self) -> None:
        for name in ("error", "task", "key"):
            if getattr(self, name) is not None:
                rules.text(name, getattr(self, name))
        for name in ("after", "before"):
            moment = getattr(self, name)
            if moment is not None and (not isinstance(moment, dt.datetime) or moment.tzinfo is None):
                raise ConfigError(f"{name} must be a datetime with a time zone, not {moment!r}")

    def has(self, job: Job) -> bool:
        """Whether ``job`` is one of them."""
        moment = job.finished_at or job.enqueued_at
        return (
            self.task in (None, job.task)
            and self.key in (None, job.key)
            and (self.after is None or moment >= self.after)
            and (self.before is None or moment < self.before)
            and (self.error is None or _is_of(job.last_error, self.error))
        )


@dataclass(frozen=True, slots=True)
class JobBatch:
    """The jobs that one call has changed, and where to go on; ``cursor`` is ``None`` when all were looked at."""

    job_ids: Sequence[str]
    cursor: str | None


async def change_many(
    look: Callable[[JobState, int, str | None], Awaitable[JobPage]],
    event: Event,
    page: tuple[JobState, int, str | None],
    which: JobFilterKeywords,
    change: Callable[[str], Awaitable[Job | bool | None]],
) -> JobBatch:
    """Change those jobs of a page that have something in common; what others have changed meanwhile is left as it is.

    ``JobStateError`` if ``event`` cannot happen to jobs in the state of the page.
    """
    wanted, state = JobFilter(**which), page[0]
    if state in JobState and (state, event) not in TRANSITIONS:
        raise JobStateError(f"{event} is not possible for jobs that are {state}")
    seen = await look(*page)
    ids = [job.id for job in seen.jobs if wanted.has(job)]
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(id: str) -> bool:
        async with places:
            try:
                return await change(id) is not False
            except (JobStateError, UnknownJobError):
                return False

    done = await asyncio.gather(*map(one, ids))
    return JobBatch([id for id, is_done in zip(ids, done, strict=True) if is_done], seen.cursor)


def _is_of(last_error: str | None, error: str) -> bool:
    """Whether a job's last error is of a class of that name, with or without its module, or is that text."""
    line = (last_error or "").partition("\n")[0]
    name = line.partition(":")[0]
    return error in (line, name, name.rpartition(".")[2])
