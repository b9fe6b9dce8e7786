"""Leased jobs with fencing: ready, in flight, succeeded or failed, on memory, Redis or PostgreSQL."""

from __future__ import annotations

from conquiet.jobs.bulk import JobBatch
from conquiet.jobs.counts import JobCounts
from conquiet.jobs.job import Attempt, Job, JobState
from conquiet.jobs.progress import JobProgress
from conquiet.jobs.queue import JobQueue
from conquiet.jobs.spec import EnqueuedIds, JobSpec
from conquiet.jobs.store import JobPage, JobRetention, JobStore, Keep
from conquiet.jobs.stores.memory import MemoryStore
from conquiet.jobs.stores.postgres import PostgresStore
from conquiet.jobs.stores.redis import RedisStore
from conquiet.jobs.unique import Unique
from conquiet.jobs.worker import JobHealth, JobWorker

__all__ = [
    "Attempt",
    "EnqueuedIds",
    "Job",
    "JobBatch",
    "JobCounts",
    "JobHealth",
    "JobPage",
    "JobProgress",
    "JobQueue",
    "JobRetention",
    "JobSpec",
    "JobState",
    "JobStore",
    "JobWorker",
    "Keep",
    "MemoryStore",
    "PostgresStore",
    "RedisStore",
    "Unique",
]
