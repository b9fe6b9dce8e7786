"""Whatever was cancelled, ended or forked while a connection was in use: the next call is answered, and none hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from conquiet import ConfigError, QueueConfig, QueueError, RedisStreamsQueue
from tests.rigs.asking import entries
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG
from tests.sync.programs import run
from tests.wire import leaving

pytestmark = [pytest.mark.any_server, pytest.mark.slow]


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy


async def cancel_all_but(*mine: asyncio.Task[Any]) -> None:
    """As programs do at their end, or as a supervisor does who does not know whose task is whose."""
    for task in asyncio.all_tasks() - {asyncio.current_task(), *mine}:
        task.cancel()


async def first_of_a_line(queue: RedisStreamsQueue, then: Callable[[], Coroutine[Any, Any, None]]) -> str:
    """Enqueue, and call ``then`` at the moment at which those behind are to be served and are not yet."""
    entry_id = await queue.enqueue({"n": 0})
    await then()
    return entry_id


async def a_line(
    queue: RedisStreamsQueue, then: Callable[[], Coroutine[Any, Any, None]]
) -> tuple[asyncio.Task[str], list[asyncio.Task[str]]]:
    first = asyncio.create_task(first_of_a_line(queue, then))
    others = [asyncio.create_task(queue.enqueue({"n": number})) for number in (1, 2, 3)]
    return first, others


async def test_a_call_after_all_tasks_were_cancelled_is_answered(url: str, config: QueueConfig) -> None:
    async with RedisStreamsQueue.connect(url, config) as queue, asyncio.timeout(LONG):
        me = asyncio.current_task()
        assert me is not None
        first, others = await a_line(queue, lambda: cancel_all_but(me))
        await first
        outcomes = await asyncio.gather(*others, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError] * 3
        [message] = await queue.read()
        await queue.ack(message)
        assert (await queue.backlog_stats()).pending == 0


async def test_those_in_line_are_served_though_the_one_who_was_to_serve_them_was_cancelled(
    url: str, config: QueueConfig
) -> None:
    async with RedisStreamsQueue.connect(url, config) as queue, asyncio.timeout(LONG):
        me = asyncio.current_task()
        assert me is not None
        others: list[asyncio.Task[str]] = []
        first, line = await a_line(queue, lambda: cancel_all_but(me, *others))
        others += line
        ids = [await first, *await asyncio.gather(*others)]
        assert list(await entries(url, config.stream_key)) == ids


async def test_those_in_line_hear_of_a_write_that_was_cancelled_and_those_behind_are_served(
    url: str, proxy: Proxy, config: QueueConfig
) -> None:
    queue = RedisStreamsQueue.connect(proxy.url, config)
    await queue.open()
    async with asyncio.timeout(LONG):
        before = asyncio.all_tasks()
        one, two = proxy.hold(b'{"n":1}'), proxy.hold(b'{"n":2}')
        calls = [asyncio.create_task(queue.enqueue({"n": number})) for number in (1, 2)]
        await one.caught.wait()
        one.release()
        await two.caught.wait()  # it is on its way, sent by whoever serves the line
        calls.append(asyncio.create_task(queue.enqueue({"n": 3})))
        await asyncio.sleep(0)  # so that it stands in line
        for task in asyncio.all_tasks() - before - {*calls}:
            if task.get_name().startswith("conquiet"):
                task.cancel()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(outcomes[1], QueueError)
        assert (await entries(url, config.stream_key))[str(outcomes[2])] == {"n": 3}
    await queue.aclose()


async def test_a_loop_beside_one_that_uses_the_queue_is_told_so(url: str, proxy: Proxy, config: QueueConfig) -> None:
    queue = RedisStreamsQueue.connect(proxy.url, config)
    hold = proxy.hold(b"XADD")
    writing = asyncio.create_task(queue.enqueue({"n": 1}))
    await hold.caught.wait()
    with pytest.raises(ConfigError, match="another event loop"):
        await asyncio.to_thread(asyncio.run, asyncio.wait_for(queue.enqueue({"n": 2}), LONG))
    hold.release()
    entry_id = await writing
    assert await entries(url, config.stream_key) == {entry_id: {"n": 1}}
    await queue.aclose()


@pytest.mark.parametrize(
    "scenario", [getattr(leaving, name) for name in leaving.__all__], ids=lambda script: script.__name__
)
def test_in_a_process_of_its_own(url: str, config: QueueConfig, scenario: Callable[..., None]) -> None:
    assert run(scenario, url, config.stream_key) == ["fine"]
