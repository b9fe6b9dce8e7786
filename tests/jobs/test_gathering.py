"""Single jobs of many callers: what goes together, and what each of them is told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from conquiet import ConfigError, DuplicateJobError, QueueError
from conquiet.jobs.job import NewJob
from conquiet.jobs.stores import _gathering
from conquiet.jobs.stores._gathering import Gathering
from tests.rigs.waiting import eventually


class Adds:
    """A store's ``add``: what it was called with, and what it has."""

    def __init__(self, *taken: str) -> None:
        self.there = set(taken)
        self.calls: list[list[str]] = []
        self.failure: Exception | None = None
        self.refused = ""
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.gathering = Gathering(self._add)

    async def _add(self, queue: str, jobs: Sequence[NewJob]) -> None:
        self.calls.append([job.id for job in jobs])
        await self.go_on.wait()
        if self.failure is not None:
            raise self.failure
        if self.refused in {job.id for job in jobs}:
            raise ConfigError(f"{self.refused} is wrong")
        if taken := [job.id for job in jobs if job.id in self.there]:
            raise DuplicateJobError(queue, taken)
        self.there.update(job.id for job in jobs)

    def add(self, *ids: str, queue: str = "q") -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self.gathering.add(queue, NewJob(id, b"1"))) for id in ids]


async def test_those_who_come_together_go_together() -> None:
    adds = Adds()
    await asyncio.gather(*adds.add("a", "b", "c"), *adds.add("x", queue="other"))
    assert sorted(adds.calls) == [["a", "b", "c"], ["x"]]
    await asyncio.gather(*adds.add("d"))
    assert adds.calls[-1] == ["d"]


async def test_who_comes_alone_waits_for_nobody() -> None:
    adds = Adds()
    adds.go_on.clear()
    first = adds.add("a")
    await eventually(lambda: bool(adds.calls), "a call")
    second = adds.add("b")
    await eventually(lambda: len(adds.calls) == 2, "another")
    assert adds.calls == [["a"], ["b"]]
    adds.go_on.set()
    await asyncio.gather(*first, *second)


async def test_an_id_that_is_taken_fails_its_own_job() -> None:
    adds = Adds("b", "d")
    found = await asyncio.gather(*adds.add("a", "b", "c", "d"), return_exceptions=True)
    assert [str(one) if one else None for one in found] == [
        None,
        "queue 'q' has a job with the ID 'b' already",
        None,
        "queue 'q' has a job with the ID 'd' already",
    ]
    assert adds.calls == [["a", "b", "c", "d"], ["a", "c"]]
    assert adds.there == {"a", "b", "c", "d"}


async def test_of_two_with_one_id_the_store_sees_both() -> None:
    adds = Adds()
    found = await asyncio.gather(*adds.add("a", "a", "b"), return_exceptions=True)
    assert [type(one) for one in found].count(DuplicateJobError) == 1
    assert adds.there == {"a", "b"}


async def test_a_failure_is_everybodys_and_each_has_its_own() -> None:
    adds = Adds()
    adds.failure = QueueError("gone")
    adds.failure.__cause__ = OSError("reset")
    found = await asyncio.gather(*adds.add("a", "b", "c"), return_exceptions=True)
    assert [(type(one), str(one)) for one in found] == [(QueueError, "gone")] * 3
    assert len({id(one) for one in found}) == 3
    assert all(isinstance(one, QueueError) and one.__cause__ is adds.failure.__cause__ for one in found)
    assert adds.calls == [["a", "b", "c"]]


async def test_what_is_wrong_with_one_is_not_the_others_failure() -> None:
    adds = Adds()
    adds.refused = "b"
    found = await asyncio.gather(*adds.add("a", "b", "c"), return_exceptions=True)
    assert [type(one) for one in found] == [type(None), ConfigError, type(None)]
    assert adds.there == {"a", "c"}


async def test_those_who_come_later_do_not_overtake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gathering, "_MOST", 1)
    adds = Adds()
    await asyncio.gather(*adds.add("a", "b", "c"))
    assert adds.calls == [["a", "b"], ["c"]]


async def test_a_store_that_closes_gives_them_up() -> None:
    adds = Adds()
    adds.go_on.clear()
    tasks = adds.add("a", "b")
    await eventually(lambda: bool(adds.calls), "a call")
    await adds.gathering.aclose()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [(type(one), str(one)) for one in found] == [
        (QueueError, "the store was closed while a job was being added")
    ] * 2
    assert not adds.there


@pytest.mark.parametrize("which", [0, 1])
async def test_who_is_cancelled_before_it_is_sent_is_not_sent_and_takes_nobody_along(which: int) -> None:
    adds = Adds()
    tasks = adds.add("a", "b", "c")
    await asyncio.sleep(0)  # all of them have come
    tasks[which].cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(one) for one in found].count(asyncio.CancelledError) == 1
    assert adds.there == {"a", "b", "c"} - {"abc"[which]}


async def test_who_is_cancelled_on_the_way_takes_nobody_along() -> None:
    adds = Adds()
    adds.go_on.clear()
    tasks = adds.add("a", "b", "c")
    await eventually(lambda: bool(adds.calls), "a call")
    tasks[0].cancel()
    adds.go_on.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(one) for one in found] == [asyncio.CancelledError, type(None), type(None)]
    assert adds.there == {"a", "b", "c"}


async def test_a_batch_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gathering, "_MOST", 3)
    adds = Adds()
    ids = [str(number) for number in range(10)]
    await asyncio.gather(*adds.add(*ids))
    assert max(map(len, adds.calls)) == 4
    assert sorted(id for call in adds.calls for id in call) == ids
    monkeypatch.setattr(_gathering, "_MOST_BYTES", 2)
    adds = Adds()
    await asyncio.gather(*adds.add(*ids))
    assert max(map(len, adds.calls)) == 2
