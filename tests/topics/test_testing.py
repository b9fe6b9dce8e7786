"""What users get for their own tests works for ours."""

from __future__ import annotations

import pytest

from conquiet import Message, Outgoing, RetryPolicy, SubscribeOptions
from conquiet.kit.policy import Backoff
from conquiet.testing import drain, embedded_broker

pytestmark = pytest.mark.any_server

PATIENT = RetryPolicy(max_retries=2, backoff=Backoff(base=60.0, cap=60.0, kind="fixed"))


async def test_a_group_is_drained_once_everything_was_handled() -> None:
    async with embedded_broker() as (broker, _):
        await broker.create_topic("orders", partitions=3)
        await broker.send_batch("orders", [Outgoing(number) for number in range(20)])
        handled: list[int] = []

        async def handle(message: Message) -> None:
            handled.append(message.payload)

        async with broker.subscribe("orders", group="billing", handler=handle):
            await drain(broker, "orders", "billing")
        assert sorted(handled) == list(range(20))


@pytest.mark.slow
async def test_retries_need_not_be_waited_for() -> None:
    async with embedded_broker() as (broker, clock):
        await broker.create_topic("orders")
        await broker.send("orders", 1)
        attempts: list[int] = []

        async def fail(message: Message) -> None:
            attempts.append(message.retry_count)
            raise RuntimeError

        options = SubscribeOptions(retry=PATIENT, poll_timeout=0.05)
        async with broker.subscribe("orders", group="billing", handler=fail, options=options):
            await drain(broker, "orders", "billing", clock=clock, timeout=30.0)
        assert attempts == [0, 1, 2]
        assert [letter.raw for letter in await broker.admin.dead_letters("orders")] == [b"1"]


async def test_what_is_never_finished_is_not_waited_for_for_ever() -> None:
    async with embedded_broker() as (broker, _):
        await broker.create_topic("orders")
        async with broker.consume("orders", group="billing"):
            await broker.send("orders", 1)
            with pytest.raises(TimeoutError):
                await drain(broker, "orders", "billing", timeout=0.2)
