"""The one runner of handlers: outcomes, contexts, limits, and ends that are not the handler's."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from conquiet.errors import ConfigError
from conquiet.kit import runners
from conquiet.kit.runners import Handler, Runners
from tests.rigs.waiting import LONG, eventually, turns


class Stopped(Exception):
    """What a call is told to have ended by."""


class Office:
    """Runners of numbers, and all that was heard of them."""

    def __init__(self, handler: Callable[[int], Any], **options: Any) -> None:
        self.outcomes: dict[int, tuple[Any, BaseException | None]] = {}
        self.withdrawn: list[int] = []
        self.lost: set[int] = set()
        given: dict[str, Any] = {"limit": 10, "finished": self.finished, **options}
        self.runners = Runners(
            Handler[int](handler, "number"),
            key=lambda number: number,
            withdrawn=self.withdrawn.append,
            is_held=lambda number: number not in self.lost,
            stopped=Stopped,
            **given,
        )

    def finished(self, number: int, result: Any, error: BaseException | None, seconds: float) -> None:
        assert number not in self.outcomes, "told twice"
        assert seconds >= 0
        self.outcomes[number] = (result, error)

    async def heard(self, count: int) -> None:
        await eventually(lambda: len(self.outcomes) == count, f"{count} outcomes")


@asynccontextmanager
async def office(handler: Callable[[int], Any], **options: Any) -> AsyncIterator[Office]:
    made = Office(handler, **options)
    try:
        yield made
    finally:
        await made.runners.aclose()


class Panic(BaseException):
    """What no handler should raise."""


# --- outcomes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("x"), Panic("x"), SystemExit(1), GeneratorExit(), StopAsyncIteration()])
@pytest.mark.parametrize("waits", [False, True])
async def test_whatever_an_async_handler_raises_is_an_outcome(error: BaseException, waits: bool) -> None:
    async def handler(number: int) -> None:
        if waits:
            await asyncio.sleep(0)
        raise error

    async with office(handler) as here:
        here.runners.begin([1, 2])
        await here.heard(2)
        assert here.outcomes == {1: (None, error), 2: (None, error)}
        assert here.runners.free == 10


async def test_a_handler_that_is_cancelled_by_itself_has_failed_and_no_more() -> None:
    async def handler(number: int) -> int:
        if number == 1:
            await asyncio.wait_for(asyncio.Event().wait(), 0.001)
        raise asyncio.CancelledError

    async with office(handler, limit=1) as here:
        here.runners.begin([1, 2])
        await here.heard(2)
        assert [type(error) for _, error in here.outcomes.values()] == [TimeoutError, asyncio.CancelledError]


@pytest.mark.parametrize("end", [None, ValueError("no")])
async def test_a_call_that_swallowed_its_cancellation_is_not_held_against_the_next(end: Exception | None) -> None:
    async def handler(number: int) -> None:
        if number == 2:
            raise asyncio.CancelledError
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        if end is not None:
            raise end

    async with office(handler, limit=1, timeout=0.01) as here:
        here.runners.begin([1, 2])
        await here.heard(2)
        assert [type(error) for _, error in here.outcomes.values()] == [TimeoutError, asyncio.CancelledError]


async def test_what_ended_one_call_is_not_held_against_the_next() -> None:
    """A task that was cancelled for one item runs the next: that one's cancellation is again its own failure."""

    async def handler(number: int) -> None:
        if number == 1:
            await asyncio.Event().wait()
        raise asyncio.CancelledError

    async with office(handler, limit=1, timeout=0.01) as here:
        here.runners.begin([1, 2])
        await here.heard(2)
        assert [type(error) for _, error in here.outcomes.values()] == [TimeoutError, asyncio.CancelledError]


@pytest.mark.parametrize("error", [ValueError("x"), Panic("x"), SystemExit(1), StopIteration(1)])
async def test_what_a_plain_handler_raises_is_an_outcome(error: BaseException) -> None:
    def handler(number: int) -> None:
        raise error

    async with office(handler) as here:
        here.runners.begin([1])
        await here.heard(1)
        [(_, found)] = here.outcomes.values()
        assert error in (found, found and found.__cause__) or type(error).__name__ in str(found)


async def test_what_handlers_return_is_told_whether_they_wait_or_not() -> None:
    async def handler(number: int) -> int:
        if number % 2:
            await turns()
        return number * 10

    async with office(handler, limit=3) as here:
        here.runners.begin(range(20))
        await here.heard(20)
        assert here.outcomes == {number: (number * 10, None) for number in range(20)}


async def test_an_awaitable_that_a_plain_function_gives_is_awaited() -> None:
    async def later(number: int) -> int:
        await asyncio.sleep(0)
        return number

    async with office(lambda number: later(number)) as here:
        here.runners.begin([7])
        await here.heard(1)
        assert here.outcomes == {7: (7, None)}


async def test_an_outcome_that_cannot_be_judged_is_a_failure() -> None:
    heard: list[BaseException | None] = []

    def finished(number: int, result: Any, error: BaseException | None, seconds: float) -> None:
        heard.append(error)
        if error is None:
            raise ZeroDivisionError

    async def handler(number: int) -> None: ...

    async with office(handler, finished=finished) as here:
        here.runners.begin([1])
        await eventually(lambda: len(heard) == 2, "it is told again")
        assert heard[0] is None
        assert isinstance(heard[1], RuntimeError)


def test_a_handler_that_cannot_be_called_so_is_refused_when_it_is_given() -> None:
    with pytest.raises(ConfigError, match="number"):
        Handler[int](lambda: None, "number")


# --- contexts ---------------------------------------------------------------------------------------------------


async def test_each_call_has_context_variables_of_its_own() -> None:
    tenant: contextvars.ContextVar[int] = contextvars.ContextVar("tenant", default=0)
    tenant.set(100)
    seen: list[tuple[int, int, int]] = []

    async def handler(number: int) -> None:
        before = tenant.get()
        tenant.set(number)
        await turns(number % 3)
        during = tenant.get()
        await asyncio.get_running_loop().create_task(asyncio.sleep(0))
        seen.append((before, during, tenant.get()))

    async with office(handler, limit=4) as here:
        here.runners.begin(range(1, 13))
        await here.heard(12)
    assert sorted(seen) == [(100, number, number) for number in range(1, 13)]


async def test_a_cancelled_call_cleans_up_in_its_own_context() -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="")
    found: list[str] = []

    async def handler(number: int) -> None:
        token = name.set(f"call {number}")
        try:
            await asyncio.Event().wait()
        finally:
            found.append(name.get())
            await asyncio.sleep(0)
            name.reset(token)  # raises in any other context

    async with office(handler, timeout=0.01) as here:
        here.runners.begin([1])
        await here.heard(1)
    assert found == ["call 1"]
    [(_, error)] = here.outcomes.values()
    assert isinstance(error, TimeoutError)


# --- places -----------------------------------------------------------------------------------------------------


async def test_no_more_run_at_a_time_than_the_limit_says() -> None:
    inside = most = 0
    gate = asyncio.Event()

    async def handler(number: int) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await gate.wait()
        inside -= 1

    async with office(handler, limit=3) as here:
        here.runners.begin(range(10))
        await eventually(lambda: inside == 3, "three are inside")
        assert (here.runners.busy, here.runners.free) == (3, -7)
        assert here.runners.withdraw() == list(range(3, 10))
        gate.set()
        await here.heard(3)
    assert most == 3


async def test_an_item_that_is_lost_before_its_call_is_passed_over() -> None:
    async def handler(number: int) -> int:
        return number

    async with office(handler) as here:
        here.lost.add(2)
        here.runners.begin([1, 2, 3])
        await here.heard(2)
        assert set(here.outcomes) == {1, 3}
        assert here.runners.free == 10


async def test_a_lost_item_has_no_outcome_and_its_call_is_cancelled_once() -> None:
    cancelled = 0
    begun, cleaned = asyncio.Event(), asyncio.Event()

    async def handler(number: int) -> None:
        nonlocal cancelled
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled += 1
            await turns()
            cleaned.set()
            raise

    async with office(handler) as here:
        here.runners.begin([1])
        await begun.wait()
        assert here.runners.lose(1) is not None
        assert here.runners.lose(1) is None
        await asyncio.wait_for(here.runners.ended([1]), LONG)
        assert cleaned.is_set()
    assert (cancelled, here.outcomes) == (1, {})


# --- threads ----------------------------------------------------------------------------------------------------


async def test_a_call_that_waits_for_a_thread_is_withdrawn_and_never_begins() -> None:
    gate, begun = threading.Event(), list[int]()

    def handler(number: int) -> None:
        begun.append(number)
        gate.wait(LONG)

    async with office(handler, threads=1) as here:
        here.runners.begin([1, 2])
        await eventually(lambda: begun == [1] and here.runners.busy == 2, "one runs, one waits")
        draining = asyncio.create_task(here.runners.drain(0))
        await eventually(lambda: here.withdrawn == [2], "it is called off")
        gate.set()
        await draining
        await eventually(lambda: not here.runners.busy, "the thread ends")
    assert begun == [1]


async def test_a_thread_keeps_its_place_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "_GRACE", 0.05)
    gate = threading.Event()

    def handler(number: int) -> None:
        gate.wait(LONG)

    async with office(handler, timeout=1.0, limit=2) as here:
        here.runners.begin([1])
        await here.heard(1)
        assert (here.runners.stuck, here.runners.free) == (1, 1)
        gate.set()
        await eventually(lambda: here.runners.free == 2, "the place is free")


# --- ends -------------------------------------------------------------------------------------------------------


async def test_what_does_not_end_in_time_is_cancelled_and_told_so() -> None:
    async def handler(number: int) -> None:
        await asyncio.Event().wait()

    async with office(handler) as here:
        here.runners.begin([1, 2])
        await eventually(lambda: here.runners.busy == 2, "both run")
        await asyncio.wait_for(here.runners.drain(0), LONG)
        assert [type(error) for _, error in here.outcomes.values()] == [Stopped, Stopped]


async def test_a_loop_that_cancels_all_its_tasks_says_nothing_of_the_item() -> None:
    async def handler(number: int) -> None:
        await asyncio.Event().wait()

    async with office(handler) as here:
        here.runners.begin([1])
        await eventually(lambda: here.runners.busy == 1, "it runs")
        [task] = here.runners._background._tasks
        task.cancel()
        await here.heard(1)
        [(_, error)] = here.outcomes.values()
        assert isinstance(error, Stopped)
        here.runners.begin([2])
        await eventually(lambda: here.runners.busy == 1, "it goes on")


async def test_a_call_that_cancels_its_own_task_does_not_cancel_the_next() -> None:
    async def handler(number: int) -> None:
        if number == 1:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        else:
            await turns(2)

    async with office(handler) as here:
        here.runners.begin([1, 2, 3])
        await here.heard(3)
        assert [error for _, error in here.outcomes.values()] == [None, None, None]


async def test_a_call_that_waits_sees_no_variable_of_the_one_before_it_in_its_task() -> None:
    told = contextvars.ContextVar("told", default=0)
    seen: dict[int, tuple[int, asyncio.Task[Any] | None]] = {}

    async def handler(number: int) -> None:
        seen[number] = told.get(), asyncio.current_task()
        told.set(number)
        await asyncio.sleep(0.001)
        assert told.get() == number

    async with office(handler, limit=1) as here:
        here.runners.begin([1])  # from now on it is known to wait
        await here.heard(1)
        here.runners.begin(range(2, 7))
        await here.heard(6)
    assert [found for found, _ in seen.values()] == [0] * 6
    assert len({task for _, task in seen.values()}) < 6, "some had a task in common"


def test_a_loop_that_is_gone_tells_nobody_anything() -> None:
    heard = list[int]()

    async def handler(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            heard.append(number)

    made: list[Office] = []

    async def begin() -> None:
        made.append(Office(handler))
        made[0].runners.begin([1])
        await eventually(lambda: made[0].runners.busy == 1, "it runs")
        for task in list(made[0].runners._background._tasks):  # each leaves the set when it is over
            task.get_coro().close()

    asyncio.run(begin())
    assert heard == [1]
    assert made[0].outcomes == {}


def test_an_interrupt_in_a_handler_is_an_outcome_and_ends_the_program() -> None:
    made: list[Office] = []
    tasks: list[asyncio.Task[Any]] = []

    async def handler(number: int) -> None:
        raise KeyboardInterrupt

    async def begin() -> None:
        made.append(Office(handler))
        made[0].runners.begin([1])
        tasks.extend(made[0].runners._background._tasks)
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(begin())
    [(_, error)] = made[0].outcomes.values()
    assert [task.exception() for task in tasks] == [error], "asked for here, lest another test is told of it"
    assert isinstance(error, KeyboardInterrupt)
