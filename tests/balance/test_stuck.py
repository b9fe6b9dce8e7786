"""What a consumer costs while nothing can move: commands and lines in the log are few, and it recovers."""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import aclosing
from typing import Final

import pytest

from conquiet import StreamAdded, StreamBalancer
from tests.rigs.asking import ask, nodes_of
from tests.rigs.troubles import EACH_SECOND, SECONDS, TROUBLES, Crowded, costs_little, heal, lines
from tests.rigs.waiting import LONG, eventually

pytestmark = [pytest.mark.any_server, pytest.mark.slow]

MANY: Final = 300
EACH_SLOT: Final = 8
"""How many blocked commands a node of a Cluster may have: there, one covers one slot."""


@pytest.fixture
def service() -> str:
    return f"s-{secrets.token_hex(6)}"


@pytest.mark.parametrize("trouble", [name for name in TROUBLES if name != "XREADGROUP is denied"])
async def test_a_consumer_that_cannot_go_on_asks_little_and_says_little(
    url: str, service: str, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "conquiet")
    async with (
        Crowded(url) as proxy,
        StreamBalancer.connect(proxy.url, service=service, lease_ttl=15.0, handle_signals=False) as balancer,
        aclosing(StreamBalancer.connect(url, service=service, handle_signals=False)) as outside,
    ):
        await balancer.add_stream("first")
        events = balancer.events()
        assert isinstance(await asyncio.wait_for(anext(events), LONG), StreamAdded)
        reading = asyncio.create_task(balancer.owned["first"].read(block_ms=60_000))
        await eventually(lambda: proxy.count(b"XREAD") > 1, "it waits")
        TROUBLES[trouble](proxy)
        if trouble not in ("nothing is answered", "nothing happens"):
            await proxy.disconnect()  # whatever waits has to begin anew
        await costs_little(proxy, caplog)
        reading.cancel()
        heal(proxy)
        if trouble == "nothing is answered":
            await proxy.disconnect()
        await asyncio.gather(reading, return_exceptions=True)
        await outside.add_stream("second")
        await eventually(lambda: "second" in balancer.owned, "it goes on")


async def waiting_at(node: str) -> int:
    return int((await ask(node, "INFO", "clients"))["blocked_clients"])


async def asked_of(node: str) -> int:
    """How many reads and scripts a node has had, which is all that an idle consumer sends."""
    stats = await ask(node, "INFO", "commandstats")
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("xread", "evalsha", "eval"))


@pytest.mark.cluster_too
async def test_many_streams_that_are_read_at_once_wait_in_few_commands(
    url: str, service: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "conquiet")
    nodes = nodes_of(url)
    most = 1 if len(nodes) == 1 else EACH_SLOT
    at_first = sum([await asked_of(node) for node in nodes])

    async def all_have_begun() -> bool:
        """One command reads all streams of a server; in a Cluster, each new one has a look of its own."""
        blocked = [await waiting_at(node) for node in nodes]
        so_far = sum([await asked_of(node) for node in nodes]) - at_first
        return max(blocked) == most and (most == 1 or so_far >= 2 * MANY)  # one to add it, one to look

    async with (
        StreamBalancer.connect(url, service=service, max_streams=MANY, handle_signals=False) as balancer,
        asyncio.timeout(3 * LONG),
    ):
        for number in range(MANY):
            await balancer.add_stream(f"{service}:{number}")
        await eventually(lambda: len(balancer.owned) == MANY, "all are owned")
        readings = [asyncio.create_task(lease.read(block_ms=60_000)) for lease in balancer.owned.values()]
        await eventually(lambda: all(lease.waiting for lease in balancer.owned.values()), "all are being read")
        await eventually(all_have_begun, "none is new any more")
        caplog.clear()
        loop = asyncio.get_running_loop()
        began, worst = loop.time(), 0
        before = [await asked_of(node) for node in nodes]
        while loop.time() < began + SECONDS:
            worst = max(worst, *[await waiting_at(node) for node in nodes])
        asked = [await asked_of(node) - so_far for node, so_far in zip(nodes, before, strict=True)]
        assert 0 < worst <= most
        assert lines(caplog) == []
        # Those that were under way at the beginning are counted when they begin anew.
        assert max(asked) <= EACH_SECOND * (loop.time() - began) + most, asked
        for reading in readings:
            reading.cancel()
        await asyncio.gather(*readings, return_exceptions=True)
