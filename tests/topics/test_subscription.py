"""How a subscription runs its handler, how it begins, and how it stops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from conquiet import ConfigError
from conquiet.message import Message
from conquiet.topics import Broker, Subscription
from conquiet.topics.consume.handling import Handling
from conquiet.wire.keys import Keys
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG, eventually
from tests.topics.consuming import Recorder, answers, finished, impatient
from tests.topics.subscribing import Gate, broker, numbered, pending

__all__ = ["broker"]

pytestmark = pytest.mark.cluster_too

# --- handlers -------------------------------------------------------------------------------------------


async def test_a_message_is_acknowledged_after_its_handler_returned(broker: Broker) -> None:
    gate = Gate()
    async with broker.subscribe("orders", group="g", handler=gate, options=impatient()):
        await broker.send("orders", 1)
        await gate.holds(1)
        assert await pending(broker) == 1
        gate.opened.set()
        await finished(broker, "orders", "g")


@pytest.mark.any_server
async def test_plain_functions_run_in_threads_and_several_at_once(broker: Broker) -> None:
    together, threads = threading.Barrier(3), set[int]()

    def handle(message: Message) -> None:
        threads.add(threading.get_ident())
        together.wait(LONG)

    async with broker.subscribe("orders", group="g", handler=handle, options=impatient()):
        await broker.send_batch("orders", numbered(3))
        await finished(broker, "orders", "g")
    assert len(threads) == 3
    assert threading.get_ident() not in threads


@pytest.mark.any_server
@pytest.mark.parametrize("disguise", [lambda handler: lambda message: handler(message), lambda handler: handler])
async def test_a_callable_that_gives_an_awaitable_is_awaited(
    broker: Broker, disguise: Callable[[Recorder], Callable[[Message], Any]]
) -> None:
    async def fail_first(message: Message) -> None:
        if message.retry_count == 0:
            raise RuntimeError

    seen = Recorder(fail_first)
    async with broker.subscribe("orders", group="g", handler=disguise(seen), options=impatient()):
        await broker.send("orders", 1)
        await finished(broker, "orders", "g")
    assert len(seen.messages) == 2


@pytest.mark.any_server
async def test_what_cannot_be_called_is_no_handler(broker: Broker) -> None:
    with pytest.raises(ConfigError, match="handler must be callable, not 7"):
        broker.subscribe("orders", group="g", handler=7)  # type: ignore[arg-type]


@pytest.mark.any_server
async def test_a_handler_that_takes_too_long_has_failed(broker: Broker) -> None:
    async def hang_first(message: Message) -> None:
        if message.retry_count == 0:
            await asyncio.Event().wait()

    seen = Recorder(hang_first)
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(handler_timeout=0.05)):
        await broker.send("orders", 1)
        await finished(broker, "orders", "g")
    assert [message.retry_count for message in seen.messages] == [0, 1]


@pytest.mark.any_server
async def test_a_thread_that_took_too_long_has_failed_and_is_never_doubled(broker: Broker) -> None:
    release, inside, most = threading.Event(), 0, 0

    def slow_first(message: Message) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if message.retry_count == 0:
            release.wait(LONG)
        inside -= 1

    options = impatient(handler_timeout=0.05)
    async with broker.subscribe("orders", group="g", handler=slow_first, options=options) as subscription:
        await broker.send("orders", 1)
        await eventually(lambda: inside == 1, "the handler to begin")
        await eventually(lambda: _is_overdue(subscription), "its time is over")
        await answers(broker)
        release.set()
        await finished(broker, "orders", "g")
    assert most == 1


def _is_overdue(subscription: Subscription) -> bool:
    """Whether it has judged a call that has not ended."""
    hands = subscription._hands
    assert isinstance(hands, Handling)
    return any(run.verdict is not None for run in hands._runners._runs.values())


@pytest.mark.any_server
async def test_a_handler_that_raises_cancelled_error_has_failed_like_any_other(broker: Broker) -> None:
    async def cancelled_first(message: Message) -> None:
        if message.payload == 0 and message.retry_count == 0:
            raise asyncio.CancelledError

    seen = Recorder(cancelled_first)
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient()):
        await broker.send_batch("orders", numbered(3))
        await finished(broker, "orders", "g")
        assert await broker.admin.dead_letters("orders") == []
    assert sorted(seen.payloads) == [0, 0, 1, 2]


@pytest.mark.any_server
async def test_a_handler_that_cancels_its_own_task_ends_nothing(broker: Broker) -> None:
    async def cancel_first(message: Message) -> None:
        if message.payload == 0 and message.retry_count == 0:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

    seen = Recorder(cancel_first)
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(max_inflight=1)):
        await broker.send_batch("orders", numbered(3))
        await finished(broker, "orders", "g")
    assert {1, 2} < set(seen.payloads)


# --- stopping -------------------------------------------------------------------------------------------


@pytest.mark.any_server
async def test_stop_from_another_thread_ends_the_wait(broker: Broker) -> None:
    async with broker.subscribe("orders", group="g", handler=Recorder(), options=impatient()) as subscription:
        asyncio.get_running_loop().run_in_executor(None, subscription.stop)
        async with asyncio.timeout(LONG):
            await subscription.wait()


async def test_leaving_finishes_what_was_begun_and_leaves_the_rest_for_the_next(broker: Broker) -> None:
    gate = Gate()
    await broker.send_batch("orders", numbered(10, key="the same"))
    subscription = broker.subscribe("orders", group="g", handler=gate, options=impatient())
    async with subscription:
        await gate.holds(1)
        leaving = asyncio.create_task(subscription.aclose())
        await eventually(lambda: subscription.inflight == 1, "the unstarted to be let go")
        assert not leaving.done()
        gate.opened.set()
        await leaving
    info = await broker.admin.describe_group("orders", "g")
    assert (info.members, info.pending, gate.entered) == ((), 9, 1)
    seen = Recorder()
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient()):
        await finished(broker, "orders", "g")
    assert seen.payloads == list(range(1, 10))
    assert {message.retry_count for message in seen.messages} == {0}


@pytest.mark.any_server
async def test_a_handler_that_outlasts_the_drain_time_is_cancelled_and_its_message_stays(broker: Broker) -> None:
    gate = Gate()
    await broker.send("orders", 1)
    async with broker.subscribe("orders", group="g", handler=gate, options=impatient(drain_timeout=0.05)):
        await gate.holds(1)
    assert await pending(broker) == 1
    seen = Recorder()
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient()):
        await seen.saw(1)


@pytest.mark.any_server
async def test_closing_again_does_nothing_and_entering_again_is_refused(broker: Broker) -> None:
    subscription = broker.subscribe("orders", group="g", handler=Recorder(), options=impatient())
    await subscription.aclose()  # nothing to close yet
    async with subscription:
        assert subscription.health().healthy
    await subscription.aclose()
    assert not subscription.health().healthy
    with pytest.raises(ConfigError, match="once"):
        await subscription.__aenter__()


@pytest.mark.any_server
async def test_the_broker_closes_its_consumers(url: str, keys: Keys, broker: Broker) -> None:
    other = Broker(url, namespace=keys.namespace)
    subscription = await other.subscribe("orders", group="g", handler=Recorder(), options=impatient()).__aenter__()
    assert subscription.owned == {"orders": (0, 1)}
    await other.aclose()
    assert (await broker.admin.describe_group("orders", "g")).unowned == (0, 1)
    await other.aclose()


# --- how it is doing ------------------------------------------------------------------------------------


@pytest.mark.any_server
async def test_health_tells_what_is_owned_and_in_flight(broker: Broker) -> None:
    gate = Gate()
    subscription: Subscription = broker.subscribe("orders", group="g", handler=gate, options=impatient())
    assert not subscription.health().healthy
    async with subscription:
        await broker.send("orders", 1)
        await gate.holds(1)
        health = subscription.health()
        assert (health.healthy, health.owned, health.inflight) == (True, {"orders": (0, 1)}, 1)
        assert (health.failures, health.error, health.paused) == (0, None, False)
        gate.opened.set()
    health = subscription.health()
    assert (health.healthy, health.inflight) == (False, 0)


# --- the beginning ----------------------------------------------------------------------------------------


@pytest.mark.any_server
@pytest.mark.one_node
async def test_what_is_taken_before_all_topics_are_joined_is_handled(url: str, keys: Keys, broker: Broker) -> None:
    """There is no room for more then, so nothing else would set the handlers going."""
    await broker.create_topic("refunds")
    await broker.send("orders", 1)
    seen = Recorder()
    async with Proxy(url) as proxy, Broker(proxy.url, namespace=keys.namespace) as through:
        joining = proxy.hold(keys.members("refunds", "g").encode())
        options = impatient(max_inflight=1)
        subscription = through.subscribe(["orders", "refunds"], group="g", handler=seen, options=options)
        entering = asyncio.create_task(subscription.__aenter__())
        await joining.caught.wait()
        await eventually(lambda: subscription.inflight == 1 or bool(seen.messages), "the first one is taken")
        joining.release()
        await entering
        await seen.saw(1)
        await subscription.aclose()


@pytest.mark.any_server
async def test_after_stop_nothing_more_is_taken(broker: Broker) -> None:
    """Whoever leaves next finds it undelivered, and not pending for somebody who will not handle it."""
    gate = asyncio.Event()

    async def held(message: Message) -> None:
        await gate.wait()

    seen = Recorder(held)
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(max_inflight=1)) as subscription:
        await broker.send("orders", 1)
        await seen.saw(1)
        subscription.stop()
        await subscription.wait()
        await broker.send("orders", 2)
        gate.set()
        await eventually(lambda: subscription.inflight == 0, "the first to be settled")
        subscription.resume()
        await answers(broker)  # one too many would be there
        await seen.saw(1)
    info = await broker.admin.describe_group("orders", "g")
    assert (info.lag, info.pending) == (1, 0)
