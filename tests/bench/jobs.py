"""Jobs on each store against queues written by hand on the same server, in the same run."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from redis.asyncio import Redis

from conquiet import EmbeddedRedis, Job, JobQueue, JobState, JobStore, JobWorker, MemoryStore, PostgresStore, RedisStore
from tests.bench.clock import Measured, Work, measure, pin
from tests.bench.jobs_by_hand import ByHand, HandPostgres, HandRedis, PlainQueue
from tests.bench.report import Row, Section
from tests.rigs.postgres import LocalPostgres

PAYLOAD = {"order": 123, "customer": "customer-7", "amount": 12.5, "note": "some text to reach 100 bytes", "ok": True}
TASKS = 50
CHUNK = 1000
ROUNDS = 3
CONNECTIONS = 8
FINISHED = 10_000_000
CLAIMS = 300
_names = (f"bench_{number}" for number in itertools.count())


@dataclass(frozen=True)
class Sizes:
    """How much work is measured at a time, such that each takes about a second."""

    one: int
    tasks: int
    bulk: int
    drain: int
    by_hand: int
    """What is drained by hand."""
    pace: int
    """Jobs a second when the latency is measured, ..."""
    paced: int
    """... and how many."""


@dataclass(frozen=True)
class Goals:
    """Ratios to the same by hand, and to the best of the peers."""

    tasks: float | None = None
    bulk: float | None = None
    drain: float | None = None
    peer_bulk: float | None = None
    peer_drain: float | None = None


@dataclass(frozen=True)
class Place:
    """A store, and the way to a queue by hand on the same server."""

    name: str
    store: JobStore
    by_hand: Callable[[str], Any]
    sizes: Sizes
    goals: Goals = Goals()
    pid: int | None = None
    """The server's."""
    peers: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    """By library: the rates of ``bulk`` and ``drain`` on the same server, a moment before."""

    def pin(self, *, together: bool) -> None:
        if self.pid is not None:
            pin(self.pid, together=together)

    def queue(self) -> JobQueue:
        return JobQueue(self.store, next(_names))


MEMORY: Final = Sizes(one=2_000, tasks=5_000, bulk=20_000, drain=2_000, by_hand=20_000, pace=200, paced=1_000)
REDIS: Final = Sizes(one=2_000, tasks=10_000, bulk=50_000, drain=20_000, by_hand=4_000, pace=200, paced=1_000)
POSTGRES: Final = Sizes(one=500, tasks=2_000, bulk=20_000, drain=10_000, by_hand=1_000, pace=200, paced=1_000)
REDIS_GOALS: Final = Goals(tasks=2, bulk=3.5, drain=2, peer_bulk=20, peer_drain=8)
POSTGRES_GOALS: Final = Goals(tasks=1, bulk=1.5, drain=3, peer_bulk=1.2, peer_drain=1.5)


async def side_by_side(works: dict[str, tuple[int, Work]]) -> dict[str, Measured]:
    """As ``measure``, of works that handle different numbers of jobs a round."""
    found: dict[str, list[Measured]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, (count, work) in works.items():
            found[name].append((await measure(count, {name: work}, rounds=1))[name])
    return {
        name: Measured(statistics.median(one.rate for one in each), statistics.median(one.cpu_us for one in each))
        for name, each in found.items()
    }


# --- enqueueing ------------------------------------------------------------------------------------------


def one_works(enqueue: Callable[[object], Awaitable[object]], count: int) -> tuple[int, Work]:
    async def work() -> None:
        for _ in range(count):
            await enqueue(PAYLOAD)

    return count, work


def tasks_works(enqueue: Callable[[object], Awaitable[object]], count: int) -> tuple[int, Work]:
    async def some() -> None:
        for _ in range(count // TASKS):
            await enqueue(PAYLOAD)

    async def work() -> None:
        await asyncio.gather(*(some() for _ in range(TASKS)))

    return count // TASKS * TASKS, work


def bulk_works(enqueue_many: Callable[[list[Any]], Awaitable[object]], count: int) -> tuple[int, Work]:
    async def work() -> None:
        for _ in range(count // CHUNK):
            await enqueue_many([PAYLOAD] * CHUNK)

    return count // CHUNK * CHUNK, work


async def enqueue_rows(place: Place) -> list[Row]:
    hand: ByHand = place.by_hand(next(_names))
    ours, sizes, goals = place.queue(), place.sizes, place.goals
    place.pin(together=True)
    one = await side_by_side(
        {"by hand": one_works(hand.enqueue, sizes.one), "ours": one_works(ours.enqueue, sizes.one)}
    )
    place.pin(together=False)
    many = await side_by_side(
        {"by hand": tasks_works(hand.enqueue, sizes.tasks), "ours": tasks_works(ours.enqueue, sizes.tasks)}
    )
    bulk = await side_by_side(
        {"by hand": bulk_works(hand.enqueue_many, sizes.bulk), "ours": bulk_works(ours.enqueue_many, sizes.bulk)}
    )
    work = f"`enqueue_many` by {CHUNK:,}"
    return [
        *_pair(place, ("one by one", "`enqueue` one by one"), one, None),
        *_pair(place, (f"{TASKS} tasks", f"{TASKS} tasks calling `enqueue`"), many, goals.tasks),
        *_pair(place, (f"{CHUNK:,} at a time", work), bulk, goals.bulk),
        *_peer(place, work, bulk, "bulk", goals.peer_bulk),
    ]


# --- draining --------------------------------------------------------------------------------------------


async def no_op(payload: object) -> None:
    """What a handler costs that does nothing."""


async def drain(queue: JobQueue, count: int, concurrency: int) -> None:
    """A worker, from its start until the last of ``count`` jobs is acknowledged."""
    handled = 0

    async def handle(job: Job) -> None:
        nonlocal handled
        handled += 1
        if handled == count:
            worker.stop()

    worker = JobWorker(queue, handle, concurrency=concurrency, handle_signals=False)
    await worker.run()
    counts = await queue.counts()
    assert counts[JobState.SUCCEEDED] == count, counts


async def drain_works(place: Place, concurrency: int) -> dict[str, tuple[int, Work]]:
    count, fewer = place.sizes.drain, place.sizes.by_hand
    ours, theirs = [place.queue() for _ in range(ROUNDS)], [place.by_hand(next(_names)) for _ in range(ROUNDS)]
    for queue, hand in zip(ours, theirs, strict=True):
        for start in range(0, count, CHUNK):
            await queue.enqueue_many([PAYLOAD] * min(CHUNK, count - start))
        for start in range(0, fewer, CHUNK):
            await hand.enqueue_many([PAYLOAD] * min(CHUNK, fewer - start))
    mine, hands = iter(ours), iter(theirs)
    return {
        "by hand": (fewer, lambda: next(hands).drain(fewer, concurrency, no_op)),
        "ours": (count, lambda: drain(next(mine), count, concurrency)),
    }


async def drain_rows(place: Place) -> list[Row]:
    rows: list[Row] = []
    for concurrency in (50, 200):
        work = f"`JobWorker`, no-op handler, `concurrency={concurrency}`"
        found = await side_by_side(await drain_works(place, concurrency))
        rows += _pair(place, (f"no-op handler, {concurrency} tasks", work), found, place.goals.drain)
        rows += _peer(place, work, found, "drain", place.goals.peer_drain)
    return rows


# --- latency ---------------------------------------------------------------------------------------------


async def paced(sizes: Sizes, enqueue: Callable[[dict[str, float]], Awaitable[object]]) -> None:
    began = time.perf_counter()
    for number in range(sizes.paced):
        await asyncio.sleep(max(began + number / sizes.pace - time.perf_counter(), 0))
        await enqueue({"at": time.perf_counter()})


async def latency_by_hand(place: Place) -> list[float]:
    hand, found = place.by_hand(next(_names)), list[float]()

    async def handle(payload: Any) -> None:
        found.append(time.perf_counter() - payload["at"])

    serving = asyncio.get_running_loop().create_task(hand.serve(place.sizes.paced, handle))
    await paced(place.sizes, getattr(hand, "tell", hand.enqueue))
    await serving
    return found


async def latency_of_ours(place: Place) -> list[float]:
    queue, found = place.queue(), list[float]()

    async def handle(job: Job) -> None:
        found.append(time.perf_counter() - job.payload["at"])
        if len(found) == place.sizes.paced:
            worker.stop()

    worker = JobWorker(queue, handle, handle_signals=False)
    running = asyncio.get_running_loop().create_task(worker.run())
    await paced(place.sizes, queue.enqueue)
    await running
    return found


async def latency_rows(place: Place) -> list[Row]:
    rounds = [(await latency_by_hand(place), await latency_of_ours(place)) for _ in range(ROUNDS)]
    rows: list[Row] = []
    for name, at in (("p50", 50), ("p99", 99)):
        hand, ours = (
            statistics.median(statistics.quantiles(both[which], n=100)[at - 1] for both in rounds) for which in (0, 1)
        )
        work, pace = f"{place.name}: latency {name} at {place.sizes.pace}/s", place.sizes.pace
        rows.append(Row(f"{work}, by hand ({hand * 1e3:.2f} ms)", pace, 0))
        rows.append(Row(f"{work}, `JobWorker` ({ours * 1e3:.2f} ms)", pace, 0, "by hand / ours", hand / ours))
    return rows


# --- the suites ------------------------------------------------------------------------------------------


def _pair(place: Place, works: tuple[str, str], found: dict[str, Measured], goal: float | None) -> list[Row]:
    hand, ours = found["by hand"], found["ours"]
    return [
        Row(f"{place.name}, by hand: {works[0]}", hand.rate, hand.cpu_us),
        Row(f"{place.name}: {works[1]}", ours.rate, ours.cpu_us, "by hand", ours.rate / hand.rate, goal),
    ]


def _peer(place: Place, work: str, found: dict[str, Measured], what: str, goal: float | None) -> list[Row]:
    if not place.peers:
        return []
    rates = {library: rates[what] for library, rates in place.peers.items()}
    ours, best = found["ours"], max(rates.values())
    words = ", ".join(f"{library} {rate:,.0f}/s" for library, rate in rates.items())
    return [Row(f"{place.name}: {work}", ours.rate, ours.cpu_us, words, ours.rate / best, goal)]


async def peers_on(kind: str, url: str) -> dict[str, dict[str, float]]:
    """What other libraries do on a server; nothing if nobody has installed them (``nox -s bench`` does)."""
    python = os.environ.get("CONQUIET_PEERS")
    if python is None:
        return {}
    # -P: the modules beside the script are not for it.
    command = [python, "-P", str(Path(__file__).with_name("peers.py")), kind, url]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await asyncio.wait_for(process.communicate(), 600)
    assert process.returncode == 0, f"{command} failed"
    found: dict[str, dict[str, float]] = json.loads(output)
    return found


@asynccontextmanager
async def on_memory() -> AsyncGenerator[Place]:
    yield Place("memory", MemoryStore(), lambda queue: PlainQueue(), MEMORY)


@asynccontextmanager
async def on_redis() -> AsyncGenerator[tuple[Place, str]]:
    async with EmbeddedRedis(unix_socket=False) as server, Redis.from_url(server.url, max_connections=500) as client:
        pin(server.pid, together=False)
        peers = await peers_on("redis", server.url)
        async with RedisStore.connect(server.url) as store:
            place = Place("Redis", store, partial(HandRedis, client), REDIS, REDIS_GOALS, server.pid, peers)
            yield place, server.version


@asynccontextmanager
async def on_postgres() -> AsyncGenerator[tuple[Place, LocalPostgres]]:
    with LocalPostgres(durable=True, settings={"shared_buffers": "256MB", "max_wal_size": "4GB"}) as server:
        pid = int(Path(server.directory, "data", "postmaster.pid").read_text().split()[0])
        os.sched_setaffinity(pid, set(range(os.cpu_count() or 1)))
        peers = await peers_on("postgres", server.dsn)
        pool = await HandPostgres.make(server.dsn, CONNECTIONS)
        store = PostgresStore.connect(server.dsn, pool_size=CONNECTIONS)
        await store.migrate()
        async with store:
            yield Place("PostgreSQL", store, partial(HandPostgres, pool), POSTGRES, POSTGRES_GOALS, peers=peers), server
        for connection in pool:
            await connection.close()


async def rows_of(place: Place) -> list[Row]:
    return [*await enqueue_rows(place), *await drain_rows(place), *await latency_rows(place)]


async def run() -> Section:
    """All stores; PostgreSQL's processes share both cores with the worker, since there are more of them than cores."""
    async with on_memory() as memory:
        rows = await rows_of(memory)
    async with on_redis() as (redis, redis_version):
        rows += await rows_of(redis)
    os.sched_setaffinity(0, set(range(os.cpu_count() or 1)))
    async with on_postgres() as (postgres, server):
        rows += await rows_of(postgres)
        [(number,)] = server.ask("SHOW server_version")
    return Section("jobs", f"{redis_version}, PostgreSQL {number} with fsync, psycopg {version('psycopg')}", rows)


# --- many finished jobs ------------------------------------------------------------------------------------

_FILL: Final = """
INSERT INTO conquiet.jobs
    (queue, id, state, due, priority, attempts, token, enqueued_ms, ready_ms, finished_ms, payload)
SELECT 'large', 'f' || n, 'succeeded', true, 0, 1, 1, n, n, n, '1' FROM generate_series({start}, {end}) n
"""


class WithoutRedis(Section):
    def text(self) -> str:
        return super().text().replace("\nRedis ", "\n", 1)


async def claimed(queue: JobQueue) -> None:
    for _ in range(CLAIMS):
        jobs = await queue.claim(10, "bench")
        assert len(jobs) == 10
        await queue.ack(*jobs)


async def run_large() -> Section:
    """The claim with millions of finished jobs in the table, against one where there are none."""
    async with on_postgres() as (place, server):
        queues = {"empty": JobQueue(place.store, "empty"), "large": JobQueue(place.store, "large")}
        await _claims(server, JobQueue(place.store, "first"))  # cold: connections, plans and pages are made by it
        found = {"empty": await _claims(server, queues["empty"])}
        for start in range(1, FINISHED, 1_000_000):
            server.ask(_FILL.format(start=start, end=min(start + 999_999, FINISHED)))
        found["large"] = await _claims(server, queues["large"])
        found["other"] = await _claims(server, queues["empty"])
        [(number,)] = server.ask("SHOW server_version")
    empty, large, other = found["empty"], found["large"], found["other"]
    work, base = "PostgreSQL: `claim(10)` + `ack`", "an empty table"
    rows = [
        Row(f"{work}, an empty table", empty.rate, empty.cpu_us),
        Row(f"{work}, {FINISHED:,} finished jobs", large.rate, large.cpu_us, base, large.rate / empty.rate, 0.7),
        Row(f"{work}, as many of another queue", other.rate, other.cpu_us, base, other.rate / empty.rate, 0.7),
    ]
    return WithoutRedis("jobs-large", f"PostgreSQL {number} with fsync, psycopg {version('psycopg')}", rows)


async def _claims(server: LocalPostgres, queue: JobQueue) -> Measured:
    # Each begins alike: what the work before has left is cleared away and written out.
    server.ask("VACUUM ANALYZE conquiet.jobs")
    server.ask("CHECKPOINT")
    for _ in range(ROUNDS * CLAIMS * 10 // CHUNK):
        await queue.enqueue_many([PAYLOAD] * CHUNK)
    return (await side_by_side({"claims": (CLAIMS * 10, lambda: claimed(queue))}))["claims"]
