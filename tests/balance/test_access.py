"""What a consumer costs whose user may not do what it needs: the server's own ACL refuses it, and later does not."""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import aclosing

import pytest

from conquiet import StreamAdded, StreamBalancer
from tests.rigs.access import DENIALS, User
from tests.rigs.proxy import Proxy
from tests.rigs.troubles import costs_little
from tests.rigs.waiting import LONG, eventually

pytestmark = [pytest.mark.any_server, pytest.mark.slow]


@pytest.mark.parametrize("what", DENIALS)
async def test_a_consumer_that_is_refused_by_the_acl_asks_little_and_says_little(
    url: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "conquiet")
    service = f"s-{secrets.token_hex(6)}"
    async with (
        User(url) as user,
        Proxy(user.url) as proxy,
        StreamBalancer.connect(proxy.url, service=service, lease_ttl=15.0, handle_signals=False) as balancer,
        aclosing(StreamBalancer.connect(url, service=service, handle_signals=False)) as outside,
    ):
        await balancer.add_stream("first")
        assert isinstance(await asyncio.wait_for(anext(balancer.events()), LONG), StreamAdded)
        reading = asyncio.create_task(balancer.owned["first"].read(block_ms=60_000))
        await eventually(lambda: proxy.count(b"XREAD") > 1, "it waits")
        await user.deny(what)
        await costs_little(proxy, caplog)
        reading.cancel()
        await user.allow()
        await asyncio.gather(reading, return_exceptions=True)
        await outside.add_stream("second")
        await eventually(lambda: "second" in balancer.owned, "it goes on")
