"""How jobs are written in Redis, read back; the scripts' fragment ``jobs_record`` says what is where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, cast

from conquiet.errors import ConfigError, QueueError
from conquiet.jobs.job import Attempt, Job, JobState, NewJob, Settlement
from conquiet.jobs.store import Claim, Lease
from conquiet.wire.parser import Reply

__all__ = ["LETTERS", "added", "claimed_jobs", "known_jobs", "settled", "token_of"]

Word = str | bytes | int

LETTERS: Final = {
    JobState.READY: "R",
    JobState.IN_FLIGHT: "I",
    JobState.SUCCEEDED: "S",
    JobState.FAILED: "F",
}
_STATES: Final = {letter.encode(): state for state, letter in LETTERS.items()}
_LOWEST: Final = -(1 << 31)
_HIGHEST: Final = (1 << 31) - 1
_LATEST: Final = 10**14
_ERRORS: Final = (ValueError, KeyError, IndexError)  # what comes of reading a record that is none


# --- writing -------------------------------------------------------------------------------------------------


def added(jobs: Sequence[NewJob]) -> list[Word]:
    """New jobs as words for the script, in runs of those that are alike but for ID and payload."""
    words: list[Word] = []
    kind: tuple[int, int, int | None] | None = None
    length = 0
    for job in jobs:
        this = (job.priority, job.delay_ms, job.max_retries)
        if this != kind:
            if length:
                words[-2 * length - 1] = length
            words += _kind(*this)
            kind, length = this, 0
        words.append(job.id)
        words.append(job.payload)
        length += 1
    if length:
        words[-2 * length - 1] = length
    return words


def _kind(priority: int, delay_ms: int, max_retries: int | None) -> tuple[Word, ...]:
    if not _LOWEST <= priority <= _HIGHEST:
        raise ConfigError(f"priority must be from {_LOWEST} to {_HIGHEST} in Redis, not {priority!r}")
    if not 0 <= delay_ms <= _LATEST:
        raise ConfigError(f"a delay must be from 0 to {_LATEST} ms in Redis, not {delay_ms!r}")
    return f"{_HIGHEST - priority:010d}", delay_ms, "-" if max_retries is None else max_retries, 0


def token_of(one: Lease | Settlement) -> Word:
    """By which claim a job is held, as its record has it. Those of an older version have no ID."""
    return f"{one.token}.{one.claim_id}" if one.claim_id else one.token


def settled(settlements: Sequence[Settlement]) -> list[Word]:
    """Settlements as words for the script."""
    words: list[Word] = []
    number, claim_id, token = -1, "", cast("Word", "")
    for one in settlements:
        if one.token != number or one.claim_id != claim_id:  # most that are told together were claimed together
            number, claim_id, token = one.token, one.claim_id, token_of(one)
        if one.kind == "ack" and one.result is None:
            words += ("done", one.job_id, token)
        else:
            words += _settled(one, token)
    return words


def _settled(one: Settlement, token: Word) -> tuple[Word, ...]:
    if one.kind == "ack":
        return "result", one.job_id, token, one.result or b""
    if one.kind == "retry":
        return "retry", one.job_id, token, one.delay_ms, one.error, one.brief
    if one.kind == "fail":
        return "fail", one.job_id, token, one.error, one.brief
    return "release", one.job_id, token


# --- reading -------------------------------------------------------------------------------------------------


def known_jobs(queue: str, ids: Sequence[str], reply: Reply) -> Iterator[Job | QueueError | None]:
    """For each of ``ids`` the job, ``None`` if there is none, or the error if what is there cannot be read."""
    for id, first, record, errors, lease in zip(ids, *reply, strict=True):
        if first is None and record is None:
            yield None
            continue
        try:
            yield _known(queue, id, first, record, errors, lease)
        except _ERRORS as error:
            yield _garbled(queue, id, error)


def claimed_jobs(
    claim: Claim, now: int, first_token: int, words: Sequence[Reply]
) -> Iterator[tuple[str, Job | QueueError]]:
    """The jobs that a claim leased, each with its ID; the error for one that cannot be read."""
    turn = iter(words)
    queue, worker, until = claim.queue, claim.worker, now + claim.ttl_ms
    for raw_id, first, counts, errors in zip(turn, turn, turn, turn, strict=True):
        id = raw_id.decode(errors="replace")  # whatever else wrote there
        try:
            enqueued, ready, priority, most, payload = _first(first)
            attempts, token = 1, first_token
            if counts:
                attempts, token, ready = map(int, counts.split())
            last_error, failures = (None, ()) if errors is None else _errors(errors)
            job = Job(
                id=id,
                queue=queue,
                raw=payload,
                state=JobState.IN_FLIGHT,
                priority=priority,
                attempts=attempts,
                lease_token=token,
                claim_id=claim.id,
                max_retries=most,
                worker=worker,
                last_error=last_error,
                failures=failures,
                enqueued_ms=enqueued,
                ready_ms=ready,
                claimed_ms=now,
                lease_ms=until,
            )
        except _ERRORS as error:
            yield id, _garbled(queue, id, error)
        else:
            yield id, job


def _known(
    queue: str, id: str, first: bytes | None, record: bytes | None, errors: bytes | None, lease: bytes | None
) -> Job:
    if first is None:
        raise ValueError("there is a record, but not what was enqueued")
    enqueued, ready, priority, most, payload = _first(first)
    if record is None:
        return Job(
            id=id,
            queue=queue,
            raw=payload,
            priority=priority,
            max_retries=most,
            enqueued_ms=enqueued,
            ready_ms=ready,
        )
    state, finished, attempts, token, claimed, ready_at, _, _, _, length, rest = record.split(b" ", 10)
    number, _, claim_id = token.partition(b".")
    end = 0 if length == b"-" else int(length)
    last_error, failures = (None, ()) if errors is None else _errors(errors)
    return Job(
        id=id,
        queue=queue,
        raw=payload,
        state=_STATES[state],
        priority=priority,
        attempts=int(attempts),
        lease_token=int(number),
        claim_id=claim_id.decode(),
        max_retries=most,
        worker=None if length == b"-" else rest[:end].decode(),
        last_error=last_error,
        raw_result=rest[end:] or None,
        failures=failures,
        enqueued_ms=enqueued,
        ready_ms=int(ready_at),
        claimed_ms=None if claimed == b"-" else int(claimed),
        lease_ms=None if lease is None or state != b"I" else int(float(lease)),
        finished_ms=None if finished == b"-" else int(finished),
    )


def _first(text: bytes) -> tuple[int, int, int, int | None, bytes]:
    """When enqueued, from when on claimable, the priority, the job's own limit, the payload."""
    head, line, payload = text.partition(b"\n")
    enqueued, ready, priority, _, most, _ = head.split(b" ")
    if not line:
        raise ValueError("no payload")
    limit = None if most == b"-" else int(most)
    return int(enqueued), int(ready), _HIGHEST - int(priority), limit, payload


def _errors(text: bytes) -> tuple[str, tuple[Attempt, ...]]:
    """The last error, and the failed attempts."""
    count, length, at = _numbers(text, 0)
    last, at = text[at : at + length].decode(), at + length
    attempts: list[Attempt] = []
    for _ in range(count):
        number, started, ended, worker, error, at = _numbers(text, at)
        middle, end = at + worker, at + worker + error
        attempts.append(Attempt(number, text[at:middle].decode(), started, ended, text[middle:end].decode()))
        at = end
    return last, tuple(attempts)


def _numbers(text: bytes, at: int) -> list[int]:
    """The numbers on the line that begins there, and where the next begins."""
    end = text.index(b"\n", at)
    return [*map(int, text[at:end].split(b" ")), end + 1]


def _garbled(queue: str, id: str, error: Exception) -> QueueError:
    failure = QueueError(f"job {id!r} of queue {queue!r} cannot be read, it was not written by this library: {error}")
    failure.__cause__ = error
    return failure
