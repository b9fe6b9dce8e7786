"""How long an owner believes in its leases: never longer than the server does, and not shorter than it need be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import pytest

from conquiet import Broker, Message
from conquiet.kit.clock import ManualClock
from conquiet.kit.loopthread import on_private_loop
from conquiet.topics.server.topics import Topic
from conquiet.wire.keys import Keys
from conquiet.wire.scripts import Script
from tests.rigs.asking import ask
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG, eventually
from tests.topics.consuming import Recorder, counted, finished, impatient
from tests.topics.staging import Stage

pytestmark = [pytest.mark.any_server, pytest.mark.guarantee]

TTL: Final = 300.0
"""So many seconds that those which a slow machine needs do not count; they are skipped."""
ACQUIRE: Final = Script.named("partition_acquire")
BEAT: Final = Script.named("member_beat")
RELEASE: Final = Script.named("partition_release")
RENEW: Final = Script.named("lease_renew")


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    for script in (ACQUIRE, BEAT, RELEASE, RENEW):
        await ask(url, "SCRIPT", "LOAD", script.text)  # so that the first call is short, too
    async with Proxy(url) as proxy:
        yield proxy


@pytest.fixture
async def broker(proxy: Proxy, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(proxy.url, namespace=keys.namespace, clock=clock) as broker:
        await broker.create_topic("orders", partitions=2)
        yield broker


def of(script: Script) -> bytes:
    return script.sha.encode()


async def for_long(event: asyncio.Event) -> None:
    async with asyncio.timeout(LONG):
        await event.wait()


@pytest.mark.parametrize("asked", ["to renew", "to acquire"])
async def test_a_lease_counts_from_the_question_and_not_from_a_slow_answer(
    asked: str, broker: Broker, proxy: Proxy, clock: ManualClock, stage: Stage
) -> None:
    """Else an owner would begin what another has begun by then."""
    gate = asyncio.Event()
    seen = Recorder(lambda message: for_long(gate))
    for n in range(2):
        await broker.send("orders", n, key="k", partition=0)
    subscription = broker.subscribe("orders", group="g", handler=seen, options=impatient(lease_ttl=TTL))
    hold = proxy.hold(of(RENEW if asked == "to renew" else ACQUIRE))
    entering = asyncio.create_task(subscription.__aenter__())
    if asked == "to renew":
        await entering
        clock.advance(TTL * 0.34)
    await for_long(hold.caught)
    proxy.refuse(of(RENEW), b"-LOADING not now\r\n", times=1_000_000)  # this answer is the last
    clock.advance(TTL * 0.8)
    if asked == "to renew":
        [lease, _] = [held.lease for held in subscription._membership.leases.leases]
        before = lease.deadline
        hold.release()
        await eventually(lambda: lease.deadline > before, "the answer to be heard")
    else:
        hold.release()
        await entering
    await seen.saw(1)
    assert subscription.inflight == 2
    clock.advance(TTL * 0.3)  # the answer is so old now that the lease has run out
    gate.set()
    await eventually(lambda: subscription.inflight <= 1, "the first is settled")
    await stage.acquire(Topic("orders", 2), "g", owner="other#1")
    await seen.saw(1)
    await subscription.aclose()
    assert seen.payloads == [0]


async def test_one_renewal_that_fails_is_no_loss(
    broker: Broker, proxy: Proxy, clock: ManualClock, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """A lease is renewed every third of its time, and after a failure soon."""
    seen = Recorder()
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(lease_ttl=TTL)) as owner:
        proxy.refuse(of(RENEW), b"-LOADING not now\r\n", times=2)  # one for each partition
        clock.advance(TTL * 0.34)
        await eventually(lambda: "a heartbeat failed" in caplog.text, "a renewal after a third", 5.0)
        await on_private_loop(asyncio.sleep(0))  # it waits for the next one
        assert not proxy.count(of(RENEW))
        clock.advance(TTL * 0.1)
        await eventually(lambda: proxy.count(of(RENEW)) == 2, "another one soon", 5.0)
        for passed in (0.5, 0.16):  # past the time until when it would have been safe, and that of the server
            clock.advance(TTL * passed)
            await broker.send("orders", passed)
            await finished(broker, "orders", "g")
        assert owner.owned == {"orders": (0, 1)}
        assert (await stage.try_acquire(Topic("orders", 2), "g"))[0] == b"HELD"
    assert seen.payloads == [0.5, 0.16]


async def test_leases_are_renewed_though_no_sign_of_life_gets_through(
    broker: Broker, proxy: Proxy, clock: ManualClock
) -> None:
    """Of a cluster's nodes, only that which has the group's members may be away."""
    async with broker.subscribe("orders", group="g", handler=Recorder(), options=impatient(lease_ttl=TTL)):
        proxy.refuse(of(BEAT), b"-LOADING not now\r\n", times=1_000_000)
        clock.advance(TTL * 0.34)
        await eventually(lambda: proxy.count(of(RENEW)) >= 2, "both are renewed")


async def test_what_is_lost_is_noticed_though_another_lease_cannot_be_renewed(
    broker: Broker, proxy: Proxy, url: str, keys: Keys, clock: ManualClock
) -> None:
    options = impatient(lease_ttl=TTL, poll_timeout=60.0)
    async with broker.subscribe("orders", group="g", handler=Recorder(), options=options) as owner:
        first, second = (keys.lease(keys.partition("orders", partition), "g") for partition in range(2))
        proxy.refuse(second.encode(), b"-LOADING not now\r\n", times=1_000_000)
        await ask(url, "HSET", first, "owner", "other#1", "until_ms", 10**14)
        clock.advance(TTL * 0.34)
        await eventually(lambda: owner.owned == {"orders": (1,)}, "it has noticed")
        proxy.forgive()


async def test_a_renewal_that_meets_a_hand_over_counts_as_no_refusal(
    broker: Broker, proxy: Proxy, url: str, keys: Keys, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The lease is gone then because its owner gave it up."""

    async def handle(message: Message) -> None: ...

    options = impatient(lease_ttl=TTL, consumer=keys.namespace)
    async with (
        Broker(url, namespace=keys.namespace, clock=clock) as direct,
        broker.subscribe("orders", group="g", handler=handle, options=options) as first,
    ):
        hold = proxy.hold(of(BEAT), once=True)
        beat = asyncio.create_task(first._membership.leases.beat())
        await for_long(hold.caught)  # it has seen both leases
        async with direct.subscribe("orders", group="g", handler=handle, options=impatient(lease_ttl=TTL)) as second:
            await eventually(lambda: len(second.owned["orders"]) == 1, "the hand-over")
            hold.release()
            await beat
            assert len(first.owned["orders"]) == 1
    assert counted("fenced", topic="orders", group="g", consumer=keys.namespace, operation="renew") == 0
    assert "lost the lease" not in caplog.text


async def test_what_is_being_given_up_is_not_renewed(
    broker: Broker, proxy: Proxy, url: str, keys: Keys, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The server has released it, and its answer is on its way: a renewal would find the lease lost."""

    async def handle(message: Message) -> None: ...

    options = impatient(lease_ttl=TTL, consumer=keys.namespace)
    async with (
        Broker(url, namespace=keys.namespace, clock=clock) as direct,
        broker.subscribe("orders", group="g", handler=handle, options=options) as first,
    ):
        hold = proxy.hold(of(RELEASE), once=True)
        async with direct.subscribe("orders", group="g", handler=handle, options=impatient(lease_ttl=TTL)):
            await for_long(hold.caught)
            await first._membership.leases.beat()
            hold.release()
    assert counted("fenced", topic="orders", group="g", consumer=keys.namespace, operation="renew") == 0
    assert "lost the lease" not in caplog.text
