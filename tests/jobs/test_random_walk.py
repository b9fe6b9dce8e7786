"""Every store against the one in memory: the same calls in any order, and they answer and keep the same."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from msgspec.structs import replace

from conquiet import (
    Backoff,
    ConquietError,
    Job,
    JobQueue,
    JobRetention,
    JobSpec,
    JobState,
    MemoryStore,
    Reject,
    RetryPolicy,
)
from conquiet.jobs.store import Claimed, Wanted
from conquiet.kit.clock import ManualClock
from tests.conftest import Rung
from tests.contracts.jobs_fixtures import KINDS, kind_name, started
from tests.contracts.jobs_flavours import Backend

pytestmark = [pytest.mark.guarantee, pytest.mark.slow]

# Time passes in steps of five seconds, and everything that falls due does so two or more seconds from any such step:
# no delay of a slow machine can make one store see it and another not. Each call has a moment of its own besides, so
# that what falls due by different calls does so in the same order everywhere.
STEPS: Final = (5, 20, 35)
MOMENT: Final = 0.02
DELAYS: Final = (0, 7, 12)
RETRY: Final = RetryPolicy(max_retries=2, backoff=Backoff(base=7, cap=7, kind="fixed"))
TTL: Final = 12.0
TOLERANCE: Final = 2_000
"""Milliseconds by which stores may differ about when something happened."""
IDS: Final = tuple("abcdefghijkl")

ids = st.sampled_from(IDS)
specs = st.builds(
    JobSpec,
    payload=st.sampled_from([None, 1, "é", {"a": [1.5]}]),
    job_id=ids,
    priority=st.sampled_from([-5, 0, 0, 0, 3]),
    delay=st.sampled_from(DELAYS),
    max_retries=st.sampled_from([None, None, 0, 5]),
)
workers = st.sampled_from(["ann", "bob"])


class Walk(RuleBasedStateMachine):
    """Two queues of the same name: one in memory, one in the store under test."""

    backend: Backend

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.runner = asyncio.Runner()
        self.stores = (MemoryStore(clock=self.clock), self.backend.make("core", self.clock))
        for store in self.stores:
            self.wait(store.open())
        self.name = f"q-{secrets.token_hex(6)}"
        keep = JobRetention(age=32, count=4)
        self.queues = [
            JobQueue(store, self.name, lease_ttl=TTL, retry=RETRY, keep=keep, keep_failed=keep) for store in self.stores
        ]
        self.held: list[tuple[Job, Job]] = []
        """Every claim that was ever made, as either store told of it: most are stale by now."""

    def teardown(self) -> None:
        with self.runner:
            for store in self.stores:
                self.wait(store.aclose())

    def wait(self, work: Any) -> Any:
        async def waited() -> Any:
            return await work

        return self.runner.run(waited())

    def both(self, call: Callable[[JobQueue, int], Awaitable[Any]]) -> tuple[Any, Any]:
        """What both answer, which must be alike; an error is an answer."""
        self.clock.advance(MOMENT)
        ours, theirs = (self.wait(_answer(call, queue, side)) for side, queue in enumerate(self.queues))
        assert alike(ours, theirs), f"memory: {ours!r}\nother:  {theirs!r}"
        return ours, theirs

    # --- producing and working ------------------------------------------------------------------------------------

    @rule(spec=specs)
    def enqueue(self, spec: JobSpec) -> None:
        self.both(
            lambda queue, _: queue.enqueue(
                spec.payload,
                job_id=spec.job_id,
                priority=spec.priority,
                delay=spec.delay,
                max_retries=spec.max_retries,
            )
        )

    @rule(many=st.lists(specs, max_size=8))
    def enqueue_many(self, many: list[JobSpec]) -> None:
        self.both(lambda queue, _: queue.enqueue_many(many))

    @rule(many=st.lists(specs, min_size=3, max_size=8, unique_by=lambda spec: spec.job_id))
    def enqueue_what_is_not_there(self, many: list[JobSpec]) -> None:
        known = {job.id for job in self.known()}
        self.both(lambda queue, _: queue.enqueue_many([spec for spec in many if spec.job_id not in known]))

    @rule(count=st.sampled_from([1, 1, 2, 3, 5, 10]), worker=workers)
    def claim(self, count: int, worker: str) -> None:
        ours, theirs = self.both(lambda queue, _: queue.dispatch.claim(count, worker))
        self.held += zip(ours.jobs, theirs.jobs, strict=True)

    @precondition(lambda self: self.held)
    @rule(what=st.sampled_from(["ack", "nack", "reject", "heartbeat", "release", "nack later"]), data=st.data())
    def tell(self, what: str, data: st.DataObject) -> None:
        """By whoever has, or once had, some jobs."""
        fresh = self.held[-6:]
        chosen = data.draw(
            st.lists(st.sampled_from(fresh) | st.sampled_from(self.held), min_size=1, max_size=4, unique_by=_claim_of)
        )
        self.both(lambda queue, side: _told(queue, what, [pair[side] for pair in chosen]))

    @precondition(lambda self: self.held)
    @rule(what=st.sampled_from(["ack", "nack", "heartbeat", "release"]), by=st.sampled_from([-1, 1, 5]), data=st.data())
    def tell_with_a_token_that_nobody_has(self, what: str, by: int, data: st.DataObject) -> None:
        pair = data.draw(st.sampled_from(self.held))
        newest = max(one.lease_token for one, _ in self.held)
        token = pair[0].lease_token - 1000 if by < 0 else newest + 1000 + by
        self.both(lambda queue, side: _told(queue, what, [replace(pair[side], lease_token=token)]))

    @rule(seconds=st.sampled_from(STEPS))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds)

    # --- looking after ----------------------------------------------------------------------------------------------

    @rule(what=st.sampled_from(["replay", "cancel", "delete", "get"]), id=ids)
    def look_after(self, what: str, id: str) -> None:
        self.both(lambda queue, _: getattr(queue, what)(id))

    @rule(what=st.sampled_from(["replay", "cancel", "delete"]), state=st.sampled_from(JobState), data=st.data())
    def look_after_one_of_a_state(self, what: str, state: JobState, data: st.DataObject) -> None:
        found = [job.id for job in self.known() if job.state is state]
        if found:
            id = data.draw(st.sampled_from(found))
            self.both(lambda queue, _: getattr(queue, what)(id))

    @rule()
    def purge(self) -> None:
        self.both(lambda queue, _: queue.purge())

    @rule(state=st.sampled_from(JobState), count=st.sampled_from([1, 3, 100]))
    def list_jobs(self, state: JobState, count: int) -> None:
        self.both(lambda queue, _: _listed(queue, state, count))

    # --- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def all_records_are_alike(self) -> None:
        self.both(lambda queue, _: queue.store.find(self.name, IDS))
        ours, _ = self.both(lambda queue, _: queue.counts())
        assert sum(ours.values()) == len(self.known())

    def known(self) -> list[Job]:
        found = self.wait(self.queues[0].store.find(self.name, IDS))
        return [job for job in found if job is not None]


async def _answer(call: Callable[[JobQueue, int], Awaitable[Any]], queue: JobQueue, side: int) -> Any:
    try:
        return await call(queue, side)
    except ConquietError as error:
        return type(error), str(error), getattr(error, "job_ids", None), getattr(error, "enqueued", None)


def _claim_of(pair: tuple[Job, Job]) -> tuple[str, int]:
    return pair[0].id, pair[0].lease_token


async def _told(queue: JobQueue, what: str, jobs: Sequence[Job]) -> None:
    if what == "ack":
        await queue.ack(*jobs, result={"by": jobs[0].worker})
    elif what == "nack":
        await queue.nack(*jobs, error="first\nsecond")
    elif what == "nack later":
        await queue.nack(*jobs, delay=12)
    elif what == "reject":
        await queue.nack(*jobs, error=Reject("no"))
    else:
        await getattr(queue, what)(*jobs)


async def _listed(queue: JobQueue, state: JobState, count: int) -> list[Job]:
    """All pages, by ID: in which order is the store's own affair."""
    page = await queue.list_jobs(state, count)
    found = list(page.jobs)
    while page.cursor is not None:
        page = await queue.list_jobs(state, count, page.cursor)
        found += page.jobs
    return sorted(found, key=lambda job: job.id)


def alike(one: Any, other: Any) -> bool:
    """Whether two answers are the same but for some milliseconds."""
    if isinstance(one, Job) and isinstance(other, Job):
        return _timeless(one) == _timeless(other) and _close(_times(one), _times(other))
    if isinstance(one, Claimed) and isinstance(other, Claimed):
        lapsed = [sorted(claimed.expired, key=lambda lease: lease.job_id) for claimed in (one, other)]
        return (
            alike(list(one.jobs), list(other.jobs))
            and lapsed[0] == lapsed[1]
            and _close([one.next_ms], [other.next_ms])
        )
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def _timeless(job: Job) -> Job:
    return replace(
        job,
        lease_token=0,
        claim_id="",
        failures=tuple(dataclasses.replace(one, started_ms=0, ended_ms=0) for one in job.failures),
        enqueued_ms=0,
        ready_ms=0,
        claimed_ms=None,
        lease_ms=None,
        finished_ms=None,
    )


def _times(job: Job) -> list[int | None]:
    failures = [time for one in job.failures for time in (one.started_ms, one.ended_ms)]
    return [job.enqueued_ms, job.ready_ms, job.claimed_ms, job.lease_ms, job.finished_ms, job.lease_token, *failures]


def _close(some: Sequence[int | None], others: Sequence[int | None]) -> bool:
    return len(some) == len(others) and all(
        (one is None) == (other is None) and abs((one or 0) - (other or 0)) <= TOLERANCE
        for one, other in zip(some, others, strict=True)
    )


@pytest.fixture(scope="module", params=[kind for kind in KINDS if kind != "memory"], ids=kind_name)
def other(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A store that is not in memory."""
    kind: str | Rung = request.param
    with ExitStack() as servers:
        yield started(kind, servers)


@pytest.mark.timeout(600)
def test_every_store_does_what_the_one_in_memory_does(other: Backend, scale: float) -> None:
    """spec 5: State Consistency, Lease Safety, Retry Bound and TTL Enforcement, in whatever order calls come."""
    walk(other, max(10, int(300 * scale)), Phase.generate, Phase.shrink)


def walk(backend: Backend, times: int, *phases: Phase) -> None:
    run_state_machine_as_test(
        type("Machine", (Walk,), {"backend": backend}),
        settings=settings(
            max_examples=times,
            stateful_step_count=40,
            deadline=None,
            database=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )


class Sloppy(Backend):
    """Makes stores that claim the right jobs, and hand them out in the wrong order."""

    def make(self, flavour: Any, clock: ManualClock) -> Any:
        class Backward(MemoryStore):
            async def claim(self, queue: str, wanted: Wanted) -> Claimed:
                claimed = await super().claim(queue, wanted)
                return dataclasses.replace(claimed, jobs=claimed.jobs[::-1])

        return Backward(clock=clock)


def test_a_difference_is_found() -> None:
    with pytest.raises(AssertionError, match="memory: "):
        walk(Sloppy("sloppy", "MemoryStore"), 1000, Phase.generate)
