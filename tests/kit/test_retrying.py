"""The one loop around a backoff: waits that grow, and a log that stays short."""

from __future__ import annotations

import asyncio
import logging
import math
import time

import pytest

from conquiet.errors import QueueError
from conquiet.kit.clock import Clock, ManualClock
from conquiet.kit.policy import Backoff
from conquiet.kit.retrying import Lines, Retrying, patiently

LOG = logging.getLogger("conquiet.kit")
FIXED = Backoff(base=5.0, cap=5.0, kind="fixed")


class Slept(Clock):
    """A clock that notes for how long it was asked to sleep, and does not."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


async def test_the_wait_grows_with_the_failures_and_begins_anew_after_a_success() -> None:
    clock = Slept()
    retrying = Retrying(Lines(LOG), clock, Backoff(base=1.0, cap=8.0, kind="exponential"))
    for _ in range(5):
        await retrying.failed("x", QueueError("gone"))
    assert retrying.failures == 5
    retrying.succeeded()
    await retrying.failed("x", QueueError("gone"))
    assert clock.slept == [1.0, 2.0, 4.0, 8.0, 8.0, 1.0]


async def test_a_million_failures_do_not_overflow() -> None:
    clock = Slept()
    retrying = Retrying(Lines(LOG), clock, Backoff(base=1.0, cap=8.0, kind="exponential"))
    retrying.failures = 1_000_000
    await retrying.failed("x", QueueError("gone"))
    assert clock.slept == [8.0]


async def test_an_event_ends_the_wait() -> None:
    early = asyncio.Event()
    waiting = asyncio.create_task(Retrying(Lines(LOG), ManualClock(), FIXED).failed("x", QueueError("gone"), early))
    await asyncio.sleep(0)
    assert not waiting.done()
    early.set()
    await asyncio.wait_for(waiting, 4)


async def test_the_log_has_one_line_a_second(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    retrying = Retrying(Lines(LOG), Slept())
    with caplog.at_level(logging.WARNING, "conquiet"):
        for _ in range(50):
            await retrying.failed("cannot read", QueueError("gone"))
            now += 0.1
    lines = [record.message for record in caplog.records]
    later = "cannot read, trying again (9 warnings were left out): gone"
    assert lines == ["cannot read, trying again: gone", *[later] * 4]


async def test_what_succeeds_and_fails_in_turn_has_no_more_lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    retrying = Retrying(Lines(LOG), Slept())
    with caplog.at_level(logging.WARNING, "conquiet"):
        for _ in range(10):
            await retrying.failed("cannot read", QueueError("gone"))
            retrying.succeeded()
    assert len(caplog.records) == 1


async def test_who_wants_it_quiet_hears_of_the_first_failure_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    retrying = Retrying(Lines(LOG, math.inf), Slept())
    with caplog.at_level(logging.DEBUG, "conquiet"):
        for _ in range(3):
            await retrying.failed("x", QueueError("gone"))
            now += 100
    assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG", "DEBUG"]


async def test_a_mistake_has_its_traceback_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    for error in (QueueError("gone"), ZeroDivisionError("ours")):
        await Retrying(Lines(LOG), Slept()).failed("x", error)
    assert [bool(record.exc_info) for record in caplog.records] == [False, True]


async def test_it_asks_again_as_often_as_it_may_and_raises_the_last_error() -> None:
    clock, asked = Slept(), list[int]()

    async def ask() -> None:
        asked.append(1)
        raise QueueError(str(len(asked)))

    heard = list[str]()
    with pytest.raises(QueueError, match="8"):
        await patiently(clock, ask, lambda error: heard.append(str(error)))
    assert (len(asked), len(clock.slept), heard) == (8, 7, [str(number) for number in range(1, 8)])
    assert 5 < sum(clock.slept) < 15


async def test_it_asks_without_end_if_it_may_and_only_on_the_error_it_is_for() -> None:
    asked = 0

    async def ask() -> str:
        nonlocal asked
        asked += 1
        if asked < 30:
            raise KeyError
        return "done"

    assert await patiently(Slept(), ask, on=KeyError, retries=None) == "done"
    asked = 0
    with pytest.raises(KeyError):
        await patiently(Slept(), ask, on=QueueError, retries=None)
    assert asked == 1
