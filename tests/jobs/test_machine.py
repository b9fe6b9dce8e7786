"""The state machine of a job: every event in every state, and what each change leaves behind."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, get_args

import pytest
from msgspec.structs import replace

from conquiet.errors import JobStateError
from conquiet.jobs.job import CANCELLED, EXPIRED, HISTORY, TRANSITIONS, Attempt, Event, Job, JobState, Settlement

pytestmark = pytest.mark.guarantee

READY, IN_FLIGHT, SUCCEEDED, FAILED = JobState.READY, JobState.IN_FLIGHT, JobState.SUCCEEDED, JobState.FAILED
T0: Final = 1_700_000_000_000
TTL: Final = 5_000
MOST: Final = 3

TABLE: Final[Mapping[Event, Mapping[JobState, JobState | None]]] = {
    "claim": {READY: IN_FLIGHT},
    "renew": {IN_FLIGHT: IN_FLIGHT},
    "ack": {IN_FLIGHT: SUCCEEDED},
    "retry": {IN_FLIGHT: READY},
    "fail": {IN_FLIGHT: FAILED},
    "release": {IN_FLIGHT: READY},
    "expire": {IN_FLIGHT: READY},
    "exhaust": {IN_FLIGHT: FAILED},
    "cancel": {READY: FAILED, IN_FLIGHT: FAILED},
    "replay": {FAILED: READY},
    "delete": {SUCCEEDED: None, FAILED: None},
}
"""What the specification, and what was added to it, allows; all else is impossible."""


def settlement(kind: Literal["ack", "retry", "fail", "release"], **more: Any) -> Settlement:
    return Settlement("j", 1, kind, **more)


HAPPENS: Final[Mapping[Event, Callable[[Job], Job]]] = {
    "claim": lambda job: job.claimed("w", T0, TTL),
    "renew": lambda job: job.renewed(T0, TTL),
    "ack": lambda job: job.settled(settlement("ack"), T0),
    "retry": lambda job: job.settled(settlement("retry"), T0),
    "fail": lambda job: job.settled(settlement("fail"), T0),
    "release": lambda job: job.settled(settlement("release"), T0),
    "cancel": lambda job: job.cancelled(T0),
    "replay": lambda job: job.replayed(T0),
}
"""The events that change a job in whatever state it is; a lease can only run out where there is one."""


def new(**more: Any) -> Job:
    return Job(id="j", queue="q", raw=b"1", enqueued_ms=T0, ready_ms=T0, **more)


def in_flight(attempts: int = 1, **more: Any) -> Job:
    job = new(**more)
    for _ in range(attempts - 1):
        job = job.claimed("w", T0, TTL).settled(settlement("retry", brief="no"), T0)
    return job.claimed("w", T0, TTL)


def in_state(state: JobState) -> Job:
    job = {
        READY: new(),
        IN_FLIGHT: in_flight(),
        SUCCEEDED: in_flight().settled(settlement("ack"), T0),
        FAILED: in_flight().settled(settlement("fail"), T0),
    }[state]
    assert job.state is state
    return job


def test_the_table_is_complete() -> None:
    """spec 5: State Consistency: a job is always in exactly one state (Ready, InFlight, Failed, or Succeeded)."""
    assert set(TABLE) == set(get_args(Event))
    assert set(JobState) == {READY, IN_FLIGHT, SUCCEEDED, FAILED}
    drawn = {(before, event): after for event, row in TABLE.items() for before, after in row.items()}
    assert dict(TRANSITIONS) == drawn


@pytest.mark.parametrize("state", JobState)
@pytest.mark.parametrize("event", HAPPENS)
def test_every_event_in_every_state(event: Event, state: JobState) -> None:
    """spec 5: State Transitions: these and no others."""
    job = in_state(state)
    if state in TABLE[event]:
        job.check(event)
        assert HAPPENS[event](job).state is TABLE[event][state]
        return
    with pytest.raises(JobStateError, match=rf"job 'j' of queue 'q' is {state}: {event} is not possible"):
        job.check(event)
    with pytest.raises((JobStateError, AssertionError)):
        HAPPENS[event](job)


@pytest.mark.parametrize("state", JobState)
def test_only_what_is_finished_can_be_deleted(state: JobState) -> None:
    job = in_state(state)
    assert job.is_finished is (state in TABLE["delete"])
    if job.is_finished:
        job.check("delete")
    else:
        with pytest.raises(JobStateError, match="delete is not possible"):
            job.check("delete")


def test_a_claim_leases_and_raises_the_token() -> None:
    """spec 5: Lease Version: monotonically increasing on each claim."""
    job = new()
    for number in range(1, 4):
        job = job.claimed(f"w{number}", T0 + number, TTL, f"c{number}")
        assert (job.attempts, job.worker, job.claim_id) == (number, f"w{number}", f"c{number}")
        assert (job.claimed_ms, job.lease_ms) == (T0 + number, T0 + number + TTL)
        assert job.lease_token == T0 + number
        job = job.settled(settlement("retry"), T0)
        assert job.lease_token == T0 + number


def test_a_token_is_the_time_or_else_one_higher() -> None:
    """Than its last one, or than those that the queue has forgotten."""
    job = new(lease_token=T0 + 5)
    assert job.claimed("w", T0, TTL).lease_token == T0 + 6
    assert job.claimed("w", T0, TTL, above=T0 + 8).lease_token == T0 + 9
    assert job.claimed("w", T0 + 7, TTL, above=T0).lease_token == T0 + 7


def test_a_renewal_moves_nothing_but_the_end_of_the_lease() -> None:
    """spec 5: Heartbeat: each heartbeat extends LeaseExpiresAt by LeaseTTL, counted from now."""
    job = in_flight()
    after = job.renewed(T0 + 4_000, TTL)
    assert after.lease_ms == T0 + 4_000 + TTL
    assert replace(after, lease_ms=job.lease_ms) == job


def test_an_acknowledged_job_keeps_its_result_and_no_lease() -> None:
    job = in_flight().settled(settlement("ack", result=b'{"a":1}'), T0 + 7)
    assert (job.result, job.finished_ms, job.lease_ms, job.worker) == ({"a": 1}, T0 + 7, None, "w")
    assert (job.last_error, job.failures) == (None, ())
    assert in_state(SUCCEEDED).result is None


def test_a_retry_waits_for_its_delay_and_remembers_what_went_wrong() -> None:
    """spec 5: Nack: back to Ready with a computed retry_at; the retry is counted when it is claimed."""
    job = in_flight().settled(settlement("retry", delay_ms=900, error="why\n\nwhere", brief="why"), T0 + 50)
    assert (job.ready_ms, job.lease_ms, job.finished_ms) == (T0 + 950, None, None)
    assert (job.attempts, job.last_error) == (1, "why\n\nwhere")
    assert job.failures == (Attempt(1, "w", T0, T0 + 50, "why"),)
    assert job.retry_at == dt.datetime.fromtimestamp((T0 + 950) / 1000, dt.UTC)


def test_a_failed_job_says_why_and_when() -> None:
    job = in_flight(4).settled(settlement("fail", error="why", brief="why"), T0 + 50)
    assert (job.finished_ms, job.lease_ms, job.attempts, job.last_error) == (T0 + 50, None, 4, "why")
    assert [attempt.number for attempt in job.failures] == [1, 2, 3, 4]
    assert job.failures[-1].ended_at == job.finished_at


def test_a_release_costs_nothing() -> None:
    before = new()
    after = before.claimed("w", T0 + 9, TTL).settled(settlement("release"), T0 + 10)
    assert after.lease_token == T0 + 9
    assert replace(after, lease_token=0) == before


@pytest.mark.parametrize(("attempts", "state"), [(1, READY), (2, READY), (3, READY), (4, FAILED)])
def test_a_lease_that_runs_out_costs_its_attempt(attempts: int, state: JobState) -> None:
    """spec 5: Lease Timeout: claimable again with the same ID; Retry Bound holds too. At the cap, Failed."""
    job = in_flight(attempts)
    after = job.expired(T0 + 60_000, MOST)
    assert (after.state, after.last_error, after.lease_ms) == (state, EXPIRED, None)
    assert (after.attempts, after.lease_token) == (attempts, job.lease_token)
    assert after.failures[-1] == Attempt(attempts, "w", T0, T0 + TTL, EXPIRED)
    assert after.finished_ms == (T0 + 60_000 if state is FAILED else None)
    if state is READY:
        assert after.ready_ms == T0 + TTL, "it could have been claimed since then"


@pytest.mark.parametrize(("own", "state"), [(0, FAILED), (1, READY)])
def test_a_jobs_own_limit_wins_when_its_lease_runs_out(own: int, state: JobState) -> None:
    assert in_flight(max_retries=own).expired(T0 + 60_000, MOST).state is state
    assert in_flight(max_retries=own).expired(T0 + 60_000, 0).state is state


def test_cancelling_what_waits_says_so() -> None:
    job = new().cancelled(T0 + 5)
    assert (job.state, job.last_error, job.finished_ms, job.failures) == (FAILED, CANCELLED, T0 + 5, ())
    assert (job.attempts, job.lease_token) == (0, 0)


def test_cancelling_what_is_in_flight_takes_the_lease_away() -> None:
    job = in_flight().cancelled(T0 + 5)
    assert (job.state, job.last_error, job.lease_token, job.lease_ms) == (FAILED, CANCELLED, T0 + 1, None)
    assert job.failures == (Attempt(1, "w", T0, T0 + 5, CANCELLED),)


def test_a_replayed_job_has_all_its_attempts_again_and_a_token_that_goes_on() -> None:
    job = in_flight(4).settled(settlement("fail", error="why", brief="why"), T0 + 1).replayed(T0 + 100)
    assert (job.state, job.attempts, job.lease_token) == (READY, 0, T0 + 3)
    assert (job.ready_ms, job.enqueued_ms, job.finished_ms, job.worker) == (T0 + 100, T0, None, None)
    assert len(job.failures) == 4, "what happened before is not forgotten"
    assert job.claimed("w", T0, TTL).lease_token == T0 + 4


def test_a_job_remembers_its_last_failures_only() -> None:
    job = new()
    for number in range(HISTORY + 5):
        job = job.claimed("w", T0, TTL).settled(settlement("retry", brief=str(number)), T0)
    assert [attempt.error for attempt in job.failures] == [str(number) for number in range(5, HISTORY + 5)]


def test_a_job_that_was_never_put_off_has_no_retry_at() -> None:
    assert new().retry_at is None
    assert in_flight().retry_at is None
    assert Job(id="j", queue="q", raw=b"1", enqueued_ms=T0, ready_ms=T0 + 1).retry_at is not None


def test_times_are_aware_and_in_utc() -> None:
    job = in_flight().settled(settlement("fail"), T0 + 1)
    moments = (job.enqueued_at, job.claimed_at, job.finished_at, job.failures[0].started_at, job.failures[0].ended_at)
    assert [moment and moment.utcoffset() for moment in moments] == [dt.timedelta()] * 5
    assert in_flight().lease_expires_at == dt.datetime.fromtimestamp((T0 + TTL) / 1000, dt.UTC)
    assert job.lease_expires_at is None
