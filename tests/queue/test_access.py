"""A consumer of a queue whose user may not do all: one error ends it, unless it can do without."""

from __future__ import annotations

import asyncio
import logging

import pytest

from conquiet import QueueConfig, QueueConsumer, QueueError, RedisStreamsQueue
from tests.queue.test_stuck import BLOCK, Way, both_ways, brief, consuming, lines
from tests.rigs.access import User
from tests.rigs.cancelling import nothing_left
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG, eventually

pytestmark = [pytest.mark.any_server, pytest.mark.slow]
__all__ = ["brief"]


@both_ways
@pytest.mark.parametrize("what", ["the keys", "everything"])
async def test_a_consumer_that_is_refused_by_the_acl_ends_with_one_error(
    url: str, brief: QueueConfig, way: Way, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "conquiet")
    async with User(url) as user, Proxy(user.url) as proxy, RedisStreamsQueue.connect(proxy.url, brief) as queue:
        async with nothing_left():  # nothing goes on by itself
            task = asyncio.ensure_future(way(QueueConsumer(queue, handle_signals=False), []))
            await eventually(lambda: proxy.count(b"XREADGROUP") > 1, "it reads")
            before = len(proxy.received), proxy.accepted
            await user.deny(what)
            with pytest.raises(QueueError):
                await asyncio.wait_for(task, LONG)
        assert len(proxy.received) - before[0] <= LONG / BLOCK
        assert proxy.accepted - before[1] <= 1
        assert lines(caplog) == []
        await user.allow()
        await queue.enqueue({"n": 1})
        assert [message.payload for message in await queue.read(block_ms=1000)] == [{"n": 1}]


@both_ways
@pytest.mark.parametrize("what", ["XREAD", "CLIENT", "CONFIG", "scripts"])
async def test_a_consumer_that_need_not_do_what_the_acl_refuses_goes_on_at_the_same_cost(
    url: str, brief: QueueConfig, way: Way, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "conquiet")
    seen: list[str] = []
    async with User(url) as user:
        await user.deny(what)
        async with (
            Proxy(user.url) as proxy,
            RedisStreamsQueue.connect(proxy.url, brief) as queue,
            consuming(queue, way, seen),
        ):
            await eventually(lambda: proxy.count(b"XREADGROUP") > 0, "it reads")
            loop = asyncio.get_running_loop()
            began, before, opened = loop.time(), len(proxy.received), proxy.accepted
            await eventually(lambda: len(proxy.received) >= before + 5, "it reads again and again")
            assert len(proxy.received) - before <= (loop.time() - began) / BLOCK + 1
            assert proxy.accepted == opened
            id = await queue.enqueue({"n": 1})
            await eventually(lambda: seen == [id], "it still reads")
            assert lines(caplog) == []
