"""A transaction that was begun is committed or rolled back, however often and by whom the run is cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from conquiet import QueueConsumer, QueueMessage, RedisStreamsQueue
from tests.rigs.asking import pending
from tests.rigs.waiting import LONG, eventually

pytestmark = pytest.mark.any_server


class Tx:
    """Its rollback takes as long as the test wants."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.is_rolling_back = asyncio.Event()
        self.may_end = asyncio.Event()
        self.is_rolled_back = False

    async def begin(self) -> Tx:
        return self

    async def commit(self) -> None:
        raise AssertionError("nothing is to be committed")

    async def rollback(self) -> None:
        self.is_rolling_back.set()
        await self.may_end.wait()
        await asyncio.sleep(0)
        self.is_rolled_back = True

    async def handle(self, message: QueueMessage, tx: Tx) -> None:
        self.entered.set()
        await asyncio.Event().wait()


@pytest.fixture
async def sent(queue: RedisStreamsQueue) -> str:
    return await queue.enqueue({"n": 1})


async def cancel_twice(running: asyncio.Task[None], tx: Tx) -> None:
    """Once while the handler runs, and again, as those do who lose patience, while its work is undone."""
    await tx.entered.wait()
    running.cancel()
    await tx.is_rolling_back.wait()
    for _ in range(3):
        running.cancel()
        await asyncio.sleep(0)


async def test_a_second_cancellation_does_not_tear_the_rollback_off(
    url: str, queue: RedisStreamsQueue, sent: str
) -> None:
    tx = Tx()
    async with asyncio.timeout(LONG):
        running = asyncio.create_task(QueueConsumer(queue).run(handler=tx.handle, db_factory=tx))
        await cancel_twice(running, tx)
        assert not running.done()
        tx.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert tx.is_rolled_back
    assert await pending(url, queue.config.stream_key, queue.config.consumer_group) == [sent]


async def test_nor_does_the_cancellation_of_all_tasks(queue: RedisStreamsQueue, sent: str) -> None:
    tx = Tx()
    async with asyncio.timeout(LONG):
        running = asyncio.create_task(QueueConsumer(queue).run(handler=tx.handle, db_factory=tx))
        await cancel_twice(running, tx)
        tx.is_rolling_back.clear()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await tx.is_rolling_back.wait()
        tx.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert tx.is_rolled_back


async def test_a_scope_that_is_cancelled_lets_the_rollback_end(queue: RedisStreamsQueue, sent: str) -> None:
    """The cancellation of an anyio scope comes again at each ``await``."""
    tx = Tx()
    tx.may_end.set()
    with anyio.fail_after(LONG):
        async with anyio.create_task_group() as group:
            group.start_soon(_run, queue, tx)
            await tx.entered.wait()
            group.cancel_scope.cancel()
    assert tx.is_rolled_back


async def _run(queue: RedisStreamsQueue, tx: Tx) -> None:
    await QueueConsumer(queue).run(handler=tx.handle, db_factory=tx)


async def test_a_run_that_is_cancelled_while_it_undoes_a_failure_is_cancelled(
    queue: RedisStreamsQueue, sent: str
) -> None:
    tx = Tx()

    async def fail(message: QueueMessage, tx: Tx) -> None:
        raise ValueError("no good")

    async with asyncio.timeout(LONG):
        running = asyncio.create_task(QueueConsumer(queue).run(handler=fail, db_factory=tx))
        await tx.is_rolling_back.wait()
        running.cancel()
        await asyncio.sleep(0)
        tx.may_end.set()
        with pytest.raises(asyncio.CancelledError) as caught:
            await running
    assert tx.is_rolled_back
    assert isinstance(caught.value.__context__, ValueError)


async def test_a_rollback_that_never_ends_is_given_up(
    queue: RedisStreamsQueue, sent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conquiet.queue.transaction._ROLLBACK", 0.05)
    tx = Tx()

    async def fail(message: QueueMessage, tx: Tx) -> None:
        raise ValueError("no good")

    with pytest.raises(ValueError, match="no good") as caught:
        await asyncio.wait_for(QueueConsumer(queue).run(handler=fail, db_factory=tx), LONG)
    assert "given up" in caught.value.__notes__[0]
    assert not tx.is_rolled_back


async def test_a_thread_that_does_not_end_holds_nobody_up_who_insists(
    queue: RedisStreamsQueue, sent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conquiet.queue.transaction._ROLLBACK", 0.05)
    entered, released = threading.Event(), threading.Event()
    steps: list[str] = []

    class Plain:
        def begin(self) -> Plain:
            return self

        def commit(self) -> None:
            steps.append("commit")

        def rollback(self) -> None:
            steps.append("rollback")

    def handle(message: QueueMessage, tx: Plain) -> None:
        entered.set()
        assert released.wait(LONG)

    async with asyncio.timeout(LONG):
        running = asyncio.create_task(QueueConsumer(queue).run(handler=handle, db_factory=Plain()))
        await eventually(entered.is_set, "the handler runs")
        running.cancel()
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert steps == []
        released.set()
        await eventually(lambda: steps == ["rollback"], "the thread rolls back behind the handler")


@pytest.mark.parametrize("when", ["begin", "handle"])
async def test_what_a_thread_has_begun_is_rolled_back_there(
    url: str, queue: RedisStreamsQueue, sent: str, when: str
) -> None:
    entered, released = threading.Event(), threading.Event()
    steps: list[str] = []

    def step(name: str) -> Callable[..., Any]:
        def take(*args: object) -> object:
            if name == when:
                entered.set()
                assert released.wait(LONG)
            steps.append(name)
            return plain

        return take

    class Plain:
        begin, commit, rollback = (staticmethod(step(name)) for name in ("begin", "commit", "rollback"))

    plain = Plain()
    async with asyncio.timeout(LONG):
        running = asyncio.create_task(QueueConsumer(queue).run(handler=step("handle"), db_factory=plain))
        await eventually(entered.is_set, "the step is taken")
        running.cancel()
        await asyncio.sleep(0)
        running.cancel()
        released.set()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert steps == (["begin", "rollback"] if when == "begin" else ["begin", "handle", "rollback"])
    assert await pending(url, queue.config.stream_key, queue.config.consumer_group) == [sent]
