"""Subscriptions whose lease the server still knows, but not what was taken, settled or parked under it.

All that it has is handled: a message whose acknowledgment is lost a second time, but never twice at once, and none is
acknowledged without having been handled. Nothing stands still.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Final

import pytest

from conquiet import Backoff, Broker, Message, QueueError, Reject, Subscription
from conquiet.kit.clock import ManualClock
from conquiet.topics.options import Order
from conquiet.wire.keys import Keys
from conquiet.wire.scripts import Script
from tests.rigs.asking import ask, pending
from tests.rigs.rollback import Rollback
from tests.rigs.waiting import eventually
from tests.topics.consuming import Recorder, buried, finished, impatient

pytest_plugins = ("tests.contracts.rollback_fixtures",)
pytestmark = pytest.mark.guarantee

TOPIC: Final = "orders"
GROUP: Final = "billing"
STREAM: Final = Keys().partition(TOPIC, 0)
ORDERS: Final[list[Order]] = ["unordered", "block_key", "block_partition"]
LATER: Final = Backoff(base=60.0, cap=60.0, kind="fixed")


class Handler(Recorder):
    """Holds up or fails what it is told to, and knows how many calls of one message there were at once."""

    def __init__(self) -> None:
        super().__init__(self._handle)
        self.gates: dict[object, asyncio.Event] = {}
        self.failing: set[object] = set()
        self.most = 0
        self._running = Counter[object]()

    def hold(self, payload: object) -> asyncio.Event:
        """Let a message wait for the event."""
        return self.gates.setdefault(payload, asyncio.Event())

    async def _handle(self, message: Message) -> None:
        payload = message.payload
        self._running[payload] += 1
        self.most = max(self.most, self._running[payload])
        try:
            if payload in self.gates:
                await self.gates[payload].wait()
            if payload in self.failing:
                raise ValueError(payload)
        finally:
            self._running[payload] -= 1

    def count(self, payload: object) -> int:
        return self.payloads.count(payload)

    async def has(self, payload: object, times: int = 1) -> None:
        """Return once a message was begun with so many times."""
        await eventually(lambda: self.count(payload) >= times, f"{payload!r} to be handled {times} times")


@pytest.fixture
async def broker(rollback: Rollback, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(rollback.url, clock=clock) as broker:
        await broker.create_topic(TOPIC)
        yield broker


@pytest.fixture
def handler() -> Handler:
    return Handler()


async def is_looked_through(broker: Broker, handler: Handler) -> None:
    """Return once something that was sent now was handled, and everything is settled."""
    await broker.send(TOPIC, "at the end", key="another")
    await handler.has("at the end")
    await finished(broker, TOPIC, GROUP)


async def taken_after_all_was_kept(
    broker: Broker, rollback: Rollback, subscription: Subscription, key: str | None
) -> str:
    """The server will have the message "held", whose ID this is, and nothing of its being taken."""
    subscription.pause()
    id = await broker.send(TOPIC, "held", key=key)
    await rollback.keep()
    subscription.resume()
    return id


# --- what is being handled --------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("order", ORDERS)
async def test_what_is_in_hand_is_not_begun_a_second_time(
    broker: Broker, rollback: Rollback, handler: Handler, order: Order, key: str | None
) -> None:
    """The server hands it out again: it has forgotten that it did, and still knows the lease."""
    gate = handler.hold("held")
    async with broker.subscribe(TOPIC, group=GROUP, handler=handler, options=impatient(order=order)) as subscription:
        await broker.send(TOPIC, "first", key=key)
        await finished(broker, TOPIC, GROUP)
        id = await taken_after_all_was_kept(broker, rollback, subscription, key)
        await handler.has("held")
        await rollback.lose()
        await eventually(lambda: is_pending(rollback, id), "the server to hand it out again")
        await broker.send(TOPIC, "behind", key=key)
        gate.set()
        await is_looked_through(broker, handler)
        assert subscription.health().healthy
    assert (handler.most, handler.count("held")) == (1, 1)
    assert handler.count("behind") == 1


async def test_what_falls_due_a_second_time_is_not_begun_while_it_runs(
    broker: Broker, rollback: Rollback, handler: Handler, clock: ManualClock
) -> None:
    handler.failing.add("held")
    options = impatient(order="block_key", backoff=LATER)
    async with broker.subscribe(TOPIC, group=GROUP, handler=handler, options=options):
        await broker.send(TOPIC, "held", key="k")
        await eventually(lambda: is_parked(rollback), "it waits for its next attempt")
        await rollback.keep()
        handler.failing.clear()
        gate = handler.hold("held")
        clock.advance(61)
        await handler.has("held", 2)
        await rollback.lose()
        await eventually(lambda: is_not_parked(rollback), "it falls due again")
        await broker.send(TOPIC, "behind", key="k")
        gate.set()
        await is_looked_through(broker, handler)
    assert (handler.most, handler.count("held"), handler.count("behind")) == (1, 2, 1)


async def is_parked(rollback: Rollback) -> bool:
    return bool(await ask(rollback.url, "ZCARD", Keys().retry(STREAM, GROUP)))


async def is_not_parked(rollback: Rollback) -> bool:
    return not await is_parked(rollback)


async def test_another_message_under_the_id_of_one_in_hand_is_not_acknowledged_unseen(
    broker: Broker, rollback: Rollback, handler: Handler
) -> None:
    """The server's clock went back as well: it has lost a message, and gives its ID to another."""
    gate = handler.hold("lost")
    async with broker.subscribe(TOPIC, group=GROUP, handler=handler, options=impatient()) as subscription:
        await broker.send(TOPIC, "first")
        await finished(broker, TOPIC, GROUP)
        await rollback.keep()
        id = await broker.send(TOPIC, "lost")
        await handler.has("lost")
        await rollback.lose()
        await ask(rollback.url, "XADD", STREAM, id, "payload", '"other"', "timestamp", 1)
        await handler.has("other")
        gate.set()
        await is_looked_through(broker, handler)
        assert subscription.health().healthy
    assert (handler.count("lost"), handler.count("other")) == (1, 1)


# --- what was settled -------------------------------------------------------------------------------------------


def paused(subscription: Subscription, handler: Handler) -> None:
    subscription.pause()


def busy(subscription: Subscription, handler: Handler) -> None:
    """It has no room for more, so it waits for no news."""
    handler.hold("busy")


def waiting(subscription: Subscription, handler: Handler) -> None:
    """It waits at the server, and sees it go."""


@pytest.mark.parametrize("doing", [paused, busy, waiting], ids=lambda doing: str(doing.__name__))
async def test_an_acknowledgment_that_was_forgotten_is_made_up_for(
    broker: Broker, rollback: Rollback, handler: Handler, doing: Callable[[Subscription, Handler], None]
) -> None:
    """Whatever the owner does at that moment. Else the entry would be pending as long as the owner lives."""
    gate = handler.hold("done")
    async with broker.subscribe(TOPIC, group=GROUP, handler=handler, options=impatient(max_inflight=1)) as subscription:
        id = await broker.send(TOPIC, "done")
        await handler.has("done")
        await rollback.keep()
        doing(subscription, handler)
        gate.set()
        if doing is busy:
            await broker.send(TOPIC, "busy")
            await handler.has("busy")
        await eventually(lambda: is_settled(rollback, id), "it is acknowledged")
        await rollback.lose()
        subscription.resume()
        for held in handler.gates.values():
            held.set()
        await is_looked_through(broker, handler)
    assert (handler.most, handler.count("done")) == (1, 2)


async def is_pending(rollback: Rollback, id: str) -> bool:
    return id in await pending(rollback.url, STREAM, GROUP)


async def is_settled(rollback: Rollback, id: str) -> bool:
    return not await is_pending(rollback, id)


@pytest.mark.parametrize("order", ORDERS)
async def test_a_retry_that_was_forgotten_is_made_up_for(
    broker: Broker, rollback: Rollback, handler: Handler, order: Order
) -> None:
    """It was taken, has failed and was parked, all of it after the last that was kept: it is new once more."""
    handler.failing.add("held")
    options = impatient(order=order, backoff=LATER)
    async with broker.subscribe(TOPIC, group=GROUP, handler=handler, options=options) as subscription:
        await broker.send(TOPIC, "first", key="k")
        await finished(broker, TOPIC, GROUP)
        await taken_after_all_was_kept(broker, rollback, subscription, "k")
        await eventually(lambda: is_parked(rollback), "it waits for its next attempt")
        handler.failing.clear()
        await rollback.lose()
        assert await is_not_parked(rollback)
        await handler.has("held", 2)
        await broker.send(TOPIC, "behind", key="k")
        await is_looked_through(broker, handler)
    assert handler.payloads[:3] == ["first", "held", "held"]
    assert handler.count("behind") == 1


@pytest.mark.parametrize("order", ORDERS)
async def test_one_that_fails_after_it_was_forgotten_holds_nobody_up(
    broker: Broker, rollback: Rollback, handler: Handler, order: Order
) -> None:
    """The message itself is lost: its failure cannot be noted anywhere, and nobody waits for its next attempt."""
    gate = handler.hold("lost")
    handler.failing.add("lost")
    options = impatient(order=order, backoff=LATER)
    async with broker.subscribe(TOPIC, group=GROUP, handler=handler, options=options):
        await broker.send(TOPIC, "first", key="k")
        await finished(broker, TOPIC, GROUP)
        await rollback.keep()
        await broker.send(TOPIC, "lost", key="k")
        await handler.has("lost")
        await rollback.lose()
        gate.set()
        await broker.send(TOPIC, "behind", key="k")
        await handler.has("behind")
        await is_looked_through(broker, handler)
    assert handler.count("lost") == 1


async def test_a_dead_letter_that_was_forgotten_is_written_again_and_is_there_once(
    broker: Broker, rollback: Rollback
) -> None:
    async def refuse(message: Message) -> None:
        raise Reject("no")

    seen = Recorder(refuse)
    async with broker.subscribe(TOPIC, group=GROUP, handler=seen, options=impatient()) as subscription:
        await taken_after_all_was_kept(broker, rollback, subscription, "k")
        before = await buried(broker, TOPIC)
        await rollback.lose()
        await eventually(lambda: len(seen.messages) > 1, "it is handled again")
        [letter] = await buried(broker, TOPIC)
        await finished(broker, TOPIC, GROUP)
    assert (letter.original_id, letter.payload) == (before[0].original_id, "held")
    assert seen.payloads == ["held", "held"]


async def test_what_is_settled_along_with_a_look_at_the_pending_list_is_not_begun_again(
    broker: Broker, rollback: Rollback, handler: Handler
) -> None:
    """A server that was restarted has lost its scripts too. It is sent those again, so that one runs after the others
    of the same write: here the look before the acknowledgment."""
    gate = handler.hold("done")
    async with broker.subscribe(TOPIC, group=GROUP, handler=handler, options=impatient(max_inflight=1)) as subscription:
        await broker.send(TOPIC, "done")
        await handler.has("done")
        subscription._worker.partitions[STREAM].partition.distrust()
        await ask(rollback.url, "SCRIPT", "FLUSH")
        await ask(rollback.url, "SCRIPT", "LOAD", Script.named("takeover").text)
        gate.set()
        await is_looked_through(broker, handler)
    assert handler.count("done") == 1


# --- all at once ------------------------------------------------------------------------------------------------


async def test_all_that_the_server_still_has_is_handled_and_what_it_lost_is_lost(
    broker: Broker, rollback: Rollback, handler: Handler
) -> None:
    """While messages flow: no key is out of order, and nothing is acknowledged that was not handled."""
    going = True
    sent: list[int] = []

    async def produce() -> None:
        while going:
            try:
                await broker.send(TOPIC, len(sent), key=str(len(sent) % 3))
            except QueueError:
                await asyncio.sleep(0.01)  # what a program does that tries again, and not without end
            else:
                sent.append(len(sent))

    async with broker.subscribe(TOPIC, group=GROUP, handler=handler, options=impatient(batch_size=7)):
        producing = asyncio.create_task(produce())
        await eventually(lambda: len(handler.messages) > 50, "messages flow")
        kept = len(sent)
        await rollback.keep()
        await eventually(lambda: len(sent) > kept + 50, "messages flow")
        await rollback.lose()
        lost = len(sent)
        await eventually(lambda: len(sent) > lost + 50, "messages flow")
        going = False
        await producing
        await finished(broker, TOPIC, GROUP)
    there = {int(fields["payload"]) for _, fields in await ask(rollback.url, "XRANGE", STREAM, "-", "+")}
    assert there <= set(handler.payloads)
    assert set(range(kept)) <= there
    firsts = list(dict.fromkeys(handler.payloads))
    for key in range(3):
        of_key = [number for number in firsts if number % 3 == key]
        assert of_key == sorted(of_key)
    assert handler.most == 1
