"""Processes that go on with a broker or a consumer where its loop was left, or in a forked child.

What a consumer owns is the parent's: a child neither gets of it nor gives it away. A broker works anew in the child.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from conquiet import Broker, ConfigError, Delivery, Message, Messages
from tests.rigs.asking import ask
from tests.rigs.waiting import LONG, eventually
from tests.sync.scripts import fork, join, say
from tests.topics.consuming import impatient

__all__ = [
    "broker_on_another_loop",
    "child_closes",
    "child_consumes",
    "child_pulls",
    "child_subscribes",
    "consumer_on_another_loop",
]

_SENT: Final = 5


def _broker(url: str, namespace: str) -> Broker:
    return Broker(url, namespace=namespace)


async def _child(work: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Fork, now, while everything is as it is here, and wait until ``work`` has been done in the child."""
    pid = fork(lambda: asyncio.run(work()))
    await asyncio.to_thread(join, pid)


async def _refused(call: Awaitable[object]) -> None:
    try:
        async with asyncio.timeout(LONG):
            await call
    except ConfigError as error:
        assert "fork" in str(error), error  # noqa: PT017
    else:
        raise AssertionError("the child used what the parent owns")


async def _pulled(messages: Messages) -> Delivery:
    message = await messages.next(LONG)
    assert message is not None
    return message


def _with_consumer(
    url: str, namespace: str, child: Callable[[Broker, Messages, Delivery], Coroutine[Any, Any, object]]
) -> None:
    """A child is forked while its parent waits for a settlement and has more in hand; the parent goes on as it was."""

    async def main() -> None:
        async with _broker(url, namespace) as broker:
            await broker.create_topic("orders")
            sent = [await broker.send("orders", n) for n in range(_SENT)]
            async with broker.consume("orders", group="g", options=impatient()) as messages:
                first, second = await _pulled(messages), await _pulled(messages)
                settling = asyncio.create_task(first.ack())
                await asyncio.sleep(0)  # so that it is on its way
                await _child(lambda: child(broker, messages, second))
                await settling
                await second.ack()
                rest = [await _pulled(messages) for _ in sent[2:]]
                for message in rest:
                    await message.ack()
                assert [first.id, second.id, *(message.id for message in rest)] == sent
                info = await broker.admin.describe_group("orders", "g")
                assert (info.lag, info.pending, info.unowned) == (0, 0, ()), info

    asyncio.run(main())
    say("fine")


def child_closes(url: str, namespace: str) -> None:
    """The child closes all that it inherited."""

    async def child(broker: Broker, messages: Messages, message: Delivery) -> None:
        async with asyncio.timeout(LONG):
            await messages.aclose()
            await broker.aclose()

    _with_consumer(url, namespace, child)


def child_pulls(url: str, namespace: str) -> None:
    """The child tries to go on where the parent is."""

    async def child(broker: Broker, messages: Messages, message: Delivery) -> None:
        await _refused(messages.next(1.0))
        await _refused(anext(messages))
        await _refused(messages.wait())
        await _refused(message.ack())
        await _refused(message.retry())
        await _refused(message.reject())
        assert not messages.health().healthy

    _with_consumer(url, namespace, child)


def child_consumes(url: str, namespace: str) -> None:
    """The child uses the broker for a consumer of its own."""

    async def child(broker: Broker, messages: Messages, message: Delivery) -> None:
        await broker.send("other", "from the child")
        async with broker.consume("other", group="h", options=impatient()) as mine:
            mine_first = await _pulled(mine)
            assert mine_first.payload == "from the child"
            await mine_first.ack()
        await broker.aclose()

    async def prepare() -> None:
        async with _broker(url, namespace) as broker:
            await broker.create_topic("other")

    asyncio.run(prepare())
    _with_consumer(url, namespace, child)


def child_subscribes(url: str, namespace: str) -> None:
    """A handler is at work when the child is forked, and the child leaves the subscription."""

    async def main() -> None:
        entered, opened, handled = asyncio.Event(), asyncio.Event(), list[str]()

        async def handle(message: Message) -> None:
            entered.set()
            await opened.wait()
            handled.append(message.id)

        async with _broker(url, namespace) as broker:
            await broker.create_topic("orders")
            sent = [await broker.send("orders", n) for n in range(_SENT)]
            async with broker.subscribe("orders", group="g", handler=handle, options=impatient()) as subscription:
                await entered.wait()
                await _child(subscription.aclose)
                assert (await broker.admin.describe_group("orders", "g")).unowned == ()
                opened.set()
                await eventually(lambda: len(handled) == len(sent), "all are handled")
            assert sorted(handled) == sorted(sent)

    asyncio.run(main())
    say("fine")


def broker_on_another_loop(url: str, namespace: str) -> None:
    """The first loop ends while sends stand in line, and the broker is closed by nobody."""
    broker = _broker(url, namespace)
    sends: list[asyncio.Task[Any]] = []

    async def leave_early() -> None:
        await broker.create_topic("orders")
        sends.extend(asyncio.create_task(broker.send("orders", n)) for n in (1, 2))
        await broker.send("orders", 0)
        raise SystemExit  # those who stood in line were to be served next

    async def go_on() -> None:
        async with broker:
            id = await broker.send("orders", 9)
            [[_, fields]] = await ask(url, "XRANGE", f"{namespace}:stream:topic:orders:p:0", id, id)
            assert fields["payload"] == "9", fields

    try:
        asyncio.run(leave_early())
    except SystemExit:
        assert all(send.cancelled() for send in sends)
        asyncio.run(go_on())
        say("fine")


def consumer_on_another_loop(url: str, namespace: str) -> None:
    """The loop ends with a consumer that nobody left: closed on another one, it gives up what it has."""
    broker = _broker(url, namespace)
    consumers: list[Messages] = []

    async def leave_early() -> None:
        await broker.create_topic("orders")
        await broker.send("orders", 1)
        consumers.append(await broker.consume("orders", group="g", options=impatient()).__aenter__())
        await _pulled(consumers[0])

    async def close() -> None:
        async with asyncio.timeout(LONG):
            await consumers[0].aclose()
        async with broker.consume("orders", group="g", options=impatient()) as messages:
            assert (await _pulled(messages)).payload == 1
        await broker.aclose()

    asyncio.run(leave_early())
    asyncio.run(close())
    say("fine")
    os._exit(0)  # what the loop has left would be complained about
