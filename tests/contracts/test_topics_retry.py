"""Failures, retries, dead letters and replay, as a user sees them."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conquiet import Backoff, Broker, ConfigError, DeadLetterPolicy, Message, Outgoing, Reject, Retry
from conquiet.kit.clock import ManualClock
from tests.contracts.topics_flavours import FLAVOURS, Recorder, buried, finished, impatient, opened, serving
from tests.rigs.lanes import chosen
from tests.rigs.waiting import eventually

pytestmark = pytest.mark.guarantee

MODES = pytest.mark.parametrize("mode", ["park", "requeue"])


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=chosen(FLAVOURS))
def flavour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def broker(flavour: str, url: str, clock: ManualClock) -> AsyncIterator[Broker]:
    async with opened(flavour, url, clock=clock) as broker:
        await broker.create_topic("orders", partitions=2)
        yield broker


def fail_times(times: int) -> Recorder:
    """A handler that fails so many times for each message."""

    def act(message: Message) -> None:
        if message.retry_count < times:
            raise RuntimeError(f"attempt {message.retry_count}")

    return Recorder(act)


def refuse(reason: str) -> Recorder:
    """A handler that rejects whatever was not replayed."""

    def act(message: Message) -> None:
        if message.replayed_from is None:
            raise Reject(reason)

    return Recorder(act)


def likeness(message: Message) -> tuple[Any, ...]:
    return (message.topic, message.partition, message.key, message.payload, message.headers, message.timestamp)


# --- retries --------------------------------------------------------------------------------------------------------


@MODES
async def test_what_fails_is_tried_again_and_is_the_same_but_for_its_count(broker: Broker, mode: str) -> None:
    seen = fail_times(2)
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(mode=mode)):
        id = await broker.send("orders", {"n": 1}, key="k", headers={"a": "b"})
        await seen.saw(3)
        await finished(broker, "orders", "g")
    assert [message.retry_count for message in seen.messages] == [0, 1, 2]
    assert [likeness(message) for message in seen.messages] == [likeness(seen.messages[0])] * 3
    assert {message.original_id for message in seen.messages} == {f"{id.partition}/{id}"}
    assert await broker.admin.dead_letters("orders") == []


@MODES
async def test_after_the_last_retry_it_is_a_dead_letter(broker: Broker, mode: str) -> None:
    """spec 3: DLQ: send on terminal failure; include original topic, partitionId, originalMessageId, retryCount."""
    seen = fail_times(9)
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(mode=mode, max_retries=2)):
        id = await broker.send("orders", {"n": 1}, key="k", headers={"a": "b"})
        [letter] = await buried(broker, "orders")
        await finished(broker, "orders", "g")
    assert len(seen.messages) == 3
    assert (letter.topic, letter.partition, letter.group) == ("orders", id.partition, "g")
    assert (letter.payload, letter.key, letter.headers) == ({"n": 1}, "k", {"a": "b"})
    assert (letter.attempts, letter.error, letter.error_type) == (3, "attempt 2", "RuntimeError")
    assert "in act" in letter.traceback
    assert letter.failed_at is not None
    assert letter.first_failed_at is not None
    assert letter.first_failed_at <= letter.failed_at
    if mode == "park":
        assert letter.original_id == id


async def test_a_messages_own_max_retries_wins(broker: Broker) -> None:
    seen = fail_times(9)
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(max_retries=5)):
        await broker.send("orders", 1, max_retries=1)
        [letter] = await buried(broker, "orders")
    assert (len(seen.messages), letter.attempts) == (2, 2)


async def test_a_retry_waits_for_its_backoff(broker: Broker, clock: ManualClock) -> None:
    seen = fail_times(1)
    options = impatient(backoff=Backoff(base=60, cap=60, kind="fixed"), lease_ttl=600)
    async with broker.subscribe("orders", group="g", handler=seen, options=options):
        await broker.send("orders", 1)
        await eventually(lambda: _parked(broker), "the message waits")
        await seen.saw(1)
        clock.advance(60)
        await seen.saw(2)
        await finished(broker, "orders", "g")


async def _parked(broker: Broker) -> bool:
    info = await broker.admin.describe_group("orders", "g")
    return sum(part.retry_depth for part in info.partitions) == 1


async def test_a_handler_may_say_when_to_try_again(broker: Broker, clock: ManualClock) -> None:
    def act(message: Message) -> None:
        if message.retry_count == 0:
            raise Retry("not yet", delay=60)

    seen = Recorder(act)
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(lease_ttl=600)):
        await broker.send("orders", 1)
        await eventually(lambda: _parked(broker), "the message waits")
        [entry] = (await broker.admin.pending("orders", "g")).entries
        assert (entry.failures, entry.error_type) == (1, "conquiet.errors.Retry")
        assert len(seen.messages) == 1
        clock.advance(60)
        await seen.saw(2)
        await finished(broker, "orders", "g")


async def test_reject_is_a_dead_letter_at_once(broker: Broker) -> None:
    seen = refuse("not one of ours")
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient()):
        await broker.send("orders", 1)
        [letter] = await buried(broker, "orders")
    assert len(seen.messages) == 1
    assert (letter.reason, letter.error, letter.attempts) == ("rejected", "not one of ours", 1)


async def test_errors_that_are_not_to_be_retried_are_not(broker: Broker) -> None:
    seen = fail_times(9)
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(retry_on=OSError)):
        await broker.send("orders", 1)
        await buried(broker, "orders")
    assert len(seen.messages) == 1


async def test_another_group_sees_nothing_of_a_failure(broker: Broker) -> None:
    bad, good = fail_times(9), Recorder()
    async with (
        broker.subscribe("orders", group="bad", handler=bad, options=impatient(mode="requeue", max_retries=2)),
        broker.subscribe("orders", group="good", handler=good, options=impatient()),
    ):
        await broker.send_batch("orders", [Outgoing(n) for n in range(5)])
        await buried(broker, "orders", 5)
        await finished(broker, "orders", "bad", "good")
    assert sorted(good.payloads) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("order", ["block_key", "block_partition"])
async def test_the_order_of_a_key_may_be_kept_through_retries(broker: Broker, order: str) -> None:
    seen = Recorder(lambda message: _once(message))
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(order=order)):
        await broker.send_batch("orders", [Outgoing(n, key="k") for n in range(5)])
        await finished(broker, "orders", "g")
    assert [(message.payload, message.retry_count) for message in seen.messages] == [
        (n, count) for n in range(5) for count in (0, 1)
    ]


def _once(message: Message) -> None:
    if message.retry_count == 0:
        raise RuntimeError


async def test_a_serial_subscription_retries_too(broker: Broker) -> None:
    seen = fail_times(1)
    async with serving(broker.subscribe("orders", group="g", handler=seen, options=impatient(max_inflight=1))):
        await broker.send_batch("orders", [Outgoing(n) for n in range(5)])
        await finished(broker, "orders", "g")
    assert sorted(seen.payloads) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


async def test_a_handler_that_takes_too_long_has_failed(broker: Broker) -> None:
    late = threading.Event()

    def act(message: Message) -> None:
        if message.retry_count == 0:
            late.wait(0.2)

    seen = Recorder(act)
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(handler_timeout=0.05)):
        await broker.send("orders", 1)
        await seen.saw(2)
        await finished(broker, "orders", "g")
    assert [message.retry_count for message in seen.messages] == [0, 1]


# --- dead letters ---------------------------------------------------------------------------------------------------


async def test_a_dead_letter_tells_no_more_than_it_may(broker: Broker) -> None:
    def forget(fields: dict[bytes, bytes]) -> dict[bytes, bytes]:
        return {**fields, b"payload": b'"***"'}

    policy = DeadLetterPolicy(max_error_chars=4, include_traceback=False, drop_headers=("password",), transform=forget)
    async with broker.subscribe("orders", group="g", handler=refuse("secret"), options=impatient(dead_letter=policy)):
        await broker.send("orders", 1, headers={"password": "s3cr3t", "trace": "abc"})
        [letter] = await buried(broker, "orders")
    assert (letter.payload, letter.headers, letter.traceback) == ("***", {"trace": "abc"}, "")
    assert letter.error.startswith("secr")
    assert "secret" not in letter.error


async def test_dead_letters_are_paged_and_filtered(broker: Broker) -> None:
    async with (
        broker.subscribe("orders", group="one", handler=refuse("1"), options=impatient()),
        broker.subscribe("orders", group="other", handler=refuse("2"), options=impatient()),
    ):
        await broker.send_batch("orders", [Outgoing(n) for n in range(3)])
        letters = await buried(broker, "orders", 6)
    admin = broker.admin
    first = await admin.dead_letters("orders", count=4)
    assert first + await admin.dead_letters("orders", count=4, after=first[-1].id) == letters
    assert {letter.error for letter in await admin.dead_letters("orders", group="one")} == {"1"}
    assert await admin.purge("orders", ids=[letters[0].id]) == 1
    assert await admin.purge("orders", group=letters[0].group) == 2
    assert await admin.purge("orders") == 3
    assert await admin.purge("orders") == 0
    with pytest.raises(ConfigError, match="ids"):
        await admin.purge("orders", ids="1-0")


async def test_a_replayed_letter_goes_to_its_group_only_and_tells_its_origin(broker: Broker) -> None:
    seen, other = refuse("later"), Recorder()
    async with (
        broker.subscribe("orders", group="g", handler=seen, options=impatient()),
        broker.subscribe("orders", group="other", handler=other, options=impatient()),
    ):
        id = await broker.send("orders", {"n": 1}, key="k", headers={"a": "b"})
        await buried(broker, "orders")
        assert await broker.admin.replay("orders") == 1
        await seen.saw(2)
        await finished(broker, "orders", "g", "other")
    first, again = seen.messages
    assert likeness(first) == likeness(again)
    assert (again.replayed_from, again.retry_count) == (f"{id.partition}/{id}", 0)
    assert len(other.messages) == 1
    assert await broker.admin.dead_letters("orders") == []
    assert await broker.admin.replay("orders") == 0


async def test_replay_chooses_by_id_and_by_group(broker: Broker) -> None:
    one, other = refuse("1"), refuse("2")
    async with (
        broker.subscribe("orders", group="one", handler=one, options=impatient()),
        broker.subscribe("orders", group="other", handler=other, options=impatient()),
    ):
        await broker.send_batch("orders", [Outgoing(n) for n in range(3)])
        letters = await buried(broker, "orders", 6)
        chosen = next(letter for letter in letters if letter.group == "one")
        assert await broker.admin.replay("orders", ids=[chosen.id]) == 1
        await one.saw(4)
        assert await broker.admin.replay("orders", group="other") == 3
        await other.saw(6)
        assert {letter.group for letter in await broker.admin.dead_letters("orders")} == {"one"}
    assert one.payloads[3] == chosen.payload
