"""Messages of one key in order, those of different keys at the same time; and what a failure does to that.

One message of each customer fails at its first attempt. With ``order="unordered"``, the default, the messages behind
it go on meanwhile. With ``order="block_key"`` they wait, and those of other customers do not.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import defaultdict
from typing import Literal

from conquiet import Backoff, Broker, EmbeddedRedis, Message, Outgoing, RetryPolicy, SubscribeOptions

CUSTOMERS = ["alice", "bob", "carol"]
STEPS = 5
FAILS = 2


class Books:
    """Handles messages, and notes in which order that was and how many were at it at once."""

    def __init__(self) -> None:
        self.done: defaultdict[str, list[int]] = defaultdict(list)
        self.busy: set[str] = set()
        self.most_at_once = 0
        self.all_done = asyncio.Event()

    async def handle(self, message: Message) -> None:
        customer = str(message.key)
        assert customer not in self.busy, "never two of one key at a time"
        self.busy.add(customer)
        self.most_at_once = max(self.most_at_once, len(self.busy))
        await asyncio.sleep(0.02)  # the work
        self.busy.remove(customer)
        step = message.payload["step"]
        if step == FAILS and message.retry_count == 0:
            raise ConnectionError("the database is away")
        self.done[customer].append(step)
        if sum(map(len, self.done.values())) == len(CUSTOMERS) * STEPS:
            self.all_done.set()


async def consume(broker: Broker, order: Literal["unordered", "block_key"]) -> None:
    books = Books()
    retry = RetryPolicy(max_retries=3, backoff=Backoff(base=0.1, kind="fixed"))
    options = SubscribeOptions(order=order, retry=retry)
    # Each group gets all messages.
    async with broker.subscribe("payments", group=order, handler=books.handle, options=options):
        await books.all_done.wait()
    print(f"{order}: up to {books.most_at_once} at once")
    for customer in CUSTOMERS:
        print(f"  {customer:6}", *books.done[customer])


async def main() -> None:
    logging.basicConfig(stream=sys.stdout, format="  log: %(message)s")
    async with EmbeddedRedis() as server, Broker.connect(server.url) as broker:
        await broker.create_topic("payments", partitions=2)
        steps = [Outgoing({"step": step}, key=customer) for step in range(1, STEPS + 1) for customer in CUSTOMERS]
        await broker.send_batch("payments", steps)
        await consume(broker, "unordered")
        await consume(broker, "block_key")


if __name__ == "__main__":
    asyncio.run(main())
