"""Rows into records. The order of the columns is that of ``sql/columns.sql``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from conquiet.jobs.job import Attempt, Job, JobState
from conquiet.kit import codec

__all__ = ["NUMBER", "PRIORITY", "READY", "WIDTH", "job_of"]

NUMBER: Final = 1
"""The column with the place in the order of enqueueing."""
PRIORITY: Final = 4
READY: Final = 13
WIDTH: Final = 18

_STATES: Final = {str(state): state for state in JobState}


def job_of(queue: str, row: Sequence[Any]) -> Job:
    """The job in a row of all columns."""
    return Job(
        id=row[0],
        queue=queue,
        raw=row[2],
        state=_STATES[row[3]],
        priority=row[4],
        attempts=row[5],
        lease_token=row[6],
        max_retries=row[7],
        worker=row[8],
        last_error=row[9],
        raw_result=row[10],
        failures=() if row[11] is None else tuple(Attempt(*words) for words in codec.decode(row[11].encode())),
        enqueued_ms=row[12],
        ready_ms=row[13],
        claimed_ms=row[14],
        lease_ms=row[15],
        finished_ms=row[16],
        claim_id=row[17],
    )
