"""Time that goes by itself, and time that is skipped."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
from collections.abc import Awaitable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from conquiet import ConfigError
from conquiet.kit.clock import SYSTEM_CLOCK, Clock, ManualClock
from tests.rigs.waiting import eventually

HOUR = 3_600.0
clocks = pytest.mark.parametrize("clock", [SYSTEM_CLOCK, ManualClock()], ids=["system", "manual"])


async def soon(work: Awaitable[Any]) -> Any:
    """What comes of ``work``, which must not take the hour that it asks for."""
    return await asyncio.wait_for(work, 20)


async def asleep(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    task = asyncio.create_task(work)
    await turns()
    assert not task.done()
    return task


async def turns() -> None:
    """Let the loop do all that it can do without waiting."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def faults() -> list[dict[str, Any]]:
    """What went wrong in callbacks of the loop, which nobody else hears of."""
    found: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context))
    return found


# --- both clocks -------------------------------------------------------------------------------------


@clocks
def test_a_clock_that_nobody_moves_is_the_time_as_it_is(clock: Clock) -> None:
    assert clock.offset_ms == 0
    assert time.monotonic() <= clock.monotonic() <= time.monotonic()


@clocks
async def test_sleepers_end_when_their_time_is_up(clock: Clock) -> None:
    before = time.monotonic()
    await clock.sleep(0.02)
    assert time.monotonic() - before >= 0.019


@clocks
@pytest.mark.parametrize("seconds", [0, 0.0, -1])
async def test_sleep_of_no_time_lets_others_run(clock: Clock, seconds: float) -> None:
    ran = asyncio.Event()
    asyncio.get_running_loop().call_soon(ran.set)
    await soon(clock.sleep(seconds))
    assert ran.is_set()


@clocks
@pytest.mark.parametrize("seconds", [HOUR, 0, -1])
async def test_an_event_that_is_set_needs_no_wait(clock: Clock, seconds: float) -> None:
    event = asyncio.Event()
    event.set()
    assert await soon(clock.wait(event, seconds)) is True


@clocks
async def test_an_event_ends_the_wait(clock: Clock) -> None:
    event = asyncio.Event()
    task = await asleep(clock.wait(event, HOUR))
    event.set()
    assert await soon(task) is True


@clocks
@pytest.mark.parametrize("seconds", [0.02, 0, -1])
async def test_a_wait_for_nothing_ends_when_its_time_is_up(clock: Clock, seconds: float) -> None:
    event = asyncio.Event()
    assert await soon(clock.wait(event, seconds)) is False
    assert not event.is_set()


@clocks
async def test_an_event_set_at_the_last_moment_counts(clock: Clock) -> None:
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    waiting = asyncio.create_task(clock.wait(event, 0.02))
    await asyncio.sleep(0)
    # The deadline is past when the loop next looks, and so is the event.
    loop.call_soon(time.sleep, 0.03)
    loop.call_soon(loop.call_later, 0, event.set)
    assert await soon(waiting) is True


@clocks
async def test_a_cancelled_wait_is_cancelled(clock: Clock) -> None:
    task = await asleep(clock.wait(asyncio.Event(), HOUR))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(task)


# --- the manual clock --------------------------------------------------------------------------------


def test_moves_add_up() -> None:
    clock = ManualClock()
    before = clock.monotonic()
    for _ in range(10):
        clock.advance(0.1)
    clock.advance(HOUR)
    assert clock.offset_ms == 3_601_000
    assert 3_601 <= clock.monotonic() - before <= 3_621


def test_steps_of_less_than_a_millisecond_are_not_lost() -> None:
    clock = ManualClock()
    for _ in range(10_000):
        clock.advance(0.0001)
    assert clock.offset_ms == 1_000


@pytest.mark.parametrize("seconds", [-1, -0.001, math.nan, math.inf, True, "1", None], ids=repr)
def test_the_clock_never_goes_back(seconds: Any) -> None:
    clock = ManualClock()
    with pytest.raises(ConfigError, match="seconds must be a finite number of at least 0"):
        clock.advance(seconds)
    assert clock.offset_ms == 0


async def test_skipped_time_ends_a_sleep() -> None:
    clock = ManualClock()
    task = await asleep(clock.sleep(HOUR))
    clock.advance(HOUR)
    await soon(task)


async def test_skipped_time_ends_a_wait() -> None:
    clock = ManualClock()
    task = await asleep(clock.wait(asyncio.Event(), HOUR))
    clock.advance(HOUR)
    assert await soon(task) is False


async def test_only_whoever_is_due_wakes() -> None:
    clock = ManualClock()
    tasks = [await asleep(clock.sleep(hours * HOUR)) for hours in (1, 2, 3, 9)]
    clock.advance(2 * HOUR)
    await soon(asyncio.gather(*tasks[:2]))
    await turns()
    assert [task.done() for task in tasks] == [True, True, False, False]
    clock.advance(HOUR)
    await soon(tasks[2])
    assert not tasks[3].done()
    tasks[3].cancel()


async def test_what_is_left_after_a_move_is_lived_through() -> None:
    clock = ManualClock()
    task = await asleep(clock.sleep(HOUR))
    clock.advance(HOUR - 0.05)
    before = time.monotonic()
    await soon(task)
    assert time.monotonic() - before < 10


async def test_a_move_counts_from_the_moment_of_the_sleep() -> None:
    clock = ManualClock()
    clock.advance(HOUR)
    task = await asleep(clock.sleep(HOUR))
    clock.advance(HOUR - 10)
    await turns()
    assert not task.done()
    clock.advance(10)
    await soon(task)


async def test_an_event_and_a_move_at_once_count_as_the_event() -> None:
    clock = ManualClock()
    event = asyncio.Event()
    task = await asleep(clock.wait(event, HOUR))
    clock.advance(HOUR)
    event.set()
    assert await soon(task) is True


async def test_moves_while_sleepers_wake_are_harmless(faults: list[dict[str, Any]]) -> None:
    clock = ManualClock()
    tasks = [await asleep(clock.sleep(HOUR)) for _ in range(3)]
    while not all(task.done() for task in tasks):
        clock.advance(HOUR)
        clock.advance(HOUR)
        await asyncio.sleep(0)
    await turns()
    assert faults == []


async def test_a_move_after_the_event_is_harmless(faults: list[dict[str, Any]]) -> None:
    clock = ManualClock()
    event = asyncio.Event()
    task = await asleep(clock.wait(event, HOUR))
    event.set()
    clock.advance(HOUR)
    assert await soon(task) is True
    await turns()
    assert faults == []


async def test_nobody_stays_on_the_list() -> None:
    clock = ManualClock()
    over = await asleep(clock.sleep(HOUR))
    cancelled = await asleep(clock.sleep(HOUR))
    assert len(clock._sleepers) == 2
    clock.advance(HOUR)
    cancelled.cancel()
    await soon(asyncio.wait([over, cancelled]))
    await turns()
    assert clock._sleepers == set()


async def test_sleepers_of_another_loop_wake() -> None:
    clock = ManualClock()
    with ThreadPoolExecutor(4) as threads:
        sleeps = [threads.submit(asyncio.run, soon(clock.sleep(HOUR))) for _ in range(4)]
        await eventually(lambda: len(clock._sleepers) == 4, "all four sleep")
        assert not any(sleep.done() for sleep in sleeps)
        clock.advance(HOUR)
        for sleep in sleeps:
            sleep.result(20)


async def test_moves_from_many_threads_add_up_and_none_is_missed() -> None:
    clock = ManualClock()
    task = await asleep(clock.sleep(HOUR * 8))

    def move() -> None:
        for _ in range(100):
            clock.advance(HOUR / 100)

    threads = [threading.Thread(target=move) for _ in range(8)]
    for thread in threads:
        thread.start()
    await soon(task)
    for thread in threads:
        thread.join()
    assert clock.offset_ms == 8 * 3_600_000


async def test_no_move_is_missed_by_whoever_falls_asleep_meanwhile() -> None:
    clock = ManualClock()
    stop = threading.Event()

    def move() -> None:
        while not stop.wait(0.0001):
            clock.advance(1)

    thread = threading.Thread(target=move)
    thread.start()
    try:
        for _ in range(200):
            await soon(clock.sleep(2))
    finally:
        stop.set()
        thread.join()


def test_a_loop_that_was_closed_over_a_sleeper_harms_nobody() -> None:
    clock = ManualClock()
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # a task that is destroyed is what is wanted here
    task = loop.create_task(clock.sleep(HOUR))
    loop.run_until_complete(turns())
    assert len(clock._sleepers) == 1
    loop.close()
    clock.advance(HOUR)
    assert clock._sleepers == set()
    del task
    gc.collect()
