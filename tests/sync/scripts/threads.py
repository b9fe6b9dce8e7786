"""Who starts a thread, and when."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from conquiet.sync import EmbeddedRedis, QueueConsumer, RedisStreamsQueue
from conquiet.sync._portal import call
from tests.sync.looking import LONG, whatever
from tests.sync.scripts import say

__all__ = ["building", "first_calls_at_once"]


async def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def first_calls_at_once() -> None:
    """The first calls of a process come from many threads in the same moment."""
    start = threading.Barrier(16)

    def first() -> asyncio.AbstractEventLoop:
        start.wait(LONG)
        return call(_loop)

    with ThreadPoolExecutor(16) as pool:
        loops = {future.result() for future in [pool.submit(first) for _ in range(16)]}
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("conquiet")]
    say(names, len(loops) == 1)


def building() -> None:
    """Objects are made and nothing is asked of them."""
    queue = RedisStreamsQueue.connect("redis://localhost:1", whatever("s"))
    consumer = QueueConsumer(queue)
    EmbeddedRedis()
    consumer.stop()
    assert consumer.stopping
    say([thread.name for thread in threading.enumerate()])
