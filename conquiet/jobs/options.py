"""What stores, queues and workers of jobs take by name, checked."""

from __future__ import annotations

import random as chance
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypedDict

from conquiet.errors import ConfigError
from conquiet.jobs.store import JobRetention
from conquiet.kit import rules
from conquiet.kit.clock import SYSTEM_CLOCK, Clock
from conquiet.kit.options import check, instance
from conquiet.kit.policy import RetryPolicy

__all__ = [
    "JobQueueKeywords",
    "JobQueueOptions",
    "JobWorkerKeywords",
    "JobWorkerOptions",
    "PostgresStoreKeywords",
    "PostgresStoreOptions",
    "RedisStoreKeywords",
    "RedisStoreOptions",
]

_RETRY: Final = RetryPolicy()
_KEEP: Final = JobRetention()
_KEEP_FAILED: Final = JobRetention(age=30 * 86_400.0)
_LONGEST_NAME: Final = 63
"""Bytes of an identifier; PostgreSQL cuts longer ones off."""


class RedisStoreKeywords(TypedDict, total=False):
    """:class:`RedisStoreOptions` as type checkers see them at a call."""

    namespace: str
    clock: Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisStoreOptions:
    """What ``RedisStore`` takes beside the address."""

    namespace: str = ""
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        if self.namespace:
            rules.name("namespace", self.namespace)


class PostgresStoreKeywords(TypedDict, total=False):
    """:class:`PostgresStoreOptions` as type checkers see them at a call."""

    schema: str
    pool_size: int
    clock: Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresStoreOptions:
    """What ``PostgresStore`` takes beside the DSN."""

    schema: str = "conquiet"
    pool_size: int = 8
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        name = rules.text("schema", self.schema)
        if "\0" in name or len(name.encode()) > _LONGEST_NAME or name.startswith("pg_"):
            raise ConfigError(
                f"schema must have at most {_LONGEST_NAME} bytes, no NUL, and not begin with 'pg_', unlike {name!r}"
            )
        check(self, rules.integer, "pool_size", least=1)


class JobQueueKeywords(TypedDict, total=False):
    """:class:`JobQueueOptions` as type checkers see them at a call."""

    lease_ttl: float
    retry: RetryPolicy
    keep: JobRetention
    keep_failed: JobRetention
    random: Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobQueueOptions:
    """What ``JobQueue`` takes beside the store and the name."""

    lease_ttl: float = 5.0
    retry: RetryPolicy = _RETRY
    keep: JobRetention = _KEEP
    keep_failed: JobRetention = _KEEP_FAILED
    random: Callable[[], float] = chance.random

    def __post_init__(self) -> None:
        check(self, rules.seconds, "lease_ttl", most=rules.YEAR)
        check(self, instance, "retry", of=RetryPolicy)
        check(self, instance, "keep", "keep_failed", of=JobRetention)
        if self.retry.mode != "park":
            raise ConfigError(f"mode is for topics: a job stays where it is, so it cannot be {self.retry.mode!r}")


class JobWorkerKeywords(TypedDict, total=False):
    """:class:`JobWorkerOptions` as type checkers see them at a call."""

    concurrency: int
    execution_timeout: float | None
    drain_timeout: float
    name: str | None
    handle_signals: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWorkerOptions:
    """What ``JobWorker`` takes beside the queue and the handler."""

    concurrency: int = 10
    execution_timeout: float | None = None
    drain_timeout: float = 30.0
    name: str | None = None
    handle_signals: bool = True

    def __post_init__(self) -> None:
        check(self, rules.integer, "concurrency", least=1)
        check(self, rules.seconds, "execution_timeout")
        check(self, rules.number, "drain_timeout", least=0)
        check(self, rules.text, "name")
        check(self, rules.flag, "handle_signals")
