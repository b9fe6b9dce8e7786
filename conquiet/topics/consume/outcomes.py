"""What becomes of a message after its handler: the outcomes, and the rules that choose one."""

from __future__ import annotations

import asyncio
import logging
import random
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from conquiet.errors import Reject, Retry
from conquiet.kit import codec as json
from conquiet.kit.policy import RetryPolicy
from conquiet.message import Message
from conquiet.topics.options import DeadLetterPolicy
from conquiet.topics.server.partition import Bury, Park, Requeue

__all__ = ["DONE", "Bury", "Done", "Outcome", "Park", "Requeue", "judge", "kind_of", "letter_fields", "reject"]

_log = logging.getLogger("conquiet.topics")


@dataclass(frozen=True, slots=True)
class Done:
    """Handled: acknowledge it."""


Outcome: TypeAlias = Done | Park | Requeue | Bury
DONE: Final = Done()


def kind_of(outcome: Outcome) -> Literal["ack", "retry", "dead_letter"]:
    """The name of an outcome in metrics."""
    if isinstance(outcome, Bury):
        return "dead_letter"
    return "retry" if isinstance(outcome, Park | Requeue) else "ack"


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


def letter_fields(message: Message, letters: DeadLetterPolicy) -> list[bytes] | None:
    """The fields that a dead letter holds instead of its entry's; ``None`` to keep them as they are."""
    if letters.transform is None and not letters.drop_headers:
        return None
    try:
        words = [word for pair in _transformed(message, letters).items() for word in pair]
        if not all(isinstance(word, bytes) for word in words):
            raise TypeError("transform must return names and values as bytes")
    except Exception:
        # A letter that tells too much is better than none.
        _log.exception("a dead letter is left as it is, since its policy failed")
        return None
    return words


def _transformed(message: Message, letters: DeadLetterPolicy) -> Mapping[bytes, bytes]:
    fields = dict(message.fields)
    if letters.drop_headers and b"headers" in fields:
        dropped = {*letters.drop_headers, "partitionId"}
        kept = {name: value for name, value in message.headers.items() if name not in dropped}
        fields[b"headers"] = json.encode_object(kept)
    return fields if letters.transform is None else letters.transform(fields)
