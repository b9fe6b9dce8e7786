"""Leased jobs with fencing: ready, in flight, succeeded or failed, on memory, Redis or PostgreSQL."""

from __future__ import annotations

from conquiet.jobs.job import Attempt, Job, JobState
from conquiet.jobs.queue import JobQueue, JobSpec
from conquiet.jobs.store import JobPage, JobRetention, JobStore, Keep
from conquiet.jobs.stores.memory import MemoryStore
from conquiet.jobs.stores.postgres import PostgresStore
from conquiet.jobs.stores.redis import RedisStore
from conquiet.jobs.worker import JobHealth, JobWorker

__all__ = [
    "Attempt",
    "Job",
    "JobHealth",
    "JobPage",
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
]
