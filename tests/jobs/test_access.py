"""What a worker costs whose user may not do what it needs: the server's own ACL refuses it, and later does not."""

from __future__ import annotations

import logging
from typing import Final

import pytest

from conquiet import JobWorker, RedisStore
from tests.contracts.jobs_flavours import Recorder, serving
from tests.jobs.working import queue_in
from tests.rigs.access import DENIALS, User
from tests.rigs.proxy import Proxy
from tests.rigs.troubles import costs_little
from tests.rigs.waiting import eventually

pytestmark = [pytest.mark.any_server, pytest.mark.slow]

HARMLESS: Final = ("CLIENT", "CONFIG")
"""What the worker can do without."""


@pytest.mark.parametrize("what", DENIALS)
async def test_a_worker_that_is_refused_by_the_acl_asks_little_and_says_little(
    url: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "conquiet")
    async with User(url) as user, Proxy(user.url) as proxy, RedisStore(proxy.url) as store, RedisStore(url) as past:
        queue, seen = queue_in(store), Recorder()
        worker, outside = JobWorker(queue, seen, handle_signals=False), queue_in(past, name=queue.name)
        async with serving(worker):
            await eventually(lambda: proxy.count(b"XREAD") > 0, "it waits")
            await user.deny(what)
            await costs_little(proxy, caplog)
            await eventually(lambda: worker.health().healthy is (what in HARMLESS), "the truth is told")
            await user.allow()
            await outside.enqueue(1)
            await seen.saw(1)
            await eventually(lambda: worker.health().healthy, "it is well again")
