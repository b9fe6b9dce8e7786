"""Connections are cut while jobs are worked on: answers are lost, and nothing else is."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from conquiet import JobQueue, JobState
from conquiet.wire.scripts import Script
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import eventually
from tests.system.jobs_check import Plan, check
from tests.system.jobs_crew import Crew, PostgresHome, RedisHome, add, all_finished, all_jobs
from tests.system.jobs_log import Disturbance, Log, now

pytestmark = pytest.mark.system

CLAIM, SETTLE = (Script.named(f"jobs_{what}").sha.encode() for what in ("claim", "settle"))
HOW = ("--lease-ttl", "1.5")


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisHome]:
    with RedisHome(tmp_path_factory.mktemp("redis")) as home:
        yield home


@pytest.fixture
def crew(redis: RedisHome, tmp_path: Path) -> Iterator[Crew]:
    with Crew.hired(redis, tmp_path) as crew:
        yield crew


@pytest.fixture
async def work(crew: Crew) -> AsyncIterator[JobQueue]:
    async with crew.queue() as queue:
        yield queue


@pytest.fixture
async def proxy(redis: RedisHome) -> AsyncIterator[Proxy]:
    async with Proxy(redis.url) as proxy:
        yield proxy


def flow_of(first: int, count: int) -> dict[str, Plan]:
    """Jobs of which every seventh fails at first; none runs out of attempts because claims get lost."""
    return {f"j{n}": Plan("done" if n % 7 else "once", max_retries=20) for n in range(first, first + count)}


def done_once(log: Log, plans: dict[str, Plan]) -> None:
    """Each job was done, and none of them again."""
    counts = Counter(run.job for run in log.runs if run.outcome == "done")
    assert counts == Counter(plans.keys())


async def test_lost_answers_to_settlements_cost_nothing(crew: Crew, work: JobQueue, proxy: Proxy, scale: float) -> None:
    """Neither a job nor a second call of its handler: what was written is looked up."""
    plans: dict[str, Plan] = {}
    names = ("one", "two")
    await asyncio.gather(*(crew.start(name, *HOW, url=proxy.url) for name in names))
    at = now()
    for turn in range(max(5, int(50 * scale))):
        more = flow_of(turn * 100, 100)
        plans.update(more)
        lost = proxy.cut(SETTLE)
        await add(work, more, work=0.01)
        await asyncio.wait_for(lost.wait(), 20)
    await all_finished(work)
    crew.disturbances.append(Disturbance("outage", "", at, now()))
    await crew.dismiss(*names)
    assert check(plans, crew.log.read(), await all_jobs(work), crew.disturbances) == []
    done_once(crew.log, plans)
    assert any(saying.answer == "" for saying in crew.log.sayings)


async def test_a_claim_whose_answer_is_lost_costs_neither_lease_nor_run(
    crew: Crew, work: JobQueue, proxy: Proxy
) -> None:
    """The worker looks for what its claim has leased, gives it back and claims it."""
    plans = {"a": Plan()}
    await add(work, plans)
    await crew.start("warm", *HOW)  # the server knows the scripts now
    await all_finished(work)
    await crew.dismiss("warm")
    plans["b"] = Plan()
    await add(work, {"b": plans["b"]})
    at, lost = now(), proxy.cut(CLAIM)
    await crew.start("one", *HOW, url=proxy.url)
    await all_finished(work)
    crew.disturbances.append(Disturbance("outage", "", at, now()))
    await crew.dismiss("one")
    assert lost.is_set()
    jobs = await all_jobs(work)
    assert jobs["b"].failures == ()
    assert [run.attempts for run in crew.log.runs_of("one")] == [1]
    assert check(plans, crew.log.read(), jobs, crew.disturbances) == []


async def test_a_claim_whose_answer_comes_after_its_lease_is_not_begun(
    crew: Crew, work: JobQueue, proxy: Proxy
) -> None:
    """By its own clock the worker knows that the lease it was given has ended: somebody else has the job by now."""
    await crew.start("late", *HOW, url=proxy.url)
    await eventually(lambda: proxy.count(CLAIM) > 0, "it has looked for jobs")
    hold = proxy.hold(CLAIM)
    plans = {"a": Plan()}
    at = now()
    await add(work, plans)
    await asyncio.wait_for(hold.caught.wait(), 20)
    await crew.start("heir", *HOW)
    await all_finished(work)
    hold.release()
    plans["b"] = Plan()
    await crew.dismiss("heir")
    await add(work, {"b": plans["b"]})
    await all_finished(work)
    crew.disturbances.append(Disturbance("outage", "", at, now()))
    await crew.dismiss("late")
    assert check(plans, crew.log.read(), await all_jobs(work), crew.disturbances) == []
    assert [run.job for run in crew.log.runs_of("heir")] == ["a"]
    assert [run.job for run in crew.log.runs_of("late")] == ["b"]


async def test_what_is_done_while_the_store_is_away_is_kept_until_it_is_back(
    crew: Crew, work: JobQueue, proxy: Proxy, tmp_path: Path
) -> None:
    """Also for longer than the lease, if nobody else came for the job."""
    gate = tmp_path / "gate"
    plans: dict[str, Plan] = {}
    await crew.start("one", "--lease-ttl", "0.3", "--concurrency", "1", "--gate", str(gate), url=proxy.url)
    for turn in range(4):  # who comes first when it is back, the outcome or the next claim, is chance
        plans[f"j{turn}"] = Plan()
        await add(work, {f"j{turn}": Plan()})
        await crew.begun("one", count=turn + 1)
        at = now()
        proxy.shut()
        gate.touch()
        await eventually(lambda turn=turn: len(crew.log.said_by("one", "")) > turn, "it has tried to tell")  # type: ignore[misc]
        held = (await all_jobs(work))[f"j{turn}"]
        assert held.lease_ms is not None
        ends = (held.lease_ms + 50) * 1000
        await eventually(lambda ends=ends: now() > ends, "the lease has ended")  # type: ignore[misc]
        proxy.reopen()
        await all_finished(work)
        assert len(crew.log.read().runs) == turn + 1, "it was run again, though it was done"
        gate.unlink()
        crew.disturbances.append(Disturbance("outage", "", at, now()))
    await crew.dismiss("one")
    jobs = await all_jobs(work)
    assert check(plans, crew.log.read(), jobs, crew.disturbances) == []
    assert Counter(run.job for run in crew.log.runs) == Counter(plans.keys())
    assert {(job.state, job.attempts) for job in jobs.values()} == {(JobState.SUCCEEDED, 1)}


async def test_broken_connections_to_redis_lose_nothing_and_repeat_nothing(
    crew: Crew, work: JobQueue, proxy: Proxy, scale: float
) -> None:
    async def cut() -> None:
        await proxy.cut(b"EVALSHA").wait()  # done, but nobody was told
        await proxy.disconnect()

    plans: dict[str, Plan] = {}
    await asyncio.gather(*(crew.start(name, *HOW, url=proxy.url) for name in ("one", "two")))
    at = now()
    for turn in range(max(5, int(50 * scale))):
        plans.update(flow_of(turn * 100, 100))
        await add(work, flow_of(turn * 100, 100), work=0.01)
        await asyncio.wait_for(cut(), 20)
    await all_finished(work)
    crew.disturbances.append(Disturbance("outage", "", at, now()))
    await crew.dismiss("one", "two")
    assert check(plans, crew.log.read(), await all_jobs(work), crew.disturbances) == []
    done_once(crew.log, plans)


async def test_broken_connections_to_postgres_lose_nothing_and_repeat_nothing(tmp_path: Path, scale: float) -> None:
    ends = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND usename IS NOT NULL"
    )
    plans: dict[str, Plan] = {}
    with PostgresHome() as home, Crew.hired(home, tmp_path) as crew:
        async with crew.queue() as work:
            await asyncio.gather(*(crew.start(name, *HOW) for name in ("one", "two")))
            at = now()
            for turn in range(max(5, int(50 * scale))):
                plans.update(flow_of(turn * 100, 100))
                await add(work, flow_of(turn * 100, 100), work=0.01)
                done = len(crew.log.read().runs)
                await eventually(lambda done=done: len(crew.log.read().runs) > done + 20, "work goes on")  # type: ignore[misc]
                await asyncio.to_thread(home.server.ask, ends)
            await all_finished(work)
            crew.disturbances.append(Disturbance("outage", "", at, now()))
            await crew.dismiss("one", "two")
            assert check(plans, crew.log.read(), await all_jobs(work), crew.disturbances) == []
            done_once(crew.log, plans)
