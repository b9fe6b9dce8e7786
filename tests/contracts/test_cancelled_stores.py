"""Stores that are cancelled while they open, close, migrate, or wait for others: they are closed, or work on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import anyio.to_thread
import psycopg
import pytest
from psycopg import pq

from conquiet import JobState, QueueError
from tests.contracts.jobs_cancellation import (
    Stage,
    Verb,
    ground_on,
    hows,
    on_postgres,
    on_redis,
    on_servers,
    scene_of,
)
from tests.contracts.jobs_flavours import Backend
from tests.rigs.cancelling import How, cancelled_everywhere, nothing_left
from tests.rigs.postgres import schema_name
from tests.rigs.waiting import LONG, eventually

pytest_plugins = ("tests.contracts.jobs_fixtures",)

Made = Callable[[], Awaitable[Any]]
each_how: Final = pytest.mark.parametrize("how", hows())


def each(*verbs: Verb) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("verb", verbs, ids=[verb.__name__ for verb in verbs])


# --- opening and closing ------------------------------------------------------------------------------------------


@asynccontextmanager
async def opening(stage: Stage) -> AsyncGenerator[Made]:
    yield stage.store.open


@on_servers
@each_how
async def test_a_store_that_is_cancelled_while_it_opens_works_on(backend: Backend, how: How) -> None:
    async with ground_on(backend) as ground:
        await cancelled_everywhere(scene_of(ground, opening), how)


@asynccontextmanager
async def a_block(stage: Stage) -> AsyncGenerator[Made]:
    """Entering, a call, and leaving."""

    async def call() -> None:
        async with stage.store:
            await stage.queue.enqueue("mine", job_id="mine")

    yield call
    assert await stage.eye.get("mine") is not None or not stage.is_done


@asynccontextmanager
async def a_block_in_which_somebody_waits(stage: Stage) -> AsyncGenerator[Made]:
    """The store has all the connections and tasks that it may have."""

    async def call() -> None:
        async with stage.store:
            waiting = asyncio.ensure_future(stage.queue.claim(timeout=LONG))
            try:
                await eventually(stage.is_waiting, "the claim waits")
            finally:
                waiting.cancel()
                with suppress(asyncio.CancelledError, QueueError):
                    await waiting

    yield call


@asynccontextmanager
async def closing(stage: Stage) -> AsyncGenerator[Made]:
    """There is a connection for calls, one that waits for news, and a job on its way with others."""
    waiting = asyncio.ensure_future(stage.queue.claim(timeout=LONG))
    await eventually(stage.is_waiting, "the claim waits")
    waiting.cancel()  # and the store goes on listening
    await asyncio.wait([waiting])
    ids = ["a", "b"]
    adding = [asyncio.ensure_future(stage.queue.enqueue(id, job_id=id)) for id in ids]
    await asyncio.sleep(0)  # so that they are gathered
    yield stage.store.aclose
    for id, outcome in zip(ids, await asyncio.gather(*adding, return_exceptions=True), strict=True):
        assert isinstance(outcome, str | QueueError)
        assert await stage.eye.get(id) is not None or not isinstance(outcome, str)


@on_servers
@each(a_block, a_block_in_which_somebody_waits, closing)
@each_how
async def test_a_store_that_is_cancelled_while_it_closes_is_closed(backend: Backend, verb: Verb, how: How) -> None:
    async with ground_on(backend) as ground:
        await cancelled_everywhere(scene_of(ground, verb, is_closing=True), how, at_least=1)


# --- migrating ----------------------------------------------------------------------------------------------------


@on_postgres
@each_how
async def test_a_migration_that_is_cancelled_is_done_or_not_begun(backend: Backend, how: How) -> None:
    async with ground_on(backend) as ground:
        schemas: list[str] = []

        @asynccontextmanager
        async def migrating(stage: Stage) -> AsyncGenerator[Made]:
            yield stage.store.migrate
            assert await stage.store.migrate() == await stage.store.migrate()
            stage.eye = stage.queue  # nobody else looks at this schema

        @asynccontextmanager
        async def scene() -> AsyncGenerator[Made]:
            schemas.append(schema_name())
            async with scene_of(ground, migrating, schema=schemas[-1])() as call:
                yield call

        try:
            await cancelled_everywhere(scene, how)
        finally:
            with psycopg.connect(backend.where[0], autocommit=True) as connection:
                for schema in schemas:
                    connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE".encode())


# --- in line ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def in_line_at_redis(stage: Stage) -> AsyncGenerator[Made]:
    """The only connection waits for the answer to another call."""
    proxy = stage.ground.proxy
    assert proxy is not None
    await stage.queue.counts()
    hold = proxy.hold(stage.name.encode(), once=True)
    before = asyncio.ensure_future(stage.queue.get("before"))
    await hold.caught.wait()

    async def call() -> Any:
        asyncio.get_running_loop().call_soon(hold.release)
        return await stage.queue.counts()

    yield call
    hold.release()
    assert await before is None
    assert not stage.is_done or stage.result == await stage.eye.counts()


@on_redis
@each_how
async def test_a_call_that_is_cancelled_in_line_takes_nobody_along(backend: Backend, how: How) -> None:
    async with ground_on(backend) as ground:
        await cancelled_everywhere(scene_of(ground, in_line_at_redis), how, at_least=1)


@asynccontextmanager
async def held(stage: Stage, id: str) -> AsyncGenerator[psycopg.AsyncConnection[Any]]:
    """The row of a job is locked by somebody else."""
    async with await psycopg.AsyncConnection.connect(stage.ground.backend.where[0]) as other:
        schema = dict(stage.ground.backend.options)["schema"]
        statement = f"SELECT FROM {schema}.jobs WHERE queue = %s AND id = %s FOR UPDATE"
        await other.execute(statement.encode(), [stage.name, id])
        yield other
        await other.rollback()


@asynccontextmanager
async def in_line_at_postgres(stage: Stage) -> AsyncGenerator[Made]:
    """The only connection is in use, by a call that waits for a row; the one that is cancelled waits for its place."""
    await stage.eye.enqueue("mine", job_id="mine")
    [job] = await stage.eye.claim()
    async with held(stage, "mine") as other:
        before = asyncio.ensure_future(stage.queue.ack(job))
        await eventually(stage.ground.is_blocked, "the call before waits for the row")

        async def call() -> Any:
            letting_go.append(asyncio.ensure_future(other.rollback()))
            return await stage.queue.counts()

        letting_go: list[asyncio.Future[None]] = []
        yield call
        await asyncio.gather(*letting_go)
        await before
    assert await stage.states("mine") == [JobState.SUCCEEDED]
    assert not stage.is_done or stage.result == await stage.eye.counts()


@asynccontextmanager
async def ack_of_a_row_that_is_held(stage: Stage) -> AsyncGenerator[Made]:
    """The server is still at work on the statement when its caller goes: it is called off there too."""
    await stage.eye.enqueue("mine", job_id="mine")
    [job] = await stage.eye.claim()
    async with held(stage, "mine") as other:
        letting_go: list[asyncio.Future[None]] = []
        is_free = asyncio.Event()

        async def let_go() -> None:
            await eventually(stage.ground.is_blocked, "the call waits for the row")
            is_free.set()
            await other.rollback()

        async def call() -> None:
            letting_go.append(asyncio.ensure_future(let_go()))
            await stage.queue.ack(job)

        yield call
        was_free = is_free.is_set()
        for task in letting_go:
            if not was_free:
                task.cancel()
        await asyncio.gather(*letting_go, return_exceptions=True)
        await eventually(lambda: not stage.ground.is_blocked(), "nobody waits for the row")
    [state] = await stage.states("mine")
    assert state is JobState.IN_FLIGHT or was_free, "it was called off"
    assert state is JobState.SUCCEEDED or not stage.is_done


@on_postgres
@each(in_line_at_postgres, ack_of_a_row_that_is_held)
@each_how
async def test_a_call_that_is_cancelled_while_others_have_what_it_needs_ends(
    backend: Backend, verb: Verb, how: How
) -> None:
    async with ground_on(backend) as ground:
        size = 1 if verb is in_line_at_postgres else 8
        await cancelled_everywhere(scene_of(ground, verb, pool_size=size), how, at_least=1)


@on_postgres
async def test_a_connection_that_was_left_in_the_middle_of_a_statement_is_not_used_again(backend: Backend) -> None:
    """Cancelled twice, the call does not wait until the server has called the statement off."""
    async with ground_on(backend) as ground, nothing_left(ground.connections):
        stage = Stage(ground, ground.subject(pool_size=1))
        await stage.eye.enqueue("mine", job_id="mine")
        [job] = await stage.eye.claim()
        async with held(stage, "mine"):
            acking = asyncio.ensure_future(stage.queue.ack(job))
            await eventually(ground.is_blocked, "the call waits for the row")
            for _ in range(2):
                acking.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await acking
            await stage.works_on()
        await stage.store.aclose()


# --- the caller's own transaction -----------------------------------------------------------------------------------


@asynccontextmanager
async def outbox(stage: Stage) -> AsyncGenerator[Made]:
    """What was added goes with the caller's transaction; the connection is as usable as the driver leaves it."""
    theirs = await psycopg.AsyncConnection.connect(stage.ground.backend.where[0])
    async with theirs:
        await theirs.execute("SELECT 1")
        yield lambda: stage.queue.enqueue("mine", job_id="mine", connection=theirs)
        if stage.is_done:
            await theirs.commit()
        elif not theirs.closed:
            await theirs.rollback()
            await theirs.execute("SELECT 1")
    assert (await stage.eye.get("mine") is not None) == stage.is_done


@asynccontextmanager
async def plain_outbox(stage: Stage) -> AsyncGenerator[Made]:
    """When the call has ended, no thread uses the connection any more."""
    with psycopg.connect(stage.ground.backend.where[0]) as theirs:
        theirs.execute("SELECT 1")
        yield lambda: stage.queue.enqueue("mine", job_id="mine", connection=theirs)
        assert theirs.info.transaction_status is not pq.TransactionStatus.ACTIVE
        if stage.is_done:
            theirs.commit()
        else:
            theirs.rollback()
            for _ in range(10):
                theirs.execute("SELECT 1")
                await asyncio.sleep(0)
            theirs.commit()
    assert (await stage.eye.get("mine") is not None) == stage.is_done


@on_postgres
@each(outbox)
@each_how
async def test_an_enqueue_in_a_transaction_that_is_cancelled_is_the_callers_to_undo(
    backend: Backend, verb: Verb, how: How
) -> None:
    async with ground_on(backend) as ground:
        await cancelled_everywhere(scene_of(ground, verb), how, at_least=3)


@on_postgres
@each_how
async def test_an_enqueue_over_a_plain_connection_that_is_cancelled_does_not_go_on_behind_its_caller(
    backend: Backend, how: How
) -> None:
    await _idle_threads(2)
    async with ground_on(backend) as ground:
        await cancelled_everywhere(scene_of(ground, plain_outbox), how, at_least=1)


@on_postgres
@pytest.mark.parametrize("by", ["task", "scope"])
async def test_an_enqueue_over_a_plain_connection_that_waits_for_others_can_be_cancelled(
    backend: Backend, by: str
) -> None:
    """Somebody else has the ID, and has not decided: the statement is called off, and no thread has the connection."""
    await _idle_threads(2)
    dsn = f"{backend.where[0]}&application_name=subject"
    async with ground_on(backend) as ground, nothing_left(ground.connections):
        stage = Stage(ground, ground.subject())
        with psycopg.connect(dsn) as theirs, psycopg.connect(backend.where[0]) as other:
            await stage.eye.enqueue("other", job_id="mine", connection=other)
            with anyio.CancelScope() as scope:
                task = asyncio.current_task()
                assert task is not None
                end = task.cancel if by == "task" else scope.cancel
                ending = asyncio.ensure_future(_when(ground.is_blocked, end))
                with pytest.raises(asyncio.CancelledError):
                    await stage.queue.enqueue("mine", job_id="mine", connection=theirs)
                task.uncancel()
            await ending
            assert theirs.info.transaction_status is not pq.TransactionStatus.ACTIVE
            theirs.rollback()
            theirs.execute("SELECT 1")
            other.rollback()
        assert await stage.eye.get("mine") is None


async def _when(condition: Callable[[], bool], act: Callable[[], object]) -> None:
    await eventually(condition, "the call waits for others")
    act()


async def _idle_threads(count: int) -> None:
    """Make so many of those threads that are kept for later."""
    meeting = threading.Barrier(count)
    await asyncio.gather(*(anyio.to_thread.run_sync(meeting.wait, LONG) for _ in range(count)))
