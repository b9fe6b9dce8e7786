"""Jobs that have come to a state."""

from __future__ import annotations

from conquiet import (
    Job,
    JobQueue,
    JobState,
)
from tests.contracts.jobs_flavours import only

__all__ = ["STATES", "in_state"]

STATES = (JobState.IN_FLIGHT, JobState.SUCCEEDED, JobState.FAILED, JobState.READY)
"""In an order in which jobs can be brought there: what is ready would be claimed instead."""


async def in_state(jobs: JobQueue, state: JobState, id: str = "a") -> Job:
    """A job in that state."""
    await jobs.enqueue(1, job_id=id, priority=100, max_retries=0)
    if state is not JobState.READY:
        job = await only(jobs)
        if state is JobState.SUCCEEDED:
            await jobs.ack(job, result="done")
        elif state is JobState.FAILED:
            await jobs.nack(job, error="broken")
    found = await jobs.get(id)
    assert found is not None
    assert found.state is state
    return found
