"""The one life of what runs: it is asked to stop from anywhere, and leaves in good order and in time."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import anyio
import pytest

from conquiet.errors import ConfigError, ConquietError
from conquiet.kit import lifecycle, probe
from conquiet.kit.lifecycle import Life
from tests.rigs.waiting import LONG, eventually, turns

LOG = logging.getLogger("conquiet.kit")


class Work:
    """Something that drains and closes, and knows how far that has come."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.may_drain = asyncio.Event()

    async def drain(self) -> None:
        self.steps.append("draining")
        try:
            await self.may_drain.wait()
        except asyncio.CancelledError:
            self.steps.append("torn off")
            raise
        self.steps.append("drained")

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.steps.append("closed")


def life(*, handle_signals: bool = False) -> Life:
    return Life("the thing", LOG, handle_signals=handle_signals)


async def test_it_ends_when_another_thread_asks_for_it() -> None:
    mine = life()
    with mine.lived():
        assert mine.is_lived
        threading.Timer(0.0, mine.stop).start()
        await asyncio.wait_for(mine.until_stopped(), LONG)
    assert not mine.is_lived


async def test_a_stop_before_it_begins_counts_once() -> None:
    mine = life()
    mine.stop()
    with mine.lived():
        await asyncio.wait_for(mine.until_stopped(), LONG)
    with mine.lived():
        assert not mine.stopping.is_set()


async def test_it_lives_once_at_a_time() -> None:
    mine = life()
    with mine.lived(), pytest.raises(ConfigError, match="the thing runs already"), mine.lived():
        pass


async def test_a_stop_is_told_on_its_loop() -> None:
    told = list[int]()
    mine = Life("the thing", LOG, on_stop=lambda: told.append(threading.get_ident()))
    with mine.lived():
        stopper = threading.Thread(target=mine.stop)
        stopper.start()
        await asyncio.wait_for(mine.until_stopped(), LONG)
        stopper.join()
    assert told == [threading.get_ident()]


async def test_signals_stop_it_while_it_lives() -> None:
    before = signal.getsignal(signal.SIGTERM)
    mine = life(handle_signals=True)
    with mine.lived():
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(mine.until_stopped(), LONG)
    assert signal.getsignal(signal.SIGTERM) is before


async def test_work_that_fails_ends_it_and_work_that_ends_is_a_mistake() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    async def end() -> None: ...

    mine = life()
    with mine.lived():
        with pytest.raises(ZeroDivisionError):
            await mine.until_stopped(asyncio.create_task(fail()))
        with pytest.raises(ConquietError, match="ended by itself"):
            await mine.until_stopped(asyncio.create_task(end()))


async def test_leaving_drains_and_then_closes() -> None:
    work, mine = Work(), life()
    work.may_drain.set()
    await mine.leave(work.drain, work.close, LONG)
    assert work.steps == ["draining", "drained", "closed"]


async def test_what_does_not_drain_in_time_is_torn_off_and_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lifecycle, "MOMENT", 0.3)
    work, mine = Work(), life()
    await asyncio.wait_for(mine.leave(work.drain, work.close, 0), LONG)
    assert work.steps == ["draining", "torn off", "closed"]
    assert "did not leave in time" in caplog.text


class Stubborn:
    """Work that does not end though it is cancelled, until it is let go: as what waits for a server that is frozen."""

    def __init__(self) -> None:
        self.cancelled = 0
        self.may_end = asyncio.Event()
        self.has_ended = asyncio.Event()

    async def __call__(self) -> None:
        while not self.may_end.is_set():
            try:
                await self.may_end.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
        self.has_ended.set()
        raise ZeroDivisionError("nobody is there to be told")


@contextmanager
def letting_go(*stubborn: Stubborn) -> Iterator[None]:
    """Whatever the block comes to, they may end after it: else nothing that waits for them would."""
    try:
        yield
    finally:
        for one in stubborn:
            one.may_end.set()


async def within(seconds: float, task: asyncio.Future[None]) -> None:
    await asyncio.wait([task], timeout=seconds)
    assert task.done(), "it has left"


@pytest.mark.parametrize("which", ["drain", "close", "both"])
async def test_what_ends_neither_in_time_nor_when_it_is_cancelled_is_left_behind(
    which: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lifecycle, "MOMENT", 0.4)
    work, mine, drain, close = Work(), life(), Stubborn(), Stubborn()
    work.may_drain.set()
    stubborn = [one for one, name in ((drain, "drain"), (close, "close")) if which in (name, "both")]
    loop = asyncio.get_running_loop()
    began = loop.time()
    leaving = mine.leave(
        drain if drain in stubborn else work.drain, close if close in stubborn else work.close, seconds=0.1
    )
    with letting_go(*stubborn):
        await within(LONG / 4, asyncio.ensure_future(leaving))
    took = loop.time() - began
    assert [one.cancelled for one in stubborn] == [1] * len(stubborn)
    assert ("did not leave in time" in caplog.text, "did not close in time" in caplog.text) == (
        drain in stubborn,
        close in stubborn,
    )
    assert ("closed" in work.steps) == (close not in stubborn), "what it cannot drain it closes all the same"
    assert took < 0.1 + 0.4 + LONG / 20, "the drain time and a moment for both"
    for one in stubborn:
        await asyncio.wait_for(one.has_ended.wait(), LONG)


async def test_a_cancelled_caller_waits_for_what_is_stubborn_no_longer_than_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifecycle, "MOMENT", 0.4)
    mine, close = life(), Stubborn()

    async def drain() -> None: ...

    leaving = asyncio.create_task(mine.leave(drain, close, seconds=0))
    await turns()
    leaving.cancel()
    with letting_go(close):
        await within(LONG / 4, leaving)
    assert leaving.cancelled()
    assert close.cancelled == 1
    await asyncio.wait_for(close.has_ended.wait(), LONG)


async def test_it_is_closed_though_the_loop_stood_still_until_all_its_time_was_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifecycle, "MOMENT", lifecycle._CLOSING + 0.05)
    work = Work()

    async def blocked() -> None:
        time.sleep(2 * lifecycle.MOMENT)  # noqa: ASYNC251 - what a handler may do to its loop

    await life().leave(blocked, work.close, 0.0)
    assert work.steps == ["closed"]


async def test_it_may_be_lived_by_several_and_is_over_with_the_last() -> None:
    before = signal.getsignal(signal.SIGTERM)
    mine = life(handle_signals=True)
    first, second = mine.shared(), mine.shared()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGTERM) is not before
    second.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGTERM) is before
    with mine.shared():
        assert mine.is_lived


async def test_a_stop_is_known_at_once_where_that_matters() -> None:
    told = list[int]()
    mine = Life("the thing", LOG, at_once=lambda: told.append(threading.get_ident()))
    mine.stop()
    with mine.lived():
        stopper = threading.Thread(target=mine.stop)
        stopper.start()
        stopper.join()
        assert told == [threading.get_ident(), stopper.ident]


async def test_it_leaves_though_it_is_cancelled_again_and_again() -> None:
    work, mine = Work(), life()
    leaving = asyncio.create_task(mine.leave(work.drain, work.close, LONG))
    for _ in range(3):
        await eventually(lambda: work.steps == ["draining"], "it drains")
        leaving.cancel()
        await asyncio.sleep(0)
    assert work.steps == ["draining"]
    work.may_drain.set()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert work.steps == ["draining", "drained", "closed"]


async def test_it_leaves_though_its_scope_is_cancelled() -> None:
    work, mine = Work(), life()
    asyncio.get_running_loop().call_later(0.05, work.may_drain.set)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await mine.leave(work.drain, work.close, LONG)
    assert work.steps == ["draining", "drained", "closed"]


async def test_who_leaves_meanwhile_waits_with_the_first() -> None:
    work, mine = Work(), life()
    leaving = [asyncio.create_task(mine.leave(work.drain, work.close, LONG)) for _ in range(3)]
    await eventually(lambda: work.steps == ["draining"], "it drains")
    leaving[0].cancel()
    work.may_drain.set()
    await asyncio.wait(leaving)
    assert [task.cancelled() for task in leaving] == [True, False, False]
    assert work.steps == ["draining", "drained", "closed"]
    await mine.leave(work.drain, work.close, LONG)
    assert work.steps == ["draining", "drained", "closed"], "it has left"


async def test_what_closing_raises_is_raised_after_all_is_done() -> None:
    async def close(work: Work) -> None:
        await work.close()
        raise ZeroDivisionError

    work, mine = Work(), life()
    work.may_drain.set()
    with pytest.raises(ZeroDivisionError):
        await mine.leave(work.drain, partial(close, work), LONG)
    assert work.steps[-1] == "closed"


async def test_something_is_done_on_its_loop_from_wherever_that_is_asked() -> None:
    mine, done = life(), list[asyncio.AbstractEventLoop | None]()

    def note() -> None:
        done.append(asyncio.get_running_loop())

    mine.do(note)
    assert len(done) == 1, "it does not live: here and now"
    with mine.lived():
        await asyncio.to_thread(mine.do, note)
        await eventually(lambda: len(done) == 2, "it is done")
    assert done == [asyncio.get_running_loop()] * 2


async def test_the_moments_of_a_life_are_told() -> None:
    moments, work, mine = list[tuple[str, str]](), Work(), life()
    work.may_drain.set()
    with probe.listening(lambda who, moment: moments.append((who, moment))), mine.lived():
        await mine.leave(work.drain, work.close, 0)
    assert moments == [("the thing", moment) for moment in ("begins", "leaves", "has left", "is over")]
    with mine.lived():
        pass
    assert len(moments) == 4, "nobody listens any more"
