"""Batches of so many rows: the end of the next one is looked for while one is at work."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from conquiet.errors import QueueError
from conquiet.spark import bounding
from conquiet.topics.server.group import count_after
from conquiet.topics.server.instance import Instance
from tests.conftest import Server
from tests.rigs.waiting import LONG
from tests.spark.conftest import Home
from tests.spark.planning import Query, fill, stream_of, values
from tests.sync.looking import looking


@contextmanager
def query(home: Home, **options: object) -> Iterator[Query]:
    run = Query(home, "orders", **options)
    try:
        yield run
    finally:
        run.stop()


class Counting:
    """Tells when entries were counted, and after which."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.done = threading.Semaphore(0)
        monkeypatch.setattr(bounding, "count_after", self._count)

    async def _count(self, instance: Instance, stream: str, since: str, until: str, most: int) -> tuple[int, str]:
        self.asked.append(since)
        try:
            return await count_after(instance, stream, since, until, most)
        finally:
            self.done.release()

    def wait(self, times: int) -> None:
        for _ in range(times):
            assert self.done.acquire(timeout=LONG)


def test_the_end_of_the_next_batch_is_found_meanwhile(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(monkeypatch)
    home.broker.create_topic("orders")
    ids = fill(home.broker, "orders", *range(10))
    with query(home, maxRowsPerBatch=3) as run:
        assert run.plan()
        counting.wait(2)
        assert counting.asked[1:] == [ids[2]]
        run.read(run.slices())
        assert run.plan()
        counting.wait(1)
        assert counting.asked[2:] == [ids[5]]  # for the batch after: that of this one was known
        assert values(run.rows()) == [3, 4, 5, 6, 7, 8, 9]


def test_more_that_came_meanwhile_is_in_the_next_batch(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(monkeypatch)
    home.broker.create_topic("orders")
    fill(home.broker, "orders", *range(5))
    with query(home, maxRowsPerBatch=3) as run:
        assert run.plan()
        counting.wait(2)  # and found two
        run.read(run.slices())
        fill(home.broker, "orders", *range(5, 10))
        assert [len(batch) for batch in run.batches()] == [3, 3, 1]


def test_what_is_lost_meanwhile_is_not_counted(home: Home, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(monkeypatch)
    home.broker.create_topic("orders")
    ids = fill(home.broker, "orders", *range(30))
    with query(home, maxRowsPerBatch=10, failOnDataLoss=False) as run:
        assert run.plan()
        counting.wait(2)
        run.read(run.slices())
        with looking(home.url) as eye:
            eye.ask("XTRIM", stream_of(home, "orders"), "MAXLEN", 15)
        assert run.plan()
        place = json.loads(run.checkpoint.planned[-1])["0"]
        # A server before 7.0 does not tell how many are gone: the batch ends where it would have, and has fewer rows.
        assert place == ([ids[24], 25] if server.release >= (7, 0) else [ids[19], None])
        assert values(run.rows()) == list(range(15, 30))


def test_a_server_that_goes_while_looking_ahead_is_nobodys_failure(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.broker.create_topic("orders")
    fill(home.broker, "orders", *range(9))
    with query(home, maxRowsPerBatch=3) as run:
        assert run.plan()
        run.read(run.slices())
        failing = True

        async def fail(instance: Instance, stream: str, since: str, until: str, most: int) -> tuple[int, str]:
            nonlocal failing
            if failing:
                failing = False
                raise QueueError("gone")
            return await count_after(instance, stream, since, until, most)

        monkeypatch.setattr(bounding, "count_after", fail)
        assert values(run.rows()) == [3, 4, 5, 6, 7, 8]
        assert not failing
