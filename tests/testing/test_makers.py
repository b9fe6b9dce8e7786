"""Messages and jobs that users make for their own tests are what handlers get."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

import pytest

from conquiet import Broker, ConfigError, JobQueue, JobState, MemoryStore, Message, PayloadError, TypedCodec
from conquiet.jobs import Job
from conquiet.testing import embedded_broker, job, message

pytestmark = pytest.mark.any_server


@dataclass(frozen=True)
class Order:
    id: int
    placed: dt.date


def seen(message: Message) -> dict[str, object]:
    """What a handler can see of a message, but when it was sent."""
    names = [name for name in dir(Message) if not name.startswith("_") and "timestamp" not in name]
    return {name: getattr(message, name) for name in names if name not in ("fields", "id", "original_id", "epoch")}


async def test_a_message_is_what_the_handler_of_a_subscription_gets() -> None:
    async with embedded_broker() as (broker, _):
        await _compare(broker, "orders")


async def _compare(broker: Broker, topic: str) -> None:
    await broker.create_topic(topic)
    given = {"key": "k", "headers": {"trace": "abc"}, "message_id": "m-1", "max_retries": 7}
    await broker.send(topic, {"id": 1}, **given)  # type: ignore[arg-type]
    async with broker.consume(topic, group="billing") as messages:
        delivered = await messages.next(timeout=10)
        assert delivered is not None
        made = message({"id": 1}, topic=topic, group="billing", **given)  # type: ignore[arg-type]
        assert seen(made) == seen(delivered)
        assert made.fields.keys() == delivered.fields.keys()
        assert abs(made.timestamp - delivered.timestamp) < dt.timedelta(minutes=1)
        assert type(made.id) is type(delivered.id)
        await delivered.ack()


def test_a_message_needs_nothing_but_its_payload() -> None:
    made = message([1, 2])
    assert (made.payload, made.key, made.retry_count, made.headers) == ([1, 2], None, 0, {"partitionId": "0"})
    assert made.original_id == f"0/{made.id}"


def test_a_message_of_a_later_attempt() -> None:
    made = message(1, id="5-1", partition=3, retry_count=2, replayed_from="3/4-0")
    assert (made.id, made.partition, made.retry_count, made.replayed_from) == ("5-1", 3, 2, "3/4-0")
    assert made.timestamp_ms > 5  # the producer's clock


def test_a_message_has_the_payload_that_its_codec_reads() -> None:
    order = Order(1, dt.date(2026, 1, 2))
    assert message(order, codec=TypedCodec(Order)).payload == order


def test_what_could_not_be_sent_cannot_be_made() -> None:
    with pytest.raises(PayloadError):
        message({"when": object()})
    with pytest.raises(ConfigError):
        message(1, headers={"partitionId": "2"})
    with pytest.raises(PayloadError):
        job({1: 2})


async def test_a_job_is_what_the_handler_of_a_worker_gets() -> None:
    async with MemoryStore() as store:
        queue = JobQueue(store, "emails", lease_ttl=5.0)
        await queue.enqueue({"to": "ann"}, job_id="j-1", priority=3)
        [claimed] = await queue.claim(worker="w-1")
    made = job({"to": "ann"}, id="j-1", queue="emails", priority=3, worker="w-1")
    alike = [
        name for name in Job.__struct_fields__ if not name.endswith("_ms") and name not in ("lease_token", "claim_id")
    ]
    assert {name: getattr(made, name) for name in alike} == {name: getattr(claimed, name) for name in alike}
    assert made.payload == {"to": "ann"}
    assert made.lease_token > 0


def test_a_job_of_a_later_attempt() -> None:
    made = job(None, attempts=3, last_error="it broke")
    assert (made.state, made.attempts, made.last_error, made.is_finished) == (
        *(JobState.IN_FLIGHT, 3, "it broke"),
        False,
    )
