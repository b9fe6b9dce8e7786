"""Rows into records. The order of the columns is that of ``sql/columns.sql`` and ``sql/claimed_columns.sql``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from conquiet.jobs.job import Attempt, Job, JobState
from conquiet.jobs.store import Claim
from conquiet.jobs.stores.postgres.looking import Place
from conquiet.kit import codec

__all__ = ["NUMBER", "WIDTH", "claimed_job", "job_of", "urgency"]

NUMBER: Final = 1
"""The column with the place in the order of enqueueing."""
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
        failures=_failures(row[11]),
        enqueued_ms=row[12],
        ready_ms=row[13],
        claimed_ms=row[14],
        lease_ms=row[15],
        finished_ms=row[16],
        claim_id=row[17],
    )


def claimed_job(claim: Claim, now: int, row: Sequence[Any]) -> Job:
    """The job in a row of a claim, which has only what the claim itself does not say."""
    return Job(
        id=row[0],
        queue=claim.queue,
        raw=row[2],
        state=JobState.IN_FLIGHT,
        priority=row[3],
        attempts=row[4],
        lease_token=row[5],
        claim_id=claim.id,
        max_retries=row[6],
        worker=claim.worker,
        last_error=row[7],
        failures=_failures(row[8]),
        enqueued_ms=row[9],
        ready_ms=row[10],
        claimed_ms=now,
        lease_ms=now + claim.ttl_ms,
    )


def urgency(row: Sequence[Any]) -> Place:
    """Where in line the job in a row of a claim stood."""
    return Place(-row[3], row[10], row[NUMBER])


def _failures(text: str | None) -> tuple[Attempt, ...]:
    return () if text is None else tuple(Attempt(*words) for words in codec.decode(text.encode()))
