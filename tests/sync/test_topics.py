"""Topics in plain programs: which thread handles, and what threads, notebooks and pickles do to a consumer."""

from __future__ import annotations

import asyncio
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from conquiet.sync import (
    Admin,
    Backoff,
    Broker,
    ConfigError,
    Message,
    Messages,
    Outgoing,
    RetryPolicy,
    SubscribeOptions,
    Subscription,
    TypedCodec,
)
from tests.sync.looking import LONG, until

pytestmark = [pytest.mark.any_server, pytest.mark.slow]

SERIAL_OR_NOT = pytest.mark.parametrize("max_inflight", [1, 8])


@pytest.fixture
def namespace() -> str:
    return f"t{secrets.token_hex(6)}"


@pytest.fixture
def broker(url: str, namespace: str) -> Iterator[Broker]:
    with Broker.connect(url, namespace=namespace) as broker:
        broker.create_topic("orders", partitions=2)
        yield broker


def options(**changes: Any) -> SubscribeOptions:
    return SubscribeOptions(**{"poll_timeout": 0.1, "handle_signals": False, **changes})


def is_finished(broker: Broker, group: str = "g") -> bool:
    info = broker.admin.describe_group("orders", group)
    return (info.lag, info.pending) == (0, 0)


# --- handlers -------------------------------------------------------------------------------------------------------


async def _handle(message: Message) -> None:
    """Would have to be awaited."""


class _AsyncCallable:
    async def __call__(self, message: Message) -> None:
        """Would have to be awaited."""


ASYNC_HANDLERS: dict[str, Callable[[Message], Any]] = {
    "function": _handle,
    "partial": partial(_handle),
    "method": _AsyncCallable().__call__,
    "callable object": _AsyncCallable(),
}


@pytest.mark.parametrize("kind", ASYNC_HANDLERS)
@SERIAL_OR_NOT
def test_an_async_handler_is_refused(broker: Broker, kind: str, max_inflight: int) -> None:
    with pytest.raises(ConfigError, match="plain function"):
        broker.subscribe("orders", group="g", handler=ASYNC_HANDLERS[kind], options=options(max_inflight=max_inflight))


def test_one_at_a_time_is_handled_by_the_thread_that_waits(broker: Broker) -> None:
    broker.send_batch("orders", [Outgoing(n) for n in range(10)])
    threads: list[int] = []

    def handle(message: Message) -> None:
        threads.append(threading.get_ident())
        broker.send("orders", None) if len(threads) == 1 else None  # the facade may be used in a handler
        if len(threads) == 11:
            subscription.stop()

    def wait() -> int:
        subscription.wait()
        return threading.get_ident()

    with (
        broker.subscribe("orders", group="g", handler=handle, options=options(max_inflight=1)) as subscription,
        ThreadPoolExecutor(1) as pool,
    ):
        waiter = pool.submit(wait).result(LONG)
    assert threads == [waiter] * 11
    assert is_finished(broker)


def test_many_at_a_time_are_handled_by_several_threads(broker: Broker) -> None:
    together, threads = threading.Barrier(4), set[threading.Thread]()

    def handle(message: Message) -> None:
        threads.add(threading.current_thread())
        together.wait(LONG)
        broker.admin.list_topics()

    broker.send_batch("orders", [Outgoing(n) for n in range(8)])
    with broker.subscribe("orders", group="g", handler=handle, options=options(max_inflight=4)):
        until(lambda: is_finished(broker), "all are handled, by four at a time")
    assert len(threads) == 4
    assert threading.main_thread() not in threads


def test_nothing_is_handled_before_somebody_waits(broker: Broker) -> None:
    """Nor is it timed out meanwhile: nobody has begun with it."""
    broker.send("orders", 1)
    retry = RetryPolicy(max_retries=0, backoff=Backoff(base=0.0, cap=0.0))
    seen: list[int] = []

    def handle(message: Message) -> None:
        seen.append(message.retry_count)
        subscription.stop()

    given = options(max_inflight=1, handler_timeout=0.1, retry=retry)
    with broker.subscribe("orders", group="g", handler=handle, options=given) as subscription:
        until(lambda: broker.admin.describe_group("orders", "g").pending == 1, "it is delivered")
        threading.Event().wait(0.3)
        assert seen == []
        assert broker.admin.dead_letters("orders") == []
        subscription.wait()
    assert seen == [0]
    assert is_finished(broker)


def test_leaving_without_waiting_leaves_at_once(broker: Broker) -> None:
    broker.send("orders", 1)
    seen: list[Any] = []

    def leave() -> None:
        with broker.subscribe("orders", group="g", handler=seen.append, options=options(max_inflight=1)):
            until(lambda: broker.admin.describe_group("orders", "g").pending == 1, "it is delivered")

    with ThreadPoolExecutor(1) as pool:
        pool.submit(leave).result(LONG)  # which is less than the drain time
    assert seen == []
    assert not is_finished(broker)


class Interrupt(BaseException):
    """As a Ctrl-C in the middle of a handler."""


def test_what_ends_the_wait_within_a_handler_leaves_nothing_stuck(broker: Broker) -> None:
    broker.send_batch("orders", [Outgoing(n, key="k") for n in range(3)])
    seen: list[Any] = []

    def handle(message: Message) -> None:
        seen.append(message.payload)
        if len(seen) == 1:
            raise Interrupt
        if set(seen) == {0, 1, 2}:
            subscription.stop()

    def consume() -> None:
        with pytest.raises(Interrupt):
            subscription.wait()
        subscription.wait()  # the object stays usable

    retry = RetryPolicy(backoff=Backoff(base=0.0, cap=0.0))
    given = options(max_inflight=1, retry=retry)
    with (
        broker.subscribe("orders", group="g", handler=handle, options=given) as subscription,
        ThreadPoolExecutor(1) as pool,
    ):
        consuming = pool.submit(consume)
        try:
            consuming.result(LONG)
        finally:
            subscription.stop()
    assert seen.count(0) >= 2, "it was acknowledged, or forgotten"
    assert is_finished(broker)


@pytest.mark.slow
@SERIAL_OR_NOT
def test_a_handler_that_computes_for_longer_than_the_lease_keeps_its_message(broker: Broker, max_inflight: int) -> None:
    ttl, seen, rivals = 1.0, list[Any](), list[Any]()

    def compute(message: Message) -> None:
        seen.append(message)
        started = time.monotonic()
        while time.monotonic() - started < 2 * ttl:
            sum(range(1000))
        subscription.stop()

    given = options(lease_ttl=ttl, max_inflight=max_inflight)
    with (
        broker.subscribe("orders", group="g", handler=compute, options=given) as subscription,
        broker.subscribe("orders", group="g", handler=rivals.append, options=options(lease_ttl=ttl)) as rival,
    ):
        until(lambda: len(rival.owned["orders"]) == 1, "fair shares")
        [own] = subscription.owned["orders"]
        broker.send("orders", 1, partition=own)
        subscription.wait()
        assert (subscription.owned, rivals) == ({"orders": (own,)}, [])
    assert (len(seen), rivals) == (1, [])
    assert is_finished(broker)


# --- threads, notebooks, pickles ------------------------------------------------------------------------------------


def test_threads_share_a_broker(broker: Broker) -> None:
    def work(who: int) -> list[tuple[int, str]]:
        ids = [broker.send("orders", [who, n], key=str(who)) for n in range(30)]
        ids += broker.send_batch("orders", [Outgoing([who, n], key=str(who)) for n in range(30, 60)])
        assert broker.admin.list_topics() == ["orders"]
        return [(id.partition, str(id)) for id in ids]

    with ThreadPoolExecutor(8) as pool:
        ids = [id for found in pool.map(work, range(8)) for id in found]
    assert len(set(ids)) == 480
    stored: dict[tuple[int, str], Any] = {}
    with broker.subscribe("orders", group="g", handler=lambda m: stored.update({(m.partition, m.id): m.payload})):
        until(lambda: is_finished(broker), "all are handled")
    assert [stored[id] for id in ids] == [[who, n] for who in range(8) for n in range(60)]


def test_threads_share_what_they_pull_from(broker: Broker) -> None:
    broker.send_batch("orders", [Outgoing(n) for n in range(100)])

    def work(messages: Messages) -> list[Any]:
        found = []
        while (message := messages.next(0.3)) is not None:
            message.ack()
            found.append(message.payload)
        return found

    with (
        broker.consume("orders", group="g", options=options()) as messages,
        ThreadPoolExecutor(4) as pool,
    ):
        found = [n for mine in pool.map(work, [messages] * 4) for n in mine]
    assert sorted(found) == list(range(100))
    assert is_finished(broker)


@SERIAL_OR_NOT
async def test_a_notebook_with_a_running_loop(broker: Broker, max_inflight: int) -> None:
    assert asyncio.get_running_loop().is_running()
    seen: list[Any] = []

    def handle(message: Message) -> None:
        seen.append(message.payload)
        subscription.stop()

    given = options(max_inflight=max_inflight)
    with broker.subscribe("orders", group="g", handler=handle, options=given) as subscription:
        broker.send("orders", 1)  # only now: the handler may be called before the name is bound
        subscription.wait()
    with broker.consume("orders", group="h", options=options()) as messages:
        next(messages).ack()
    assert seen == [1]
    assert is_finished(broker)
    assert is_finished(broker, "h")


@pytest.mark.parametrize("used", [True, False], ids=["used", "unused"])
def test_a_broker_and_its_admin_travel_as_a_recipe(url: str, namespace: str, used: bool) -> None:
    with Broker.connect(url, namespace=namespace, codec=TypedCodec(tuple[int, int])) as original:
        if used:
            original.create_topic("orders")
        twin, admin = pickle.loads(pickle.dumps((original, original.admin)))
        assert (type(twin), type(admin)) == (Broker, Admin)
        with twin:
            twin.create_topic("orders")
            twin.send("orders", (1, 2))
            assert admin.describe_topic("orders").length == original.admin.describe_topic("orders").length == 1
            with twin.consume("orders", group="g", options=options()) as messages:
                assert next(messages).payload == (1, 2)


def _stop(message: Message) -> None:
    """Can be pickled, as a lambda cannot."""


def test_a_consumer_travels_as_a_recipe_and_is_entered_anew(broker: Broker) -> None:
    subscription = broker.subscribe("orders", group="g", handler=_stop, options=options())
    messages = broker.consume("orders", group="h", options=options())
    with subscription, messages:
        twins: tuple[Broker, Subscription, Messages] = pickle.loads(pickle.dumps((broker, subscription, messages)))
        own_broker, twin, twin_messages = twins
        with own_broker, twin, twin_messages:
            assert twin.consumer != subscription.consumer
            assert len(broker.admin.describe_group("orders", "g").members) == 2
            assert len(broker.admin.describe_group("orders", "h").members) == 2
