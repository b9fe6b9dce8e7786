"""What the server says unasked is nobody's answer."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest

from conquiet import QueueConfig, QueueError, RedisStreamsQueue
from tests.rigs.asking import ask, entries
from tests.rigs.proxy import Proxy

pytestmark = pytest.mark.any_server


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy


@pytest.fixture
async def queue(proxy: Proxy, config: QueueConfig) -> AsyncIterator[RedisStreamsQueue]:
    async with RedisStreamsQueue.connect(proxy.url, config) as queue:
        yield queue


@pytest.mark.parametrize("is_noticed", [True, False], ids=["in the stream", "in the socket"])
@pytest.mark.parametrize("line", [b"$3\r\n0-1\r\n", b"$3\r\n0", b"-ERR unasked\r\n"])
async def test_a_stray_reply_is_given_to_no_later_call(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig, line: bytes, is_noticed: bool
) -> None:
    await queue.enqueue({"n": 1})
    await queue.read()
    proxy.blurt(line)  # to both of its connections
    if is_noticed:
        await ask(url, "PING")  # it has arrived before the answer to this
    else:
        time.sleep(0.05)  # noqa: ASYNC251 - so that no turn of the loop takes it in
    ids = [await queue.enqueue({"n": number}) for number in (2, 3)]
    written = await entries(url, config.stream_key)
    assert [written[id]["n"] for id in ids] == [2, 3]
    assert [message.id for message in await queue.read(count=10)] == ids
    assert proxy.accepted == 4  # both were replaced


async def test_of_two_replies_to_one_call_none_is_taken(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    proxy.refuse(b'{"n":1}', b"$3\r\n0-1\r\n$3\r\n0-2\r\n")
    with pytest.raises(QueueError, match="more replies"):
        await queue.enqueue({"n": 1})
    entry_id = await queue.enqueue({"n": 2})
    assert await entries(url, config.stream_key) == {entry_id: {"n": 2}}
