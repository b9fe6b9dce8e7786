"""Work on the private loop, and heartbeats there, whose owner is cancelled, closes or goes away without a word."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

import pytest

from conquiet.kit.clock import ManualClock
from conquiet.kit.keepalive import Keepalive
from conquiet.kit.loopthread import PRIVATE_LOOP, on_private_loop
from conquiet.kit.service import Background, ended
from tests.rigs.cancelling import HOWS, Call, How, cancelled_everywhere, nothing_left
from tests.rigs.waiting import LONG, eventually

HOUR: Final = 3600.0
hows = pytest.mark.parametrize("how", HOWS)


async def private_loop_turns() -> None:
    """Return when whatever was due on the private loop has run."""

    async def turns() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(turns(), PRIVATE_LOOP.loop()))


class Work:
    """Something that takes a while on the private loop, and whose end takes a moment."""

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()

    async def __call__(self) -> str:
        self.begun.set()
        try:
            await asyncio.sleep(0.005)  # the work itself
            return "done"
        finally:
            await asyncio.sleep(0)
            self.ended.set()


@hows
async def test_work_on_the_private_loop_ends_when_its_caller_is_cancelled(how: How) -> None:
    @asynccontextmanager
    async def scene() -> AsyncGenerator[Call]:
        work = Work()
        before = asyncio.all_tasks(PRIVATE_LOOP.loop())
        yield lambda: on_private_loop(work())
        await eventually(
            lambda: asyncio.all_tasks(PRIVATE_LOOP.loop()) <= before, "nothing of it is left on the private loop"
        )
        assert work.ended.is_set() or not work.begun.is_set()

    found = await cancelled_everywhere(scene, how, at_least=1)
    assert found[-1].result == "done"


class Beats:
    """Counts beats."""

    def __init__(self) -> None:
        self.count = 0

    async def __call__(self) -> None:
        self.count += 1


@hows
async def test_a_heartbeat_whose_start_is_cancelled_has_not_begun(how: How) -> None:
    @asynccontextmanager
    async def scene() -> AsyncGenerator[Call]:
        async with nothing_left():
            beats, clock, started = Beats(), ManualClock(), list[bool]()
            keepalive = Keepalive(beats, HOUR, clock)

            async def call() -> None:
                await keepalive.start()
                started.append(True)

            yield call
            if started:
                await keepalive.aclose()
            clock.advance(2 * HOUR)
            await private_loop_turns()
            assert beats.count == 0

    await cancelled_everywhere(scene, how, at_least=1)


@hows
async def test_a_heartbeat_whose_close_is_cancelled_is_over(how: How) -> None:
    """When it raises the cancellation, no beat is under way, and none follows."""

    @asynccontextmanager
    async def scene() -> AsyncGenerator[Call]:
        async with nothing_left():
            inside, clock = threading.Event(), ManualClock()

            async def beat() -> None:
                inside.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(0.005)  # its end takes a moment
                    inside.clear()

            keepalive = Keepalive(beat, HOUR, clock)
            await keepalive.start()
            clock.advance(HOUR)
            await eventually(inside.is_set, "a beat is under way")
            yield keepalive.aclose
            assert not inside.is_set(), "a beat is under way after the close"
            clock.advance(10 * HOUR)
            await private_loop_turns()
            assert not inside.is_set()

    await cancelled_everywhere(scene, how, at_least=1)


async def test_a_heartbeat_ends_with_the_loop_of_its_owner() -> None:
    """A script or a notebook that never closes what it opened: nobody is there any more to be kept alive."""
    beats, gone, clock, owner = Beats(), Beats(), ManualClock(), list[Keepalive]()

    async def forgetful() -> None:
        owner.append(Keepalive(beats, HOUR, clock, gone))
        await owner[0].start()
        clock.advance(HOUR)
        await eventually(lambda: beats.count == 1, "a beat while the loop is there")

    await asyncio.to_thread(int)  # the thread in which the other loop will run stays for a while
    async with nothing_left():
        await asyncio.to_thread(asyncio.run, forgetful())
        for _ in range(3):
            clock.advance(HOUR)
            await private_loop_turns()
        assert (beats.count, gone.count) == (1, 1)


@hows
async def test_tasks_that_are_ended_are_let_end_though_their_owner_is_cancelled(how: How) -> None:
    """They are cancelled once: a second time would tear off what they do at their end."""

    @asynccontextmanager
    async def scene() -> AsyncGenerator[Call]:
        background, left = Background(), list[str]()

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.001)  # its end takes a moment
                left.append("in good order")

        async with nothing_left():
            tasks = [background.start(work(), "work") for _ in range(2)]
            await asyncio.sleep(0)
            yield background.aclose
            await asyncio.wait(tasks)
            assert left == ["in good order"] * 2

    await cancelled_everywhere(scene, how, at_least=1)


async def test_all_who_wait_for_one_end_see_it() -> None:
    go = asyncio.Event()

    async def work() -> None:
        await go.wait()

    task = asyncio.ensure_future(work())
    waiting = [asyncio.ensure_future(ended(task)) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    assert not waiting[0].done()
    go.set()
    outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), LONG)
    assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError, bool]
