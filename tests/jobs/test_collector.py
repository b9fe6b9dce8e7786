"""What only the store knows, shown to whoever scrapes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal
from uuid import uuid4

import pytest

from conquiet import ConfigError, QueueError
from conquiet.jobs import collector as module
from conquiet.jobs.collector import Collector
from conquiet.jobs.job import Job, JobState, NewJob, Settlement
from conquiet.jobs.store import Wanted
from conquiet.jobs.stores.memory import MemoryStore
from conquiet.kit.loopthread import PRIVATE_LOOP, on_private_loop
from conquiet.metrics import JobGauges
from tests.rigs.scraping import value
from tests.rigs.waiting import LONG

WANTED = Wanted(count=100, worker="w", ttl_ms=60_000, max_retries=3)


@pytest.fixture
def queue() -> str:
    return f"emails-{uuid4().hex}"


class Watched(MemoryStore):
    """A store whose twin for another loop notes what is asked of it, and fails when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []
        self.is_open = False
        self.error: Exception | None = None
        self.hangs = False

    def clone(self) -> Watched:
        self.done.append("clone")
        return self

    async def open(self) -> None:
        self._note("open")
        await asyncio.sleep(0)
        self.is_open = True

    async def aclose(self) -> None:
        self._note("aclose")

    async def counts(self, queue: str) -> Mapping[JobState, int]:
        assert self.is_open
        self._note("counts")
        if self.hangs:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                self.done.append("cancelled")
                raise
        return await super().counts(queue)

    def _note(self, what: str) -> None:
        assert PRIVATE_LOOP.is_current_thread()
        self.done.append(what)
        if self.error:
            raise self.error


@contextmanager
def collecting(store: MemoryStore, queues: Sequence[str]) -> Iterator[Collector]:
    collector = Collector(store, queues)
    try:
        yield collector
    finally:
        collector.close()


def scraped(name: str, **labels: str) -> float | None:
    return value(f"conquiet_jobs_{name}", **labels)


def stored(queue: str) -> dict[str, float | None]:
    return {state.value: scraped("stored", queue=queue, state=state.value) for state in JobState}


async def fill(store: MemoryStore, queue: str) -> None:
    """Ten jobs: four ready, three in flight, two done and one failed."""
    await store.add(queue, [NewJob(str(n), b"1") for n in range(6)])
    jobs = (await store.claim(queue, WANTED)).jobs
    await store.settle(queue, [settled(job, "ack") for job in jobs[:2]] + [settled(jobs[2], "fail")])
    await store.add(queue, [NewJob(str(n), b"1", delay_ms=n * 1000) for n in range(6, 10)])


def settled(job: Job, kind: Literal["ack", "fail"]) -> Settlement:
    return Settlement.of(job, kind)


async def test_the_jobs_in_each_state_are_shown(queue: str) -> None:
    store = MemoryStore()
    await fill(store, queue)
    collector = Collector(store, [queue, f"{queue}-empty"])
    try:
        found = await asyncio.to_thread(stored, queue)
        assert found == {"ready": 4, "in_flight": 3, "succeeded": 2, "failed": 1}
        assert await asyncio.to_thread(stored, f"{queue}-empty") == dict.fromkeys(found, 0)
        assert await asyncio.to_thread(scraped, "collector_up") == 1
        await store.add(queue, [NewJob("more", b"1")])
        assert (await asyncio.to_thread(stored, queue))["ready"] == 5
    finally:
        await asyncio.to_thread(collector.close)
    assert await asyncio.to_thread(stored, queue) == dict.fromkeys(found)


async def test_a_scrape_on_the_loop_that_works_with_the_store_is_answered_too(queue: str) -> None:
    """As by a web server in the application's own loop."""
    store = MemoryStore()
    await fill(store, queue)
    with collecting(store, [queue]):
        assert stored(queue)["ready"] == 4


def test_the_store_is_asked_over_connections_of_its_own(queue: str) -> None:
    store = Watched()
    with collecting(store, [queue, f"{queue}-2"]) as collector:
        assert store.done == ["clone"]
        collector.collect()
        collector.collect()
        assert store.done == ["clone", "open", *["counts"] * 4]
        store.done.clear()
    assert store.done == ["aclose"]


async def test_scrapes_that_overlap_open_the_store_once(queue: str) -> None:
    store = Watched()
    with collecting(store, [queue]) as collector:
        read = collector._read

        async def both() -> tuple[list[JobGauges], list[JobGauges]]:
            return await asyncio.gather(read(), read())

        one, other = await on_private_loop(both())
        assert one == other
        assert sorted(store.done) == ["clone", "counts", "counts", "open"]


def test_a_store_that_is_away_spoils_no_scrape(queue: str, caplog: pytest.LogCaptureFixture) -> None:
    store = Watched()
    with collecting(store, [queue]):
        store.error = QueueError("the store is away")
        assert scraped("collector_up") == 0
        assert scraped("stored", queue=queue, state="ready") is None
        assert "the store is away" in caplog.text
        assert not store.is_open
        store.error = None
        assert scraped("collector_up") == 1
        assert scraped("stored", queue=queue, state="ready") == 0


def test_a_store_that_does_not_answer_is_given_up(queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Watched()
    monkeypatch.setattr(module, "_PATIENCE", 0.1)
    with collecting(store, [queue]):
        store.hangs = True
        assert scraped("collector_up") == 0
        monkeypatch.setattr(module, "_PATIENCE", LONG)
        store.hangs = False
        assert scraped("collector_up") == 1
        assert "cancelled" in store.done


def test_a_collector_may_be_closed_again(queue: str) -> None:
    store = Watched()
    with collecting(store, [queue]) as collector:
        collector.close()
    assert store.done == ["clone", "aclose", "aclose"]
    assert scraped("collector_up") is None


def test_what_cannot_be_collected_is_refused() -> None:
    with pytest.raises(ConfigError, match="queue must be 1 to 200 letters"):
        Collector(MemoryStore(), ["emails", "a b"])
    with pytest.raises(ConfigError, match="queues must be a sequence of names, not 'emails'"):
        Collector(MemoryStore(), "emails")
    assert scraped("collector_up") is None
