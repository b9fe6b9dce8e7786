"""What becomes of a message after its handler: the outcomes, and the rules that choose one."""

from __future__ import annotations

import asyncio
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from conquiet.errors import Reject, Retry
from conquiet.kit.policy import RetryPolicy
from conquiet.message import Message
from conquiet.topics.options import DeadLetterPolicy

__all__ = ["Bury", "Done", "Outcome", "Park", "Requeue", "judge", "reject"]


@dataclass(frozen=True, slots=True)
class Done:
    """Handled: acknowledge it."""


@dataclass(frozen=True, slots=True)
class Park:
    """Failed: leave it pending and try it again after a while."""

    delay: float
    failures: int
    error_type: str


@dataclass(frozen=True, slots=True)
class Requeue:
    """Failed: put it behind the others after a while."""

    delay: float
    failures: int


@dataclass(frozen=True, slots=True)
class Bury:
    """Failed for good: a dead letter."""

    failures: int
    reason: str
    error_type: str = ""
    error: str = ""
    traceback: str = ""


Outcome: TypeAlias = Done | Park | Requeue | Bury


def judge(
    error: BaseException,
    message: Message,
    policy: RetryPolicy,
    letters: DeadLetterPolicy,
    draw: Callable[[], float] = random.random,
) -> Outcome:
    """What a failure with ``error`` means. The message's own limit of retries wins over the policy's."""
    failures = message.retry_count + 1
    most = policy.max_retries if message.max_retries is None else message.max_retries
    if isinstance(error, Reject):
        return reject("rejected", error, failures, letters)
    explicit = isinstance(error, Retry)
    if not explicit and not policy.retries(_plain(error)):
        return reject("not to be retried", error, failures, letters)
    if failures > most:
        return reject("retries exhausted", error, failures, letters)
    asked = error.delay if isinstance(error, Retry) else None
    delay = policy.backoff.delay(failures - 1, draw) if asked is None else asked
    if policy.mode == "requeue":
        return Requeue(delay, failures)
    return Park(delay, failures, _kind(error))


def reject(reason: str, error: BaseException, failures: int, letters: DeadLetterPolicy) -> Bury:
    """The dead letter's account of ``error``, as long as the policy lets it be."""
    most = letters.max_error_chars
    trace = ""
    if letters.include_traceback:
        lines = "".join(traceback.format_exception(error))  # which copes with whatever an exception is like
        trace = lines if len(lines) <= most else f"...{lines[len(lines) - most :]}"
    return Bury(failures, reason, _kind(error), _clean(_text(error)[:most]), _clean(trace))


def _plain(error: BaseException) -> BaseException:
    """``error``, or an exception in its place if something that the handler waited for was cancelled."""
    return RuntimeError("cancelled") if isinstance(error, asyncio.CancelledError) else error


def _kind(error: BaseException) -> str:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return _clean(name.replace("|", "/"))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as unprintable:
        return f"<{type(unprintable).__name__} when it was printed>"


def _clean(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
