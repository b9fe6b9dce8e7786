"""The rig of the cancellation suites does what they believe it to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import pytest

from tests.rigs.cancelling import HOWS, Call, How, cancelled_everywhere, nothing_left

hows = pytest.mark.parametrize("how", HOWS)


async def three_waits() -> str:
    for _ in range(3):
        await asyncio.sleep(0.001)  # a suspension, which is the subject
    return "done"


@asynccontextmanager
async def three() -> AsyncGenerator[Call]:
    yield three_waits


@hows
async def test_a_call_is_cancelled_at_each_of_its_suspensions(how: How) -> None:
    found = await cancelled_everywhere(three, how)
    assert [(one.point, one.was_raised) for one in found] == [(1, True), (2, True), (3, True), (4, False)]
    assert found[-1].result == "done"


@hows
async def test_a_call_with_fewer_suspensions_than_expected_fails_the_test(how: How) -> None:
    with pytest.raises(AssertionError, match="only 3 suspensions"):
        await cancelled_everywhere(three, how, at_least=4)


async def test_a_late_cancellation_comes_when_the_answer_is_there() -> None:
    answers: list[asyncio.Future[int]] = []

    async def waiting() -> None:
        answer = asyncio.get_running_loop().create_future()
        answers.append(answer)
        asyncio.get_running_loop().call_soon(answer.set_result, 1)
        await answer

    @asynccontextmanager
    async def scene() -> AsyncGenerator[Call]:
        yield waiting

    await cancelled_everywhere(scene, "late task", at_least=1)
    assert [answer.result() for answer in answers] == [1, 1]


async def test_a_scope_cancels_again_where_a_task_cancels_once() -> None:
    interrupted: dict[How, int] = {"task": 0, "scope": 0}

    for how in ("task", "scope"):

        async def stubborn(how: How = how) -> None:
            for _ in range(3):
                try:
                    await asyncio.sleep(0.001)  # a suspension, which is the subject
                except asyncio.CancelledError:
                    interrupted[how] += 1
            await asyncio.sleep(0.001)  # one more

        @asynccontextmanager
        async def scene() -> AsyncGenerator[Call]:
            yield stubborn

        await cancelled_everywhere(scene, how)
    assert interrupted["task"] == 3  # one at each of its first three points
    assert interrupted["scope"] == 3 + 2 + 1


async def test_a_task_that_is_left_behind_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.rigs.cancelling.LONG", 0.05)
    lost = None
    with pytest.raises(AssertionError, match="no task is left"):
        async with nothing_left():
            lost = asyncio.create_task(asyncio.Event().wait(), name="conquiet-lost")
    assert lost is not None
    lost.cancel()
    with suppress(asyncio.CancelledError):
        await lost
