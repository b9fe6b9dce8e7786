"""What becomes of a job after a try, and who comes first when jobs are claimed. Pure."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from conquiet.errors import Reject, Retry
from conquiet.jobs.job import Job, Settlement
from conquiet.kit.policy import RetryPolicy

__all__ = ["MOST_DELAY", "Shares", "described", "judge", "shares"]

_SHARE: Final = 5
"""One place in so many goes to whom others would keep waiting for ever."""
MOST_DELAY: Final = 3650 * 86_400.0
"""The longest that a job may be put off: ten years, in seconds."""
_MOST_ERROR: Final = 10_000
_MOST_BRIEF: Final = 200


@dataclass(frozen=True, slots=True)
class Shares:
    """How many of a claim's places go first to jobs that were tried before, and to who has waited longest."""

    retries: int
    oldest: int


def shares(count: int, turn: int) -> Shares:
    """The shares of a claim of ``count`` jobs: a fifth for each, and at least one where there is room.

    A claim of one or two has no room for all, so there they take turns: ``turn`` counts the caller's claims.
    """
    share = max(1, count // _SHARE)
    if count >= 3:
        return Shares(share, share)
    if count == 2:
        return Shares(1, 0) if turn % 2 == 0 else Shares(0, 1)
    if turn % _SHARE < _SHARE - 1:
        return Shares(0, 0)
    return Shares(1, 0) if turn // _SHARE % 2 == 0 else Shares(0, 1)


def judge(
    job: Job, error: BaseException | str, retry: RetryPolicy, chance: Callable[[], float] = random.random
) -> Settlement:
    """What a failed try comes to: another one after a delay, or the end.

    ``attempts`` counts the one that failed: the first retry has the number 0, and there are ``max_retries`` of them.
    """
    full, brief = described(error)
    most = retry.max_retries if job.max_retries is None else job.max_retries
    may_retry = isinstance(error, str | Retry) or (not isinstance(error, Reject) and retry.retries(error))
    if not may_retry or job.attempts > most:
        return Settlement.of(job, "fail", error=full, brief=brief)
    delay = error.delay if isinstance(error, Retry) else None
    if delay is None:
        delay = retry.backoff.delay(max(job.attempts - 1, 0), chance)
    late = round(min(delay, MOST_DELAY) * 1000)
    return Settlement.of(job, "retry", delay_ms=late, error=full, brief=brief)


def described(error: BaseException | str) -> tuple[str, str]:
    """An error as it is kept: whole with its traceback, and its first line. Text that any store can hold."""
    if isinstance(error, str):
        full = first = error
    else:
        meant = isinstance(error, Reject | Retry) and str(error)
        first = meant or "".join(traceback.format_exception_only(error)).strip()
        full = f"{first}\n\n{''.join(traceback.format_exception(error))}" if error.__traceback__ else first
    return _storable(full, _MOST_ERROR), _storable(first.partition("\n")[0], _MOST_BRIEF)


def _storable(text: str, most: int) -> str:
    # A lone surrogate has no UTF-8, and a NUL no place in PostgreSQL.
    return text[:most].replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="backslashreplace").decode()
