"""The life of a subscription, as a user sees it: refused, paused, stopped, left, and what probes are told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from conquiet import (
    Broker,
    ConfigError,
    GroupLostError,
    Health,
    Message,
    Outgoing,
    QueueConfig,
    TopicDefaults,
    UnknownTopicError,
)
from conquiet.kit.clock import ManualClock
from tests.contracts.topics_flavours import FLAVOURS, Recorder, finished, impatient, opened
from tests.rigs.lanes import chosen
from tests.rigs.waiting import LONG, eventually
from tests.topics.consuming import answers


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=chosen(FLAVOURS))
def flavour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def broker(flavour: str, url: str, clock: ManualClock) -> AsyncIterator[Broker]:
    async with opened(flavour, url, clock=clock) as broker:
        yield broker


def _held(go: threading.Event) -> None:
    assert go.wait(LONG)


@pytest.mark.any_server
@pytest.mark.parametrize("changes", [{}, {"max_inflight": 1}, {"batch_handler": True}], ids=["", "serial", "batches"])
async def test_a_handler_of_the_wrong_signature_is_refused_before_it_meets_a_message(
    broker: Broker, changes: dict[str, Any]
) -> None:
    await broker.create_topic("orders")
    await broker.send("orders", 1)

    def handle(order: Message, session: object) -> None: ...

    given = "messages" if "batch_handler" in changes else "message"
    with pytest.raises(ConfigError, match=rf"called with \({given}\), but it is .*handle\(order, session\)"):
        broker.subscribe("orders", group="g", handler=handle, options=impatient(**changes))  # type: ignore[arg-type]
    assert await broker.admin.dead_letters("orders") == []


async def test_pause_takes_nothing_until_resume(broker: Broker) -> None:
    await broker.create_topic("orders")
    seen = Recorder()
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient()) as subscription:
        await broker.send("orders", 1)
        await finished(broker, "orders", "g")
        subscription.pause()
        await eventually(lambda: subscription.paused, "the pause")
        await broker.send("orders", 2)
        await answers(broker)  # what must not come would be there
        assert (seen.payloads, subscription.owned) == ([1], {"orders": (0,)})
        assert (await broker.admin.describe_group("orders", "g")).lag == 1
        subscription.resume()
        await seen.saw(2)
        assert not subscription.paused


async def test_stop_ends_the_wait_and_what_is_left_is_for_the_next(broker: Broker) -> None:
    await broker.create_topic("orders")
    await broker.send_batch("orders", [Outgoing(n) for n in range(50)])
    first = Recorder(lambda _: subscription.stop())
    async with broker.subscribe("orders", group="g", handler=first, options=impatient(batch_size=1)) as subscription:
        await subscription.wait()
    rest = Recorder()
    async with broker.subscribe("orders", group="g", handler=rest, options=impatient()):
        await finished(broker, "orders", "g")
    assert sorted(first.payloads + rest.payloads) == list(range(50))


async def test_stop_ends_a_serial_subscription_at_once(broker: Broker) -> None:
    await broker.create_topic("orders")
    await broker.send_batch("orders", [Outgoing(n) for n in range(50)])
    first = Recorder(lambda _: subscription.stop())
    options = impatient(max_inflight=1)
    async with asyncio.timeout(LONG):  # which is less than the drain time
        async with broker.subscribe("orders", group="g", handler=first, options=options) as subscription:
            await subscription.wait()
    rest = Recorder()
    async with broker.subscribe("orders", group="g", handler=rest, options=impatient()):
        await finished(broker, "orders", "g")
    assert sorted(first.payloads + rest.payloads) == list(range(50))


async def test_leaving_finishes_what_is_being_handled(broker: Broker) -> None:
    await broker.create_topic("orders")
    go, seen = threading.Event(), Recorder(lambda _: _held(go))
    await broker.send("orders", 1)
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient()):
        await seen.saw(1)
        asyncio.get_running_loop().call_later(0.05, go.set)
    info = await broker.admin.describe_group("orders", "g")
    assert (info.pending, info.lag, info.members, info.unowned) == (0, 0, (), (0,))


async def test_health_is_for_probes(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=2)
    subscription = broker.subscribe("orders", group="g", handler=Recorder(), options=impatient())
    assert not subscription.health().healthy
    async with subscription:
        await eventually(lambda: subscription.owned == {"orders": (0, 1)}, "its partitions")
        whole = Health(healthy=True, owned={"orders": (0, 1)}, inflight=0, paused=False, failures=0, error=None)
        assert subscription.health() == whole
    assert not subscription.health().healthy


async def test_a_group_that_is_deleted_ends_its_subscriptions(broker: Broker) -> None:
    await broker.create_topic("orders")
    async with broker.subscribe("orders", group="g", handler=Recorder(), options=impatient()) as subscription:
        await eventually(lambda: subscription.owned == {"orders": (0,)}, "its partition")
        await broker.admin.delete_group("orders", "g", force=True)
        with pytest.raises(GroupLostError, match="g"):
            await subscription.wait()
        assert "g" in str(subscription.health().error)


async def test_a_subscription_is_entered_once(broker: Broker) -> None:
    await broker.create_topic("orders")
    subscription = broker.subscribe("orders", group="g", handler=Recorder(), options=impatient())
    async with subscription:
        with pytest.raises(ConfigError, match="once"):
            await subscription.__aenter__()


@pytest.mark.any_server
@pytest.mark.parametrize("stopped", [False, True], ids=["", "stopped"])
async def test_who_was_not_entered_cannot_be_waited_for(broker: Broker, stopped: bool) -> None:
    """Nothing would ever happen: a forgotten ``async with`` is an error and no silence."""
    await broker.create_topic("orders")
    await broker.send("orders", 1)
    subscription = broker.subscribe("orders", group="g", handler=Recorder(), options=impatient())
    serial = broker.subscribe("orders", group="g", handler=Recorder(), options=impatient(max_inflight=1))
    messages = broker.consume("orders", group="g", options=impatient())
    if stopped:
        for consumer in (subscription, serial, messages):
            consumer.stop()
    waits: list[Callable[[], Awaitable[object]]] = [subscription.wait, serial.wait, messages.wait, messages.next]
    waits += [messages.__anext__, lambda: messages.next(0.01)]
    async with asyncio.timeout(LONG):
        for wait in waits:
            with pytest.raises(ConfigError, match=r"is not entered: .*async with"):
                await wait()


@pytest.mark.any_server
async def test_who_was_left_is_not_waited_for(broker: Broker) -> None:
    await broker.create_topic("orders")
    async with broker.subscribe("orders", group="g", handler=Recorder(), options=impatient()) as subscription:
        pass
    async with broker.consume("orders", group="g", options=impatient()) as messages:
        pass
    lost = broker.consume("nowhere", group="g", options=impatient())
    with pytest.raises(UnknownTopicError):
        await lost.__aenter__()
    async with asyncio.timeout(LONG):
        for ended in (subscription, messages, lost):
            await ended.wait()
        for pulled in (messages, lost):
            assert await pulled.next() is None
            assert [message async for message in pulled] == []


async def test_closing_the_broker_ends_its_consumers(flavour: str, url: str, config: QueueConfig) -> None:
    namespace = config.stream_key.replace(":", "-")
    async with opened(flavour, url, namespace=namespace, auto_create=TopicDefaults()) as ending:
        subscription = ending.subscribe("orders", group="g", handler=Recorder(), options=impatient())
        await subscription.__aenter__()
        messages = await ending.consume("orders", group="h", options=impatient()).__aenter__()
        await ending.aclose()
        await subscription.wait()
        assert await messages.next() is None
    async with opened(flavour, url, namespace=namespace) as other:
        infos = [await other.admin.describe_group("orders", group) for group in ("g", "h")]
    assert [(info.members, info.unowned) for info in infos] == [((), (0,))] * 2
