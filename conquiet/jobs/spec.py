"""What producers say of a job, checked."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from conquiet.errors import ConfigError
from conquiet.jobs.job import NewJob
from conquiet.jobs.policy import MOST_DELAY
from conquiet.jobs.unique import Hold, Unique, held_by
from conquiet.kit import codec, rules
from conquiet.kit.options import instance

__all__ = ["EnqueuedIds", "JobSpec", "checked", "encoded", "is_nothing", "job_id", "words"]

_LONGEST: Final = 200
_PRIORITIES: Final = range(-(2**31), 2**31)


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job to be enqueued, for :meth:`JobQueue.enqueue_many`; the names are those of ``enqueue``."""

    payload: Any
    job_id: str | None = None
    priority: int = 0
    delay: float = 0.0
    max_retries: int | None = None
    at: dt.datetime | None = None
    task: str | None = None
    key: str | None = None
    headers: Mapping[str, str] | None = None
    unique: Unique | None = None


class EnqueuedIds(list[str]):
    """The IDs of jobs that were enqueued together, in order.

    ``skipped`` are the places of those that were not, because another job has their unique key: its ID is there.
    """

    def __init__(self, ids: Iterable[str] = (), skipped: Iterable[int] = ()) -> None:
        super().__init__(ids)
        self.skipped = tuple(skipped)


def checked(spec: JobSpec, new_id: str) -> NewJob:
    """The job that ``spec`` describes, under ``new_id`` unless it names one; ``ConfigError`` if it cannot be meant."""
    id = new_id if spec.job_id is None else job_id(spec.job_id)
    if isinstance(spec.priority, bool) or not isinstance(spec.priority, int) or spec.priority not in _PRIORITIES:
        raise ConfigError(f"priority must be an integer of 32 bits, not {spec.priority!r}")
    if rules.number("delay", spec.delay, least=0) > MOST_DELAY:
        raise ConfigError(f"delay must be at most ten years, not {spec.delay!r} seconds")
    if spec.max_retries is not None:
        rules.integer("max_retries", spec.max_retries, least=0)
    payload = encoded(spec.payload)
    return NewJob(
        id,
        payload,
        spec.priority,
        round(spec.delay * 1000),
        spec.max_retries,
        _at_ms(spec),
        None if spec.task is None else _short("task", spec.task),
        None if spec.key is None else _short("key", spec.key),
        b"" if spec.headers is None else _headers(spec.headers),
        None if spec.unique is None else _hold(spec, payload),
    )


def words() -> Callable[[NewJob], int]:
    """How many words each of some jobs is in a request: those that are like the one before share a head of six."""
    before: tuple[object, ...] = ()

    def count(job: NewJob) -> int:
        nonlocal before
        about = (job.priority, job.delay_ms, job.max_retries, job.at_ms)
        last, before = before, (about, job.task, job.key, job.headers, job.unique)
        return 2 if before == last else 8

    return count


def is_nothing(number: object) -> bool:
    """Whether it is the number 0, which needs no further check."""
    return not number and type(number) in (int, float)


def encoded(payload: Any) -> bytes:
    """A payload as JSON; ``PayloadError`` if it would not come back equal."""
    is_object = type(payload) is dict
    return codec.encode_object(cast("object", payload)) if is_object else codec.encode(payload)


def job_id(value: object) -> str:
    """``value`` if it can be the ID of a job."""
    return _short("job_id", value)


def _short(what: str, value: object) -> str:
    text = rules.text(what, value)
    if len(text) > _LONGEST or "\0" in text:
        raise ConfigError(f"{what} must be at most {_LONGEST} characters without NUL, not {text!r}")
    return text


def _at_ms(spec: JobSpec) -> int | None:
    at = spec.at
    if at is None:
        return None
    if not isinstance(at, dt.datetime) or at.tzinfo is None:
        raise ConfigError(f"at must be a datetime with a time zone, not {at!r}")
    if spec.delay:
        raise ConfigError(f"a job has a delay or a moment, not both: delay={spec.delay!r}, at={at!r}")
    return max(0, round(at.timestamp() * 1000))


def _hold(spec: JobSpec, payload: bytes) -> Hold:
    instance("unique", spec.unique, of=Unique)
    return held_by(cast("Unique", spec.unique), spec.task, payload)


def _headers(headers: object) -> bytes:
    if not isinstance(headers, Mapping):
        raise ConfigError(f"headers must be a mapping of strings to strings, not {headers!r}")
    plain = dict(cast("Mapping[object, object]", headers))
    if not all(isinstance(word, str) for pair in plain.items() for word in pair):
        raise ConfigError(f"headers must be strings, not {headers!r}")
    try:
        return codec.encode(plain) if plain else b""
    except ConfigError:
        raise ConfigError(f"headers must be valid Unicode, not {headers!r}") from None
