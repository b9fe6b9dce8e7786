"""Expiry notifications make a consumer look at once; nothing depends on them."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Literal

import pytest

from conquiet import StreamAdded, StreamBalancer, StreamExpired
from conquiet.balance.ledger import Ledger
from conquiet.kit.clock import SYSTEM_CLOCK
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.keys import BalanceKeys
from tests.conftest import Rung
from tests.rigs.asking import ask
from tests.rigs.servers import on_a_port

pytestmark = [pytest.mark.system, pytest.mark.any_server]

NEVER = 600.0


@pytest.fixture
async def private_url(rung: Rung) -> AsyncIterator[str]:
    async with on_a_port(rung.binary) as server:
        yield server.url


@pytest.mark.parametrize("database", ["", "/5"])
@pytest.mark.parametrize("hint", ["listen", "enable"])
async def test_a_hint_is_followed_at_once(hint: Literal["listen", "enable"], database: str, private_url: str) -> None:
    """The consumer would not look by itself for minutes: it saw no lease that ends before."""
    url, service = private_url + database, f"t{secrets.token_hex(6)}"
    if hint == "listen":
        await ask(url, "CONFIG", "SET", "notify-keyspace-events", "Kx")
    async with StreamBalancer.connect(
        url, service=service, lease_ttl=NEVER, sweep_interval=NEVER, max_streams=1, keyspace_hint=hint
    ) as balancer:
        await balancer.add_stream("mine")
        events = balancer.events()
        assert isinstance(await anext(events), StreamAdded)
        link = Connections(Address.of(url))
        try:
            dying = Ledger(link, BalanceKeys(service), "dying#1", 0.5, SYSTEM_CLOCK)
            await dying.add("theirs", {})
            await dying.claim("theirs")
            event = await anext(events)
        finally:
            await link.aclose()
        assert isinstance(event, StreamExpired)
        assert (event.stream, event.owner) == ("theirs", "dying")
        assert (await balancer.claim("theirs")).owned


async def test_a_server_that_forbids_config_and_subscribing_does_no_harm(private_url: str) -> None:
    await ask(private_url, "ACL", "SETUSER", "app", "on", ">word", "~*", "resetchannels", "+@all", "-config")
    url, service = private_url.replace("redis://", "redis://app:word@"), f"t{secrets.token_hex(6)}"
    async with StreamBalancer.connect(
        url, service=service, lease_ttl=NEVER, sweep_interval=0.2, auto_claim=True, keyspace_hint="enable"
    ) as balancer:
        link = Connections(Address.of(private_url))
        try:
            dying = Ledger(link, BalanceKeys(service), "dying#1", 0.5, SYSTEM_CLOCK)
            await balancer.add_stream("one")
            events = balancer.events()
            assert isinstance(await anext(events), StreamAdded)
            await balancer.release_stream("one")
            event = await anext(events)
            assert isinstance(event, StreamAdded)
            await balancer.done_stream("one")
            await dying.add("two", {})
            event = await anext(events)
            assert (type(event), event.stream) == (StreamAdded, "two")
        finally:
            await link.aclose()


@pytest.mark.parametrize("hint", ["", "no", True])
def test_a_hint_that_is_none_is_refused(hint: object) -> None:
    with pytest.raises(ValueError, match="keyspace_hint must be one of 'listen', 'enable'"):
        StreamBalancer("redis://localhost", service="x", keyspace_hint=hint)  # type: ignore[arg-type]
