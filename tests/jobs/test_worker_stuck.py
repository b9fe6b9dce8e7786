"""What a worker costs while nothing can move: commands, connections and log lines are few, and it recovers."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import pytest

from conquiet import JobWorker, RedisStore
from tests.contracts.jobs_flavours import Recorder, serving
from tests.jobs.working import queue_in
from tests.rigs.troubles import TROUBLES, Crowded, costs_little, denied, heal
from tests.rigs.waiting import eventually

pytestmark = [pytest.mark.any_server, pytest.mark.slow]

HARMLESS: Final = ("CLIENT is denied", "nothing happens")
"""In which the worker can go on as ever."""
UNSEEN: Final = "nothing is answered"
"""Which is known only when an answer is overdue."""


@pytest.mark.parametrize("trouble", [name for name in TROUBLES if name != "XREADGROUP is denied"])
async def test_a_worker_that_cannot_go_on_asks_little_and_says_little(
    url: str, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "conquiet")
    async with Crowded(url) as proxy, RedisStore(proxy.url) as store, RedisStore(url) as past:
        queue, seen = queue_in(store), Recorder()
        worker, outside = JobWorker(queue, seen, handle_signals=False), queue_in(past, name=queue.name)
        async with serving(worker):
            await eventually(lambda: proxy.count(b"XREAD") > 0, "it waits")
            TROUBLES[trouble](proxy)
            if trouble not in (UNSEEN, "nothing happens"):
                await proxy.disconnect()  # whatever waits has to begin anew
            await costs_little(proxy, caplog)
            if trouble != UNSEEN:
                await eventually(lambda: worker.health().healthy is (trouble in HARMLESS), "the truth is told")
            heal(proxy)
            if trouble == UNSEEN:
                await proxy.disconnect()
            await outside.enqueue(1)
            await seen.saw(1)
            await eventually(lambda: worker.health().healthy, "it is well again")


async def test_a_worker_that_has_all_its_places_taken_is_well_though_it_could_not_wait_before(url: str) -> None:
    """It need not wait for jobs: so nothing is the matter, and nobody should restart it."""
    async with Crowded(url) as proxy, RedisStore(proxy.url) as store, RedisStore(url) as past:
        queue, inside, release = queue_in(store), asyncio.Event(), asyncio.Event()

        async def handle(job: object) -> None:
            inside.set()
            await release.wait()

        worker = JobWorker(queue, handle, concurrency=1, handle_signals=False)
        denied(b"XREAD")(proxy)
        async with serving(worker):
            await eventually(lambda: worker.health().failures > 0, "it cannot wait")
            await queue_in(past, name=queue.name).enqueue(1)
            await inside.wait()
            await eventually(lambda: worker.health().healthy, "it has enough to do")
            release.set()
