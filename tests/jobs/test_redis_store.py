"""What is special to jobs in Redis: keys, plans, bounds, and what it makes of other people's writing."""

from __future__ import annotations

import asyncio
import logging
import pickle
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import pytest
from redis.crc import key_slot
from redis.exceptions import RedisError

from conquiet.errors import ConfigError, DuplicateJobError, QueueError
from conquiet.jobs.job import EXPIRED, Job, JobState, NewJob, Settlement
from conquiet.jobs.store import Claimed, JobRetention, Lease, Wanted
from conquiet.jobs.stores.redis import RedisStore
from conquiet.kit.clock import ManualClock
from conquiet.wire.keys import JobKeys
from tests.conftest import Rung
from tests.rigs.asking import ask, keys_like
from tests.rigs.proxy import Proxy
from tests.rigs.servers import on_a_port

pytestmark = pytest.mark.cluster_too

READY, IN_FLIGHT, SUCCEEDED, FAILED = JobState.READY, JobState.IN_FLIGHT, JobState.SUCCEEDED, JobState.FAILED
QUEUE: Final = "emails"
TTL: Final = 30_000


@pytest.fixture
def namespace() -> str:
    return f"t{secrets.token_hex(6)}"


@pytest.fixture
def keys(namespace: str) -> JobKeys:
    return JobKeys(QUEUE, namespace)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def store(url: str, namespace: str, clock: ManualClock) -> AsyncIterator[RedisStore]:
    async with RedisStore(url, namespace=namespace, clock=clock) as store:
        yield store


def new(*ids: str, delay_ms: int = 0, priority: int = 0, payload: bytes = b"{}") -> list[NewJob]:
    return [NewJob(id, payload, priority, delay_ms) for id in ids]


async def claim(store: RedisStore, count: int = 10, **more: Any) -> Claimed:
    return await store.claim(QUEUE, Wanted(count, "w", more.pop("ttl_ms", TTL), more.pop("max_retries", 3), **more))


def acks(jobs: Sequence[Job]) -> list[Settlement]:
    return [Settlement.of(job, "ack") for job in jobs]


async def pages(store: RedisStore, state: JobState, size: int) -> list[str]:
    ids: list[str] = []
    cursor: str | None = None
    while True:
        page = await store.page(QUEUE, state, size, cursor)
        ids += [job.id for job in page.jobs]
        cursor = page.cursor
        if cursor is None:
            return ids


# --- keys --------------------------------------------------------------------------------------------------


def test_the_keys_of_a_queue_share_its_slot_and_no_other_queues_names() -> None:
    plain, apart, other = JobKeys("q").all(), JobKeys("q", "ns").all(), JobKeys("q2").all()
    assert all(key.startswith("conquiet:jobs:{q}:") for key in plain)
    assert apart == [f"ns:{key}" for key in plain]
    assert len({int(key_slot(key.encode())) for key in (*plain, *apart)}) == 1
    assert len({*plain, *apart, *other}) == 3 * len(plain)


@pytest.mark.parametrize("name", ["", "a b", "{a}", "a:b", "x" * 201])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="queue must be"):
        JobKeys(name)
    with pytest.raises(ConfigError, match="namespace must be"):
        RedisStore("redis://localhost", namespace=name or "-/-")


async def test_a_queue_has_no_other_keys_and_none_for_each_job(store: RedisStore, url: str, keys: JobKeys) -> None:
    await store.add(QUEUE, [*new(*map(str, range(100))), *new("late", delay_ms=TTL)])
    claimed = await claim(store)
    retried, failed, *done = claimed.jobs
    told = [Settlement.of(retried, "retry", error="e"), Settlement.of(failed, "fail", error="e")]
    await store.settle(QUEUE, [*told, *acks(done[:4])])
    assert {*await keys_like(url, f"{keys.namespace}:*")} <= {*keys.all()}


async def test_a_payload_is_written_once(store: RedisStore, url: str, keys: JobKeys) -> None:
    await store.add(QUEUE, new("j", payload=b'"hello"'))
    before = await ask(url, "HGET", keys.jobs, "j")
    assert before.endswith('"hello"')
    [job] = (await claim(store)).jobs
    await store.settle(QUEUE, [Settlement.of(job, "retry", error="x")])
    [job] = (await claim(store)).jobs
    await store.settle(QUEUE, [Settlement.of(job, "ack", result=b"[7]")])
    assert await ask(url, "HGET", keys.jobs, "j") == before
    assert "hello" not in await ask(url, "HGET", keys.records, "j")


async def test_nothing_of_a_deleted_or_purged_job_is_left(store: RedisStore, url: str, keys: JobKeys) -> None:
    await store.add(QUEUE, new("a", "b", "c", "d"))
    for id in ("a", "b", "c"):
        await store.cancel(QUEUE, id)
    await store.delete(QUEUE, "a")
    assert await store.purge(QUEUE, FAILED, JobRetention(age=None, count=0)) == 2
    [job] = (await claim(store)).jobs
    await store.settle(QUEUE, acks([job]))
    assert await store.purge(QUEUE, SUCCEEDED, JobRetention(age=None, count=0)) == 1
    left = set(await keys_like(url, f"{keys.namespace}:*"))
    assert left <= {keys.sequence, keys.highest, keys.news}


# --- one script an operation -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.one_node
@pytest.mark.any_server
async def test_a_thousand_jobs_take_one_round_trip_an_operation(url: str, namespace: str) -> None:
    async with Proxy(url) as proxy, RedisStore(proxy.url, namespace=namespace) as store:
        ids = [f"j{at}" for at in range(1000)]
        seen = 0
        for _ in range(2):  # the first time the server lacks the scripts
            seen = len(proxy.received)
            await store.add(QUEUE, new(*ids))
            claimed = await claim(store, 1000)
            leases = [Lease.of(job) for job in claimed.jobs]
            assert await store.renew(QUEUE, leases, TTL) == [True] * 1000
            assert await store.settle(QUEUE, acks(claimed.jobs)) == [True] * 1000
            assert len(await store.find(QUEUE, ids)) == 1000
            assert (await store.counts(QUEUE))[SUCCEEDED] == 1000
            assert len((await store.page(QUEUE, SUCCEEDED, 1000, None)).jobs) == 1000
            assert await store.purge(QUEUE, SUCCEEDED, JobRetention(None, 0)) == 1000
        assert len(proxy.received) - seen == 9  # a thousand acks are two: a request has 3,999 words at most


@pytest.mark.slow
async def test_lists_may_be_longer_than_the_stack_of_lua(store: RedisStore) -> None:
    ids = [f"j{at}" for at in range(9001)]
    await store.add(QUEUE, new(*ids))
    with pytest.raises(DuplicateJobError) as refused:
        await store.add(QUEUE, new("new", *ids[:3], *ids[-700:]))
    assert refused.value.job_ids == (*ids[:3], *ids[-700:])
    assert await store.find(QUEUE, ["new"]) == [None]
    claimed: list[Job] = []
    while len(claimed) < len(ids):
        claimed += (await claim(store, 9001, retries=1800, oldest=1800)).jobs
    assert [job.id for job in claimed] == ids
    assert all(await store.renew(QUEUE, [Lease.of(job) for job in claimed], TTL))
    assert all(await store.settle(QUEUE, acks(claimed)))
    assert [job and job.state for job in await store.find(QUEUE, ids)] == [SUCCEEDED] * 9001


@pytest.mark.parametrize("is_new", [False, True], ids=["as it was", "with a new job"])
async def test_a_line_that_an_older_version_filled_is_explored(
    store: RedisStore, url: str, keys: JobKeys, clock: ManualClock, is_new: bool
) -> None:
    """It knows nothing of who has waited longest, in whichever of very many priorities."""
    await store.add(QUEUE, [NewJob(f"p{at}", b"{}", priority=at) for at in range(250)])
    await store.add(QUEUE, new("first", priority=0))
    clock.advance(1)
    await store.add(QUEUE, [NewJob(f"high{at}", b"{}", priority=1000) for at in range(50)])
    await ask(url, "DEL", keys.waits)
    if is_new:
        clock.advance(1)
        await store.add(QUEUE, new("late", priority=500))
    got = [job.id for _ in range(5) for job in (await claim(store, 5, oldest=1)).jobs]
    assert [id for id in got if id.startswith("p")] == ["p249", "p248", "p247", "p246", "p245"]


async def test_what_was_cancelled_in_line_is_passed_over(store: RedisStore, clock: ManualClock) -> None:
    """However many priorities have nobody in line any more."""
    await store.add(QUEUE, [NewJob(f"p{at}", b"{}", priority=at) for at in range(300)])
    clock.advance(1)
    await store.add(QUEUE, new("low", priority=-1))
    clock.advance(1)
    await store.add(QUEUE, [NewJob(f"high{at}", b"{}", priority=1000) for at in range(50)])
    for at in range(300):
        await store.cancel(QUEUE, f"p{at}")
    got = [job.id for _ in range(3) for job in (await claim(store, 5, oldest=1)).jobs]
    assert "low" in got


async def test_one_bad_settlement_does_not_hurt_its_neighbours(store: RedisStore) -> None:
    await store.add(QUEUE, new("a", "b"))
    first, second = (await claim(store)).jobs
    told = [*acks([first]), Settlement("b", 99, "ack"), Settlement("none", 1, "fail"), *acks([first]), *acks([second])]
    assert await store.settle(QUEUE, told) == [True, False, False, False, True]


async def test_a_transaction_of_the_callers_is_refused(store: RedisStore) -> None:
    with pytest.raises(ConfigError, match="connection must be None"):
        await store.add(QUEUE, new("j"), connection=object())


async def test_what_redis_cannot_order_is_refused(store: RedisStore) -> None:
    for bad in (NewJob("j", b"1", priority=1 << 31), NewJob("j", b"1", delay_ms=10**15)):
        with pytest.raises(ConfigError, match="in Redis"):
            await store.add(QUEUE, [bad])
    await store.add(QUEUE, [NewJob("low", b"1", -(1 << 31)), NewJob("high", b"1", (1 << 31) - 1), NewJob("j", b"1")])
    assert [job.id for job in (await claim(store)).jobs] == ["high", "j", "low"]


# --- bounds ------------------------------------------------------------------------------------------------


async def test_a_claim_gives_up_a_bounded_number_of_leases_and_says_that_there_are_more(
    store: RedisStore, clock: ManualClock
) -> None:
    await store.add(QUEUE, new(*(f"j{at}" for at in range(600))))
    await claim(store, 600)
    clock.advance(TTL / 1000 + 1)
    first = await claim(store, 0)
    assert (len(first.expired), first.next_ms) == (500, 0)
    second = await claim(store, 0)
    assert (len(second.expired), second.next_ms) == (100, None)
    assert (await store.counts(QUEUE))[READY] == 600


async def test_a_claim_lets_a_bounded_number_of_jobs_fall_due_and_says_that_there_are_more(
    store: RedisStore, clock: ManualClock
) -> None:
    await store.add(QUEUE, new(*(f"j{at}" for at in range(1200)), delay_ms=5000))
    assert (await claim(store)).jobs == []
    clock.advance(6)
    assert (await claim(store, 0)).next_ms == 0
    assert (await claim(store, 0)).next_ms is None
    assert [len((await claim(store, 1200)).jobs) for _ in range(2)] == [1000, 200]


async def test_a_job_remembers_its_last_failures_only(store: RedisStore) -> None:
    await store.add(QUEUE, new("j"))
    for at in range(25):
        [job] = (await claim(store)).jobs
        told = Settlement.of(job, "retry", error=f"long {at}\nü", brief=f"brief \n{at}")
        assert await store.settle(QUEUE, [told]) == [True]
    [found] = await store.find(QUEUE, ["j"])
    assert found is not None
    assert [(one.number, one.error) for one in found.failures] == [(at + 1, f"brief \n{at}") for at in range(5, 25)]
    assert found.last_error == "long 24\nü"


# --- pages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fall_due_after", range(5))
async def test_a_job_that_falls_due_between_two_pages_is_met_once(
    fall_due_after: int, store: RedisStore, clock: ManualClock
) -> None:
    await store.add(QUEUE, new("a", "b", priority=1))
    await store.add(QUEUE, new("late-1", "late-2", delay_ms=5000, priority=1))
    await store.add(QUEUE, new("late-3", delay_ms=5000))
    await store.add(QUEUE, new("c"))
    met: list[str] = []
    cursor: str | None = None
    for at in range(6):
        if at == fall_due_after:
            clock.advance(6)
            await claim(store, 0)
        page = await store.page(QUEUE, READY, 1, cursor)
        met += [job.id for job in page.jobs]
        cursor = page.cursor
    assert (sorted(met), cursor) == (["a", "b", "c", "late-1", "late-2", "late-3"], None)


async def test_a_job_whose_lease_is_renewed_between_two_pages_is_met_once(store: RedisStore) -> None:
    await store.add(QUEUE, new("a", "b", "c"))
    jobs = (await claim(store)).jobs
    first = await store.page(QUEUE, IN_FLIGHT, 1, None)
    assert await store.renew(QUEUE, [Lease.of(job) for job in jobs[:2]], 10 * TTL) == [True, True]
    second = await store.page(QUEUE, IN_FLIGHT, 5, first.cursor)
    assert [job.id for page in (first, second) for job in page.jobs] == ["a", "b", "c"]


async def test_jobs_that_finished_in_one_moment_are_met_once_each(store: RedisStore) -> None:
    ids = [f"j{at:02}" for at in range(25)]
    await store.add(QUEUE, new(*ids))
    await store.settle(QUEUE, acks((await claim(store, 25)).jobs))
    assert await pages(store, SUCCEEDED, 4) == ids


@pytest.mark.parametrize("state", list(JobState))
async def test_a_cursor_that_no_page_gave_is_refused(state: JobState, store: RedisStore) -> None:
    with pytest.raises(ConfigError, match="cursor must be"):
        await store.page(QUEUE, state, 10, "x")


# --- what somebody else wrote --------------------------------------------------------------------------------


@pytest.mark.parametrize("hash", ["jobs", "records"])
async def test_a_record_that_is_none_is_an_error_that_names_it_and_stops_nobody_else(
    hash: str, store: RedisStore, url: str, keys: JobKeys, caplog: pytest.LogCaptureFixture
) -> None:
    await store.add(QUEUE, new("a", "bad", "c"))
    await ask(url, "HSET", getattr(keys, hash), "bad", "no such thing")
    with pytest.raises(QueueError, match="'bad' of queue 'emails'"):
        await store.find(QUEUE, ["a", "bad"])
    page = await store.page(QUEUE, READY, 10, None)
    assert [job.id for job in page.jobs] == ["a", "c"]
    assert [job.id for job in (await claim(store)).jobs] == ["a", "c"]
    assert "'bad' of queue 'emails'" in caplog.text
    assert (await claim(store)).jobs == []


async def test_a_spoilt_record_in_flight_is_given_up_with_its_lease(
    store: RedisStore, url: str, keys: JobKeys, clock: ManualClock
) -> None:
    await store.add(QUEUE, new("a", "bad"))
    await claim(store)
    await ask(url, "HSET", keys.records, "bad", "no such thing")
    await ask(url, "HSET", keys.errors, "a", "nor this")
    assert await store.settle(QUEUE, [Settlement("bad", 1, "ack")]) == [False]
    clock.advance(TTL / 1000 + 1)
    claimed = await claim(store)
    assert [job.id for job in claimed.jobs] == ["a"]
    assert claimed.jobs[0].last_error == EXPIRED


async def test_a_key_of_another_type_is_a_queue_error_with_its_cause(
    store: RedisStore, url: str, keys: JobKeys
) -> None:
    await ask(url, "SET", keys.ready, "x")
    with pytest.raises(QueueError, match="WRONGTYPE") as caught:
        await store.add(QUEUE, new("j"))
    assert isinstance(caught.value.__cause__, RedisError)


# --- opening -----------------------------------------------------------------------------------------------


@pytest.mark.one_node
async def test_a_server_that_persists_nothing_is_warned_of_once(rung: Rung, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "conquiet.jobs")
    async with on_a_port(rung.binary) as server:
        async with RedisStore(server.url) as store:
            await store.open()
            async with store.clone():
                pass
        assert caplog.text.count("persists nothing") == 1
        await ask(server.url, "CONFIG", "SET", "save", "60 1")
        async with RedisStore(server.url):
            assert caplog.text.count("persists nothing") == 1


@pytest.mark.one_node
@pytest.mark.any_server
async def test_a_server_that_keeps_its_settings_to_itself_is_not_warned_of(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Proxy(url) as proxy:
        proxy.refuse(b"CONFIG", b"-NOPERM no\r\n", times=2)
        async with RedisStore.connect(proxy.url):
            assert "persists" not in caplog.text


@pytest.mark.one_node
@pytest.mark.any_server
async def test_a_server_that_is_not_there_is_found_out_at_once() -> None:
    with pytest.raises(QueueError):
        await RedisStore.connect("redis://127.0.0.1:1").open()


async def test_a_clone_sees_the_same_jobs_from_another_loop(store: RedisStore) -> None:
    await store.add(QUEUE, new("j"))

    async def elsewhere() -> list[Job | None]:
        async with store.clone() as other:
            return await other.find(QUEUE, ["j"])

    assert await asyncio.to_thread(asyncio.run, elsewhere()) == await store.find(QUEUE, ["j"])


async def test_a_stores_recipe_can_be_pickled(store: RedisStore) -> None:
    assert pickle.loads(pickle.dumps(store._address)) == store._address
