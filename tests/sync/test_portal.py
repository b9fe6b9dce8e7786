"""From any thread to the private loop and back."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Any, Self

import pytest

import conquiet
from conquiet.sync import (
    ConfigError,
    ConquietError,
    EmbeddedRedis,
    QueueConfig,
    QueueConsumer,
    QueueError,
    RedisStreamsQueue,
)
from conquiet.sync._bridge import Facade, items
from conquiet.sync._portal import call, on_caller
from tests.sync.looking import LONG, Eye
from tests.sync.programs import run
from tests.sync.scripts import threads

pytestmark = pytest.mark.any_server

THREADS = 8
EACH = 500


async def echo(value: int) -> int:
    await asyncio.sleep(0)
    return value


# --- threads --------------------------------------------------------------------------------------------------------


def test_many_threads_call_at_once() -> None:
    start = threading.Barrier(THREADS)

    def work(thread: int) -> list[int]:
        start.wait(LONG)
        return [call(echo, thread * EACH + n) for n in range(EACH)]

    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(work, range(THREADS)))
    assert results == [list(range(thread * EACH, (thread + 1) * EACH)) for thread in range(THREADS)]


def test_many_threads_share_a_queue(queue: RedisStreamsQueue, eye: Eye, scale: float) -> None:
    each = max(10, int(EACH * scale))
    start = threading.Barrier(THREADS)

    def work(thread: int) -> dict[str, Any]:
        start.wait(LONG)
        payloads = [{"thread": thread, "n": n} for n in range(each)]
        return {queue.enqueue(payload): payload for payload in payloads}

    with ThreadPoolExecutor(THREADS) as pool:
        written = list(pool.map(work, range(THREADS)))
    assert {id: payload for part in written for id, payload in part.items()} == eye.payloads(queue.config.stream_key)
    assert sum(map(len, written)) == THREADS * each


def test_a_blocked_read_holds_up_nobody(queue: RedisStreamsQueue) -> None:
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(queue.read, block_ms=30_000)
        id = queue.enqueue({"n": 1})
        assert [message.id for message in reading.result(LONG)] == [id]


@pytest.mark.slow
def test_threads_that_come_first_together_start_one_loop() -> None:
    assert run(threads.first_calls_at_once) == ["['conquiet-sync'] True"]


class Slow:
    """Takes so long to build that a second thread would come meanwhile."""

    built: list[int] = []  # noqa: RUF012
    second = threading.Event()

    def __init__(self) -> None:
        self.built.append(threading.get_ident())
        if len(self.built) > 1:
            self.second.set()
        self.second.wait(0.2)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class SlowFacade(Facade[Slow]):
    """Made up."""

    def __init__(self) -> None:
        super().__init__(Slow)


def test_threads_that_come_first_together_build_one_core() -> None:
    """Or one would stop a consumer that another does not iterate over."""
    facade: SlowFacade = pickle.loads(pickle.dumps(SlowFacade()))
    Slow.built.clear()
    Slow.second.clear()
    start = threading.Barrier(2)

    def core() -> Slow:
        start.wait(LONG)
        return facade._core()

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(core), pool.submit(core)
        assert first.result(LONG) is second.result(LONG)
    assert len(Slow.built) == 1


# --- what goes through ----------------------------------------------------------------------------------------------


def test_an_exception_comes_through_as_it_is() -> None:
    raised = LookupError("this one")

    async def fail() -> None:
        await asyncio.sleep(0)
        raise raised

    with pytest.raises(LookupError) as caught:
        call(fail)
    assert caught.value is raised
    assert [frame.name for frame in traceback.extract_tb(raised.__traceback__)][-1] == "fail"


def test_an_error_of_the_server_comes_through_with_its_cause(queue: RedisStreamsQueue, eye: Eye) -> None:
    eye.ask("DEL", queue.config.stream_key)
    with pytest.raises(QueueError, match="NOGROUP") as caught:
        queue.read(block_ms=100)
    assert caught.value.__cause__ is not None
    assert queue.enqueue({"n": 1})


@pytest.mark.parametrize(
    "error", [StopAsyncIteration("a"), KeyError("k"), TimeoutError(), ExceptionGroup("g", [OSError()])]
)
def test_no_exception_is_taken_for_something_else(error: Exception) -> None:
    async def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        call(fail)
    assert caught.value is error


def test_a_coroutine_that_is_cancelled_from_inside_does_not_hang_its_caller() -> None:
    async def give_up() -> None:
        raise asyncio.CancelledError

    with pytest.raises(ConquietError):
        call(give_up)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda queue: queue.enqueue(),
        lambda queue: queue.enqueue({}, {}),
        lambda queue: queue.enqueue(paylod={}),
        lambda queue: queue.enqueue(function={}),
        lambda queue: queue.read(1, 2, 3),
        lambda queue: queue.read(blok_ms=1),
        lambda queue: queue.close(True),
    ],
)
def test_bad_arguments_are_a_type_error(queue: RedisStreamsQueue, wrong: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError):
        wrong(queue)


def test_bad_values_are_refused_as_in_the_core(queue: RedisStreamsQueue) -> None:
    with pytest.raises(ConfigError, match="block_ms"):
        queue.read(block_ms=0)
    with pytest.raises(ConfigError, match="payload"):
        queue.enqueue({"a": float("nan")})


def test_a_bad_recipe_is_refused_at_once(url: str, config: QueueConfig) -> None:
    with pytest.raises(ConfigError, match="config"):
        RedisStreamsQueue(url, "orders")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="URL"):
        RedisStreamsQueue(42, config)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="URL"):
        RedisStreamsQueue.connect("localhost:6379", config)
    with pytest.raises(ConfigError, match="port"):
        EmbeddedRedis(port=0)


def test_a_consumer_takes_the_queue_of_its_own_api(url: str, config: QueueConfig) -> None:
    with pytest.raises(ConfigError, match=r"conquiet\.sync\.RedisStreamsQueue"):
        QueueConsumer(conquiet.RedisStreamsQueue(url, config))  # type: ignore[arg-type]
    many = RedisStreamsQueue(url, QueueConfig("s", "g", "c", max_read_count=2))
    with pytest.raises(ConfigError, match="max_read_count"):
        QueueConsumer(many)


def test_context_variables_reach_the_coroutine_and_its_tasks() -> None:
    trace: ContextVar[str] = ContextVar("trace")

    async def see() -> list[str]:
        async with asyncio.TaskGroup() as group:
            child = group.create_task(asyncio.sleep(0, trace.get()))
        trace.set("changed inside")
        return [trace.get(), await child]

    trace.set("abc")
    assert call(see) == ["changed inside", "abc"]
    assert trace.get() == "abc"


# --- where it may be called -----------------------------------------------------------------------------------------


def test_the_private_loop_may_not_wait_for_itself(queue: RedisStreamsQueue) -> None:
    async def inside() -> None:
        queue.enqueue({"n": 1})

    with pytest.raises(ConquietError, match="asynchronous API"):
        call(inside)
    assert queue.enqueue({"n": 2})


def test_it_works_inside_a_running_loop(url: str, config: QueueConfig) -> None:
    """As in a notebook."""

    async def cell() -> list[Any]:
        with RedisStreamsQueue.connect(url, config) as queue, QueueConsumer(queue) as consumer:
            queue.enqueue_many({"n": n} for n in range(3))
            seen = []
            for message in consumer.iter_messages():
                consumer.ack(message)
                seen.append(message.payload["n"])
                if len(seen) == 3:
                    consumer.stop()
            return seen

    assert asyncio.run(cell()) == [0, 1, 2]


async def test_both_apis_work_side_by_side(url: str, config: QueueConfig) -> None:
    async with conquiet.RedisStreamsQueue.connect(url, config) as queue:
        with RedisStreamsQueue.connect(url, config) as plain:
            ids = [await queue.enqueue({"n": 1}), plain.enqueue({"n": 2})]
            messages = [*plain.read(count=1), *await queue.read(count=1)]
            assert [message.id for message in messages] == ids
            plain.ack(*messages)
            assert (await queue.backlog_stats()).pending == 0


# --- back on the calling thread -------------------------------------------------------------------------------------


def test_a_handler_runs_on_the_calling_thread_also_from_child_tasks() -> None:
    async def work() -> list[int]:
        where = on_caller(threading.get_ident)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(where()) for _ in range(3)]
        return [await where(), *(task.result() for task in tasks)]

    def elsewhere() -> tuple[int, list[int]]:
        return threading.get_ident(), call(work)

    assert call(work) == [threading.get_ident()] * 4
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(elsewhere) for _ in range(4)]:
            thread, ran_on = future.result(LONG)
            assert ran_on == [thread] * 4


def test_a_handler_sees_the_context_of_its_caller() -> None:
    trace: ContextVar[str] = ContextVar("trace", default="none")
    trace.set("abc")
    assert call(on_caller(trace.get)) == "abc"


def test_a_handler_may_call_again() -> None:
    def handler(value: int) -> int:
        return call(echo, value) + call(on_caller(lambda: 10))

    assert call(on_caller(handler), 1) == 11


def test_what_a_handler_raises_reaches_the_coroutine_and_the_caller() -> None:
    raised = LookupError("this one")
    seen: list[Exception] = []

    def handler() -> None:
        raise raised

    async def work() -> None:
        try:
            await on_caller(handler)()
        except LookupError as error:
            seen.append(error)
            raise

    with pytest.raises(LookupError) as caught:
        call(work)
    assert seen == [raised]
    assert caught.value is raised
    assert "handler" in [frame.name for frame in traceback.extract_tb(raised.__traceback__)]


def test_a_handler_may_raise_stop_iteration() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        call(on_caller(partial(next, iter(()))))


def test_an_iterator_is_closed_by_break_and_by_an_error() -> None:
    ended: list[str] = []

    async def count() -> Any:
        try:
            for n in range(10):
                yield n
        finally:
            await asyncio.sleep(0)
            ended.append(threading.current_thread().name)

    for n in items(count()):
        if n == 2:
            break
    assert ended == ["conquiet-sync"]
    with pytest.raises(ZeroDivisionError):
        max(1 / n for n in items(count()))
    assert list(items(count())) == list(range(10))
    assert len(ended) == 3


@pytest.mark.slow
def test_an_iterator_may_be_collected_on_the_loop(queue: RedisStreamsQueue) -> None:
    """Where it cannot wait for its own closing."""
    queue.enqueue_many({"n": n} for n in range(2))
    messages = QueueConsumer(queue).iter_messages()
    next(messages)
    held: list[Any] = [messages]
    held.append(held)

    async def collect() -> None:
        gc.collect()

    call(collect)
    del messages, held
    call(collect)
    assert [message.payload for message in queue.read()] == [{"n": 1}]
