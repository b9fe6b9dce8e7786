"""A consumer of a queue, or its server, that stands still at an exactly known step.

There are no leases here: what a consumer holds is pending until somebody claims it, and a consumer that comes back may
handle it a second time. But nothing is lost, everything goes on, and nobody waits for a silent server for ever.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from conquiet import QueueConfig, QueueConsumer, QueueMessage, RedisStreamsQueue
from conquiet.wire.embedded import EmbeddedRedis
from tests.rigs.asking import pending
from tests.rigs.freezing import PAUSES, Pause, Side, all_of, freezer, own_server, paused
from tests.rigs.sizing import IS_FULL
from tests.rigs.waiting import LONG, eventually
from tests.system.processes import Crew

pytestmark = [pytest.mark.system, pytest.mark.any_server]

IDLE_MS: Final = 300
SIDES: Final[tuple[Side, ...]] = ("before", "after")
STEPS: Final = ("XREADGROUP", "XACK")


# --- the client --------------------------------------------------------------------------------------------------


def client_cases() -> Iterable[tuple[str, Side]]:
    sample = [("XREADGROUP", "after"), ("XACK", "before")]
    return [(step, side) for step in STEPS for side in SIDES if IS_FULL or (step, side) in sample]


async def play_client(url: str, directory: Path, step: str, side: Side) -> None:
    directory.mkdir()
    config = QueueConfig(f"t:{secrets.token_hex(6)}", "group", "heir")
    async with freezer(url) as proxy, RedisStreamsQueue.connect(url, config) as heir:
        with Crew.hired(proxy.url, config.stream_key, directory / "log") as crew:
            if step == "XREADGROUP":
                proxy.keep(step, side)
            await crew.start("victim", "core", "--how", "run")
            if step == "XACK":
                proxy.keep(step, side)
            first = await heir.enqueue({"number": 0}) if (step, side) != ("XREADGROUP", "before") else ""
            await proxy.kept()
            crew.signal("victim", signal.SIGSTOP)
            first = first or await heir.enqueue({"number": 0})
            taken = await taken_over(heir, step, side)
            assert [message.id for message in taken] == ([] if (step, side) == ("XACK", "after") else [first])
            await heir.ack(*taken)
            await proxy.release() if step == "XACK" else proxy.release_soon()
            crew.signal("victim", signal.SIGCONT)
            second = await heir.enqueue({"number": 1})
            await eventually(lambda: second in crew.handled("victim"), "it goes on")
            crew.signal("victim", signal.SIGTERM)
            assert await crew.ended("victim") == 0
            # Once for each who had it.
            times = {("XREADGROUP", "before"): 0}.get((step, side), 1)
            assert crew.handled("victim") == [first] * times + [second]
            assert await pending(url, config.stream_key, "group") == []


async def taken_over(heir: RedisStreamsQueue, step: str, side: Side) -> list[QueueMessage]:
    """What the heir gets: by reading, if the other had nothing; else by claiming what is idle."""
    if (step, side) == ("XREADGROUP", "before"):
        return await heir.read(block_ms=1000)
    found: list[QueueMessage] = []

    async def is_there() -> bool:
        found.extend(await heir.claim_stale(min_idle_ms=IDLE_MS))
        return bool(found)

    if (step, side) == ("XACK", "after"):
        return await heir.claim_stale(min_idle_ms=1)
    await eventually(is_there, "what is idle can be claimed")
    return found


async def test_what_a_stopped_consumer_holds_is_claimed_and_it_goes_on(url: str, tmp_path: Path) -> None:
    scenes: dict[str, Callable[[], Any]] = {}
    for number, (step, side) in enumerate(client_cases()):
        scenes[f"{side} {step}"] = partial(play_client, url, tmp_path / str(number), step, side)
    await all_of(scenes)


# --- the server --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def stage() -> AsyncIterator[tuple[EmbeddedRedis, RedisStreamsQueue]]:
    async with own_server() as server:
        config = QueueConfig("orders", "group", "consumer-1")
        async with RedisStreamsQueue.connect(server.url, config) as queue:
            yield server, queue


async def play_server(how: Pause) -> None:
    """A pause that is shorter than any patience: each call is answered when it is over, and done once."""
    async with stage() as (server, queue):
        first, second = [await queue.enqueue({"number": number}) for number in range(2)]
        held = await queue.read(block_ms=1000)
        async with QueueConsumer(queue, handle_signals=False) as consumer:
            async with paused(server, how, 1.0):
                reading = asyncio.ensure_future(consumer.next(block_ms=2000))
                acking = asyncio.ensure_future(queue.ack(*held))
            await asyncio.wait_for(acking, LONG)
            message = await asyncio.wait_for(reading, LONG)
        assert message is not None
        assert ([one.id for one in held], message.id) == ([first], second)
        assert await pending(server.url, "orders", "group") == [second]
        async with paused(server, how, 0.5):
            claiming = asyncio.ensure_future(queue.claim_stale(min_idle_ms=1))
        [claimed] = await asyncio.wait_for(claiming, LONG)
        await queue.ack(claimed)
        assert await pending(server.url, "orders", "group") == []


async def test_calls_go_on_after_a_server_that_stood_still() -> None:
    ways: tuple[Pause, ...] = PAUSES if IS_FULL else ("stopped",)
    scenes: dict[str, Callable[[], Any]] = {how: partial(play_server, how) for how in ways}
    await all_of(scenes)
