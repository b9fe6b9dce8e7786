"""Answers of the store that are lost, at every script and statement: nothing is stranded, nothing is done twice."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any, Final

import pytest

from conquiet import Job, JobWorker, RedisStore
from conquiet.jobs.stores.postgres import PostgresStore
from conquiet.jobs.stores.postgres.statements import Statements, migrations
from conquiet.kit.clock import ManualClock
from tests.contracts.jobs_flavours import serving, tally
from tests.jobs.boundaries import BACKGROUND, BEAT, PATHS, Kind, Scene, queue_of
from tests.jobs.working import ran as outcomes
from tests.rigs.calling import IS_FULL, boundaries, sends_what_is_listed, struck_and_made_again
from tests.rigs.cluster_tracing import tracing
from tests.rigs.postgres import LocalPostgres, schema_name
from tests.rigs.postgres_tracing import PostgresTracer
from tests.rigs.tracing import SCRIPTS, Way
from tests.rigs.waiting import eventually

pytest_plugins = ["tests.jobs.postgres_fixtures"]
pytestmark = [pytest.mark.any_server, pytest.mark.guarantee]

KINDS: Final[tuple[Kind, ...]] = ("redis", "postgres")
WAYS: Final[tuple[Way, ...]] = ("unanswered", "unsent") if IS_FULL else ("unanswered",)
SQL: Final = sorted(
    file.name.removesuffix(".sql")
    for file in files("conquiet.jobs.stores.postgres").joinpath("sql").iterdir()
    if file.name.endswith(".sql")
)
FRAGMENTS: Final = {"claimed_columns", "columns", "moment"}

every_path = pytest.mark.parametrize(
    ("kind", "path"), [(kind, path) for kind in KINDS for path in PATHS[kind]], ids=str
)
every_boundary = pytest.mark.parametrize(
    ("kind", "path", "at"),
    [(kind, path, at) for kind in KINDS for path, at in boundaries(PATHS[kind])],
    ids=lambda value: str(value).replace(" ", "_"),
)


@asynccontextmanager
async def scene_on(kind: Kind, url: str, pg: LocalPostgres, *, is_new: bool = False) -> AsyncIterator[Scene]:
    """A queue on a store of that kind; ``is_new``: whose tables are yet to be made."""
    clock, name = ManualClock(), f"q-{secrets.token_hex(6)}"
    if kind == "redis":
        async with tracing(url) as proxy, RedisStore(url, clock=clock) as outside:
            store = RedisStore(proxy.url, clock=clock)
            try:
                yield Scene(proxy, store, queue_of(store, name), queue_of(outside, name), clock)
            finally:
                await store.aclose()
        return
    schema = schema_name()
    statements = Statements(schema)
    names = {statements[name]: name for name in SQL if name not in FRAGMENTS}
    names.update((statements.fill(step.text).encode(), step.name) for step in migrations())
    past = PostgresStore(pg.dsn, schema=schema, clock=clock)
    if not is_new:
        await past.migrate()
    async with PostgresTracer(pg.port, names) as tracer:
        through = PostgresStore(tracer.dsn, schema=schema, clock=clock)
        try:
            yield Scene(tracer, through, queue_of(through, name), queue_of(past, name), clock, [], through.migrate)
        finally:
            await through.aclose()
            await past.aclose()
            pg.drop(schema)


# --- the lists ------------------------------------------------------------------------------------------------------


@every_path
async def test_a_call_sends_what_is_listed_and_nothing_else(url: str, pg: LocalPostgres, kind: Kind, path: str) -> None:
    """A new script or statement belongs on the list of its call, and so is struck at like the others."""
    async with scene_on(kind, url, pg, is_new=path == "migrate") as scene:
        listed = PATHS[kind][path]
        waits = {"XREAD"} - set(listed.commands)
        await sends_what_is_listed(scene, listed, BACKGROUND[kind] | waits)


def test_every_script_of_the_room_is_on_a_path() -> None:
    listed = BACKGROUND["redis"].union(*(path.commands for path in PATHS["redis"].values()))
    assert {script.name for script in SCRIPTS.values() if script.name.startswith("jobs_")} <= listed


def test_every_statement_of_the_store_is_on_a_path() -> None:
    listed = BACKGROUND["postgres"].union(*(path.commands for path in PATHS["postgres"].values()))
    assert set(SQL) - FRAGMENTS <= listed


# --- one call -------------------------------------------------------------------------------------------------------


@every_boundary
@pytest.mark.parametrize("way", WAYS)
async def test_a_call_whose_answer_is_lost_can_be_made_again(
    url: str, pg: LocalPostgres, kind: Kind, path: str, at: int, way: Way
) -> None:
    async with scene_on(kind, url, pg, is_new=path == "migrate") as scene:
        await struck_and_made_again(scene, PATHS[kind][path], at, way)


# --- a worker -------------------------------------------------------------------------------------------------------

WORKING: Final[dict[Kind, tuple[str, ...]]] = {
    "redis": ("jobs_claim", "jobs_settle", "jobs_renew"),
    "postgres": ("claim", "settle", "renew"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "target"), [(kind, name) for kind in KINDS for name in WORKING[kind]])
async def test_a_worker_that_loses_an_answer_has_done_all_within_a_heartbeat(
    url: str, pg: LocalPostgres, kind: Kind, target: str, way: Way
) -> None:
    """Each job is run once, and has cost one attempt: no lease has run out."""
    async with scene_on(kind, url, pg) as scene:
        ran: Counter[Any] = Counter()
        is_renewal = target.endswith("renew")
        first = scene.proxy.strike(target, (), way)

        async def handler(job: Job) -> None:
            ran[job.payload] += 1
            if is_renewal:
                await first.wait()

        await scene.eye.enqueue_many(range(5))
        worker = JobWorker(scene.jobs, handler, concurrency=3, handle_signals=False)
        async with serving(worker):
            if is_renewal:
                await eventually(lambda: len(ran) == 3, "three to run")
                scene.clock.advance(BEAT)
            passed = 0.0

            async def all_done() -> bool:
                nonlocal passed
                step = 0.05 if passed < BEAT else 0.0
                passed += step
                scene.clock.advance(step)
                return await tally(scene.eye) == (0, 0, 5, 0)

            await eventually(all_done, "all to be done")
        assert first.is_set()
        assert ran == Counter(range(5))
        assert outcomes(scene.jobs) == {"succeeded": 5}, "what was written is known to be written"
        jobs = (await scene.eye.list_jobs(next(iter(await _states(scene))))).jobs
        assert {(job.attempts, job.failures) for job in jobs} == {(1, ())}


async def _states(scene: Scene) -> list[Any]:
    return [state for state, count in (await scene.eye.counts()).items() if count]
