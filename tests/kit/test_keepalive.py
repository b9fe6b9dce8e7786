"""The heartbeat goes on while its owner's loop is blocked, after failures, and not after it was closed."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest

from conquiet.kit.clock import ManualClock
from conquiet.kit.keepalive import Keepalive
from conquiet.kit.loopthread import PRIVATE_LOOP
from tests.rigs.waiting import LONG, eventually, turns

HOUR = 3600.0


class Beats:
    """Counts beats, wherever they are made, and does what a test asks at each."""

    def __init__(self, failures: int = 0) -> None:
        self.threads: list[threading.Thread] = []
        self.tried = threading.Semaphore(0)
        self._failures = failures

    async def __call__(self) -> None:
        self.threads.append(threading.current_thread())
        self.tried.release()
        if len(self.threads) <= self._failures:
            raise RuntimeError("no answer")

    @property
    def count(self) -> int:
        return len(self.threads)


async def test_it_beats_on_the_private_loop() -> None:
    beats = Beats()
    keepalive = Keepalive(beats, 0.01)
    await keepalive.start()
    await eventually(lambda: beats.count >= 3, "three beats")
    await keepalive.aclose()
    assert threading.main_thread() not in beats.threads
    assert {thread.name for thread in beats.threads} == {"conquiet-sync"}


async def test_it_beats_while_the_callers_loop_is_blocked() -> None:
    beats = Beats()
    keepalive = Keepalive(beats, 0.01)
    await keepalive.start()
    for _ in range(3):
        assert beats.tried.acquire(timeout=LONG), "no beat while the loop was blocked"  # blocks this loop
    await keepalive.aclose()


async def test_the_first_beat_comes_after_one_interval() -> None:
    beats, clock = Beats(), ManualClock()
    keepalive = Keepalive(beats, HOUR, clock)
    await keepalive.start()
    clock.advance(HOUR * 0.89)  # at most a tenth earlier than asked
    await _private_loop_turns()
    assert beats.count == 0
    clock.advance(HOUR * 0.11)
    await eventually(lambda: beats.count == 1, "the first beat")
    await keepalive.aclose()


async def test_each_beat_is_one_interval_after_the_last() -> None:
    beats, clock = Beats(), ManualClock()
    keepalive = Keepalive(beats, HOUR, clock)
    await keepalive.start()
    for number in range(1, 5):
        clock.advance(HOUR)
        await eventually(lambda number=number: beats.count == number, f"beat {number}")  # type: ignore[misc]
        await _private_loop_turns()
        assert beats.count == number
    await keepalive.aclose()


async def test_after_a_failure_the_next_beat_comes_soon(caplog: pytest.LogCaptureFixture) -> None:
    beats, clock = Beats(failures=2), ManualClock()
    keepalive = Keepalive(beats, HOUR, clock)
    await keepalive.start()
    with caplog.at_level(logging.DEBUG, "conquiet.kit"):
        clock.advance(HOUR)
        await eventually(lambda: beats.count == 1, "the beat that fails")
        await _skip_until(clock, beats, 2, HOUR / 4)
        await _skip_until(clock, beats, 3, HOUR / 4)
    clock.advance(HOUR / 2)  # it went well: back to whole intervals
    await _private_loop_turns()
    assert beats.count == 3
    await keepalive.aclose()
    failed = "a heartbeat failed, the next follows soon: no answer"
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert told == [("WARNING", failed), ("DEBUG", failed)], "one warning a second"


async def test_a_beat_under_way_has_ended_when_close_returns() -> None:
    begun, ending, ended, gate = threading.Event(), threading.Event(), threading.Event(), asyncio.Event()

    async def beat() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await gate.wait()
            ended.set()

    keepalive = Keepalive(beat, 0.001)
    await keepalive.start()
    await eventually(begun.is_set, "a beat is under way")
    closing = asyncio.create_task(keepalive.aclose())
    await eventually(ending.is_set, "the beat is about to end")
    await turns()
    assert not closing.done()
    PRIVATE_LOOP.loop().call_soon_threadsafe(gate.set)
    await asyncio.wait_for(closing, LONG)
    assert ended.is_set()


async def test_there_is_no_beat_after_close() -> None:
    beats, clock = Beats(), ManualClock()
    keepalive = Keepalive(beats, HOUR, clock)
    await keepalive.start()
    await keepalive.aclose()
    clock.advance(10 * HOUR)
    await _private_loop_turns()
    assert beats.count == 0


async def test_a_start_that_was_cancelled_has_not_begun() -> None:
    """Also if the private loop had begun by then, and only its word had not arrived."""
    beats, clock = Beats(), ManualClock()
    keepalive = Keepalive(beats, HOUR, clock)
    starting = asyncio.create_task(keepalive.start())
    await asyncio.sleep(0)
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), PRIVATE_LOOP.loop()).result(LONG)  # blocks this loop
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    clock.advance(10 * HOUR)
    await _private_loop_turns()
    assert beats.count == 0


async def test_closing_twice_or_before_the_start_is_harmless() -> None:
    keepalive = Keepalive(Beats(), HOUR)
    await keepalive.aclose()
    await keepalive.start()
    await keepalive.aclose()
    await keepalive.aclose()


async def test_it_runs_from_the_private_loop_too() -> None:
    beats = Beats()

    async def all_of_it() -> None:
        keepalive = Keepalive(beats, 0.01)
        await keepalive.start()
        await eventually(lambda: beats.count >= 1, "a beat")
        await keepalive.aclose()

    work = asyncio.run_coroutine_threadsafe(all_of_it(), PRIVATE_LOOP.loop())
    await asyncio.wrap_future(work)
    assert beats.count >= 1


async def _skip_until(clock: ManualClock, beats: Beats, count: int, seconds: float) -> None:
    """Skip ``seconds``, also if the beat before falls asleep only after that."""
    deadline = time.monotonic() + LONG
    await _private_loop_turns()
    clock.advance(seconds)
    while beats.count < count:
        assert time.monotonic() < deadline, f"no beat {count} after {seconds:g} s"
        await _private_loop_turns()
    assert beats.count == count


async def _private_loop_turns() -> None:
    """Return when whatever was due on the private loop has run."""

    async def turns() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(turns(), PRIVATE_LOOP.loop()))


async def test_a_beat_that_makes_a_failure_of_its_end_is_the_last() -> None:
    began = threading.Event()

    async def beat() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise RuntimeError("no answer") from None

    keepalive = Keepalive(beat, 0.01)
    await keepalive.start()
    await asyncio.to_thread(began.wait, LONG)
    await asyncio.wait_for(keepalive.aclose(), LONG)
