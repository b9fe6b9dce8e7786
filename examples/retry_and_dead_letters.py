"""A message fails, is tried again with a growing delay, becomes a dead letter, is looked at, and is replayed.

Meanwhile all other messages go on.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable

from conquiet import Backoff, Broker, EmbeddedRedis, Message, Reject, RetryPolicy, SubscribeOptions

OPTIONS = SubscribeOptions(retry=RetryPolicy(max_retries=2, backoff=Backoff(base=0.2, cap=30.0, kind="exponential")))


def cents(price: str) -> int:
    return round(float(price) * 100)


def cents_fixed(price: str) -> int:
    return cents(price.replace(",", "."))


async def consume(broker: Broker, parse: Callable[[str], int]) -> None:
    """Handle messages with ``parse`` until none is left."""
    start = time.monotonic()

    async def handle(message: Message) -> None:
        at = f"{time.monotonic() - start:4.1f} s  order {message.payload['order']}, attempt {message.retry_count + 1}"
        if message.payload["price"] == "":
            print(f"{at}: rejected")
            raise Reject("an order without a price")  # no use in trying again
        try:
            print(f"{at}: {parse(message.payload['price'])} cents")
        except ValueError:
            print(f"{at}: failed")
            raise

    async with broker.subscribe("orders", group="billing", handler=handle, options=OPTIONS):
        while True:
            group = await broker.admin.describe_group("orders", "billing")
            if group.lag == group.pending == 0:
                return
            await asyncio.sleep(0.02)


async def main() -> None:
    logging.basicConfig(stream=sys.stdout, format="         log: %(message)s")
    async with EmbeddedRedis() as server, Broker.connect(server.url) as broker:
        await broker.create_topic("orders", partitions=2)
        for number, price in enumerate(["12.50", "12,50", "", "9.99"], start=1):
            await broker.send("orders", {"order": number, "price": price}, key=f"customer-{number}")
        await consume(broker, cents)

        letters = await broker.admin.dead_letters("orders")
        for letter in letters:
            print(f"dead: {letter.payload}, {letter.reason} after {letter.attempts} attempts: {letter.error}")

        # The code is corrected, and what can work now is given back to the group that it failed in.
        chosen = [letter.id for letter in letters if letter.error_type == "ValueError"]
        print(f"replayed: {await broker.admin.replay('orders', ids=chosen)}")
        await consume(broker, cents_fixed)
        print(f"purged: {await broker.admin.purge('orders')}")


if __name__ == "__main__":
    asyncio.run(main())
