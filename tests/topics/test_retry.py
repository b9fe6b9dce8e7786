"""What becomes of messages whose handlers fail: how often, when and for whom they are tried again."""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conquiet import Backoff, ConfigError, Outgoing, Reject, Retry
from conquiet.kit.clock import ManualClock
from conquiet.message import Message
from conquiet.topics import Broker, DeadLetterPolicy
from conquiet.wire.keys import Keys
from tests.rigs.waiting import eventually
from tests.topics.consuming import Recorder, buried, finished, impatient
from tests.topics.staging import Stage

pytestmark = [pytest.mark.cluster_too, pytest.mark.guarantee]


@pytest.fixture
async def broker(url: str, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(url, namespace=keys.namespace, clock=clock) as broker:
        await broker.create_topic("orders", partitions=2)
        yield broker


async def fail(message: Message) -> None:
    raise ValueError("no good")


async def parked(broker: Broker, stage: Stage, count: int, group: str = "g") -> None:
    """Return once so many entries wait for their retry."""

    async def are() -> bool:
        info = await broker.admin.describe_group("orders", group)
        return sum(part.retry_depth for part in info.partitions) == count

    await eventually(are, f"{count} parked entries")


# --- how often ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["park", "requeue"])
@pytest.mark.parametrize(("policy", "own", "attempts"), [(2, None, 3), (0, None, 1), (2, 0, 1), (0, 2, 3)])
async def test_a_message_is_tried_again_as_often_as_policy_and_message_say(
    broker: Broker, mode: str, policy: int, own: int | None, attempts: int
) -> None:
    seen = Recorder(fail)
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(max_retries=policy, mode=mode)):
        await broker.send("orders", 1, max_retries=own)
        [letter] = await buried(broker, "orders")
        await finished(broker, "orders", "g")
    assert [message.retry_count for message in seen.messages] == list(range(attempts))
    assert (letter.attempts, letter.reason) == (attempts, "retries exhausted")


async def test_a_dead_letter_tells_everything(broker: Broker) -> None:
    """spec 3: include original topic, partitionId, originalMessageId, retryCount, failed stack cause."""
    before = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=1)
    options = impatient(max_retries=1, consumer="worker-7")
    async with broker.subscribe("orders", group="g", handler=fail, options=options):
        id = await broker.send("orders", {"id": 1}, key="k", headers={"trace": "abc"}, message_id="m", partition=1)
        [letter] = await buried(broker, "orders")
    assert (letter.topic, letter.partition, letter.group, letter.original_id) == ("orders", 1, "g", id)
    assert (letter.key, letter.payload, letter.headers) == ("k", {"id": 1}, {"trace": "abc"})
    assert (letter.attempts, letter.crashes, letter.reason) == (2, 0, "retries exhausted")
    assert (letter.error_type, letter.error) == ("ValueError", "no good")
    assert "in fail" in letter.traceback
    assert letter.traceback.endswith("ValueError: no good\n")
    assert letter.first_failed_at is not None
    assert letter.failed_at is not None
    assert before <= letter.first_failed_at <= letter.failed_at
    assert letter.consumer.startswith("worker-7")
    fields = dict(zip(letter.fields[::2], letter.fields[1::2], strict=True))
    assert (fields[b"payload"], fields[b"messageId"]) == (b'{"id":1}', b"m")


@pytest.mark.any_server
async def test_the_first_failure_is_remembered_until_the_last(broker: Broker, stage: Stage, clock: ManualClock) -> None:
    options = impatient(max_retries=1, backoff=Backoff(60.0, 60.0, "fixed"), lease_ttl=600.0)
    async with broker.subscribe("orders", group="g", handler=fail, options=options):
        await broker.send("orders", 1)
        await parked(broker, stage, 1)
        clock.advance(61.0)
        [letter] = await buried(broker, "orders")
    assert letter.first_failed_at is not None
    assert letter.failed_at is not None
    assert letter.failed_at - letter.first_failed_at >= dt.timedelta(seconds=60)


@pytest.mark.any_server
async def test_reject_makes_a_dead_letter_at_once(broker: Broker) -> None:
    async def reject(message: Message) -> None:
        raise Reject("because")

    seen = Recorder(reject)
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient()):
        await broker.send("orders", 1)
        [letter] = await buried(broker, "orders")
    assert len(seen.messages) == 1
    assert (letter.reason, letter.error, letter.attempts) == ("rejected", "because", 1)


@pytest.mark.any_server
@pytest.mark.parametrize(
    ("policy", "attempts"),
    [
        ({"give_up_on": ValueError}, 1),
        ({"give_up_on": (KeyError, LookupError)}, 4),
        ({"retry_on": OSError}, 1),
        ({"retry_on": (ValueError, OSError)}, 4),
        ({"retry_on": Exception, "give_up_on": (OSError, ValueError)}, 1),
    ],
)
async def test_only_failures_that_the_policy_names_are_tried_again(
    broker: Broker, policy: dict[str, Any], attempts: int
) -> None:
    seen = Recorder(fail)
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(**policy)):
        await broker.send("orders", 1)
        [letter] = await buried(broker, "orders")
    assert len(seen.messages) == letter.attempts == attempts
    assert letter.reason == ("not to be retried" if attempts == 1 else "retries exhausted")


@pytest.mark.any_server
async def test_retry_counts_whatever_the_policy_says_of_errors(broker: Broker) -> None:
    async def ask(message: Message) -> None:
        raise Retry("later", delay=0)

    seen = Recorder(ask)
    options = impatient(max_retries=2, retry_on=OSError, give_up_on=Retry)
    async with broker.subscribe("orders", group="g", handler=seen, options=options):
        await broker.send("orders", 1)
        [letter] = await buried(broker, "orders")
    assert (len(seen.messages), letter.error, letter.reason) == (3, "later", "retries exhausted")


@pytest.mark.any_server
async def test_a_delay_that_is_no_time_is_refused() -> None:
    for delay in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="delay"):
            Retry(delay=delay)


# --- when -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["park", "requeue"])
async def test_a_retry_waits_its_time_and_no_longer(
    broker: Broker, clock: ManualClock, mode: str, stage: Stage
) -> None:
    async def fail_twice(message: Message) -> None:
        if message.retry_count < 2:
            raise RuntimeError

    seen = Recorder(fail_twice)
    options = impatient(backoff=Backoff(100.0, 1000.0, "exponential"), mode=mode, lease_ttl=10_000.0)
    async with broker.subscribe("orders", group="g", handler=seen, options=options):
        await broker.send("orders", 1, partition=0)
        for attempt, delay in ((1, 100.0), (2, 200.0)):
            await seen.saw(attempt)
            await waiting(stage, mode)
            clock.advance(delay - 20)
            assert await still(seen, attempt)
            clock.advance(21.0)
        await seen.saw(3)
        await finished(broker, "orders", "g")


async def waiting(stage: Stage, mode: str) -> None:
    stream = stage.instance.keys.partition("orders", 0)
    key = stage.instance.keys.retry(stream, "g") if mode == "park" else stage.instance.keys.delayed(stream)

    async def is_there() -> bool:
        return bool(await stage.call(key, "ZCARD", key) == 1)

    await eventually(is_there, "the entry to wait for its retry")


async def still(seen: Recorder, count: int) -> bool:
    """Whether nothing more comes, although the consumer looks: that is, several polls later."""
    try:
        await eventually(lambda: len(seen.messages) > count, "one too many", 0.25)
    except AssertionError:
        return True
    return False


@pytest.mark.any_server
async def test_a_handler_can_say_when_to_try_again(broker: Broker, stage: Stage, clock: ManualClock) -> None:
    async def ask_first(message: Message) -> None:
        if message.retry_count == 0:
            raise Retry(delay=500.0)

    seen = Recorder(ask_first)
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(lease_ttl=10_000.0)):
        await broker.send("orders", 1)
        await parked(broker, stage, 1)
        clock.advance(480.0)
        assert await still(seen, 1)
        clock.advance(21.0)
        await seen.saw(2)


@pytest.mark.any_server
async def test_jitter_spreads_what_failed_together(broker: Broker, stage: Stage) -> None:
    options = impatient(backoff=Backoff(1000.0, 1000.0, "full_jitter"))
    async with broker.subscribe("orders", group="g", handler=fail, options=options):
        await broker.send_batch("orders", [Outgoing(number, partition=0) for number in range(50)])
        await parked(broker, stage, 50)
        key = stage.instance.keys.retry(stage.instance.keys.partition("orders", 0), "g")
        flat = await stage.call(key, "ZRANGE", key, 0, -1, "WITHSCORES")
        seconds, micros = await stage.call(key, "TIME")
    waits = [float(score) - int(seconds) * 1000 - int(micros) / 1000 for score in flat[1::2]]
    assert -10_000 < min(waits) < max(waits) <= 1_000_000
    assert max(waits) - min(waits) > 200_000


class Untold(Exception):
    """An error that cannot even be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.any_server
async def test_an_error_that_cannot_be_printed_is_a_failure_like_any_other(broker: Broker) -> None:
    async def fail_untold(message: Message) -> None:
        if message.payload == 0:
            raise Untold

    seen = Recorder(fail_untold)
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(max_retries=1)):
        await broker.send_batch("orders", [Outgoing(number, partition=0) for number in range(3)])
        [letter] = await buried(broker, "orders")
        await finished(broker, "orders", "g")
    assert (letter.payload, letter.attempts) == (0, 2)
    assert letter.error_type.endswith("Untold")


@pytest.mark.any_server
async def test_a_transform_that_fails_costs_no_letter(broker: Broker) -> None:
    def broken(fields: dict[bytes, bytes]) -> dict[bytes, bytes]:
        raise RuntimeError("no transform")

    policy = DeadLetterPolicy(transform=broken)
    async with broker.subscribe(
        "orders", group="g", handler=fail, options=impatient(max_retries=0, dead_letter=policy)
    ):
        await broker.send_batch("orders", [Outgoing(number) for number in range(3)])
        letters = await buried(broker, "orders", 3)
        await finished(broker, "orders", "g")
    assert sorted(letter.payload for letter in letters) == [0, 1, 2]


# --- whose ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["park", "requeue"])
async def test_other_groups_see_nothing_of_a_groups_retries(broker: Broker, mode: str) -> None:
    async def fail_thrice(message: Message) -> None:
        if message.retry_count < 3:
            raise RuntimeError

    failing, other = Recorder(fail_thrice), Recorder()
    async with (
        broker.subscribe("orders", group="failing", handler=failing, options=impatient(mode=mode)),
        broker.subscribe("orders", group="other", handler=other, options=impatient(mode=mode)),
    ):
        await broker.send_batch("orders", [Outgoing(number, key=str(number)) for number in range(10)])
        await failing.saw(40)
        await finished(broker, "orders", "failing", "other")
    assert sorted(failing.payloads) == sorted([*range(10)] * 4)
    assert sorted(other.payloads) == list(range(10))
    assert {message.retry_count for message in other.messages} == {0}


async def test_a_parked_message_keeps_its_place_and_its_id(broker: Broker, stage: Stage) -> None:
    options = impatient(backoff=Backoff(1000.0, 1000.0, "fixed"))
    async with broker.subscribe("orders", group="g", handler=fail, options=options):
        id = await broker.send("orders", 1, partition=0)
        await parked(broker, stage, 1)
        stream = stage.instance.keys.partition("orders", 0)
        assert [row[0].decode() for row in await stage.call(stream, "XPENDING", stream, "g", "-", "+", 9)] == [id]
        assert await stage.call(stream, "XLEN", stream) == 1


async def test_a_requeued_message_is_a_new_entry_for_that_group_alone(broker: Broker, stage: Stage) -> None:
    """spec 3: Re-enqueue strategy: ACK + XADD new record with retryCount+1 (simple, new messageId)."""

    async def fail_once(message: Message) -> None:
        if message.retry_count == 0:
            raise RuntimeError

    seen = Recorder(fail_once)
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(mode="requeue")):
        id = await broker.send("orders", 1, key="k", partition=0)
        await finished(broker, "orders", "g")
        await seen.saw(2)
    stream = stage.instance.keys.partition("orders", 0)
    first, again = await stage.call(stream, "XRANGE", stream, "-", "+")
    copied = dict(zip(again[1][::2], again[1][1::2], strict=True))
    extra = {b"retryCount": b"1", b"originalMessageId": f"0/{id}".encode(), b"onlyGroup": b"g"}
    assert copied == {**dict(zip(first[1][::2], first[1][1::2], strict=True)), **extra}
