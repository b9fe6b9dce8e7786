"""Background work and its owner: what ends, and what is not torn off."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from conquiet.kit.service import ended, to_its_end
from tests.rigs.waiting import LONG


class Work:
    """Something that takes until it is let go; how often the loop came by meanwhile."""

    def __init__(self, error: Exception | None = None) -> None:
        self.began, self.go = asyncio.Event(), asyncio.Event()
        self.is_done = False
        self._error = error

    async def __call__(self) -> None:
        self.began.set()
        await self.go.wait()
        self.is_done = True
        if self._error is not None:
            raise self._error


async def test_work_ends_however_often_its_caller_is_cancelled() -> None:
    work = Work()
    caller = asyncio.ensure_future(to_its_end(work(), "work"))
    await work.began.wait()
    for _ in range(3):
        caller.cancel()
        await asyncio.sleep(0)
    assert not caller.done()
    work.go.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert work.is_done


async def test_work_ends_in_a_cancelled_scope_without_a_busy_wait() -> None:
    """A cancelled scope cancels again at each turn of the loop whatever is awaited in it, unless that is shielded."""
    work, cancels = Work(), 0

    class Counted(asyncio.Task[None]):
        def cancel(self, msg: object = None) -> bool:
            nonlocal cancels
            cancels += 1
            return super().cancel(msg)

    async def leave() -> None:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await to_its_end(work(), "work")

    caller = Counted(leave())
    await asyncio.wait_for(work.began.wait(), LONG)
    for _ in range(20):
        await asyncio.sleep(0)
    work.go.set()
    await asyncio.wait_for(caller, LONG)
    assert work.is_done
    assert cancels <= 1


@pytest.mark.parametrize("is_in_time", [True, False])
async def test_the_loop_rests_while_a_cancelled_scope_waits_for_work_that_has_begun(
    is_in_time: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scope is left in good order without its shield too; but until then the loop would turn without end."""
    loop, work, turned = asyncio.get_running_loop(), Work(), 0
    turn = loop._run_once  # type: ignore[attr-defined]

    def counted() -> None:
        nonlocal turned
        turned += 1
        turn()

    task = asyncio.create_task(work())
    await work.began.wait()
    monkeypatch.setattr(loop, "_run_once", counted)
    loop.call_later(0.1, work.go.set)  # the end of the work, which takes a moment
    with anyio.CancelScope() as scope:
        scope.cancel()
        assert await ended(task, LONG if is_in_time else 0.02) is is_in_time
    assert work.is_done is is_in_time
    assert turned < 20


async def test_what_goes_wrong_in_the_work_is_raised() -> None:
    work = Work(ValueError("no"))
    work.go.set()
    with pytest.raises(ValueError, match="no"):
        await to_its_end(work(), "work")
