"""Two consumers of a group share a topic; one is killed with kill -9, and the other takes its partitions over.

Nobody has to ask for that: a lease that is not renewed runs out, and whoever is left takes the partition together
with what the dead consumer had not finished.
"""

from __future__ import annotations

import asyncio
import sys

from conquiet import Broker, EmbeddedRedis, GroupInfo, Message, Outgoing, SubscribeOptions

ORDERS = 400


def options_of(name: str) -> SubscribeOptions:
    # A short lease, so that nobody has to wait here; the default of 15 seconds is a better one for real work.
    return SubscribeOptions(consumer=name, lease_ttl=1.0, max_inflight=10)


async def handle(message: Message) -> None:
    await asyncio.sleep(0.01)  # the work
    print(message.payload["order"], flush=True)


async def victim(url: str) -> None:
    """What the second process does."""
    async with (
        Broker.connect(url) as broker,
        broker.subscribe("orders", group="billing", handler=handle, options=options_of("victim")) as subscription,
    ):
        await subscription.wait()


def owners(group: GroupInfo) -> dict[int, str | None]:
    return {part.index: part.owner for part in group.partitions}


async def shared(broker: Broker) -> dict[int, str | None]:
    """Who owns which partition, once both consumers own some."""
    while True:
        group = await broker.admin.describe_group("orders", "billing")
        if {*owners(group).values()} == {"survivor", "victim"}:
            return owners(group)
        await asyncio.sleep(0.05)


async def finished(broker: Broker) -> dict[int, str | None]:
    """Who owns which partition, once all messages are acknowledged."""
    while True:
        group = await broker.admin.describe_group("orders", "billing")
        if group.lag == group.pending == 0:
            return owners(group)
        await asyncio.sleep(0.05)


async def main() -> None:
    mine: list[int] = []

    async def handle_here(message: Message) -> None:
        await asyncio.sleep(0.01)
        mine.append(message.payload["order"])

    async with EmbeddedRedis() as server, Broker.connect(server.url) as broker:
        await broker.create_topic("orders", partitions=4)
        options = options_of("survivor")
        async with broker.subscribe("orders", group="billing", handler=handle_here, options=options):
            other = await asyncio.create_subprocess_exec(
                sys.executable, __file__, server.url, stdout=asyncio.subprocess.PIPE
            )
            assert other.stdout is not None
            print("shared:     ", await shared(broker))

            orders = [Outgoing({"order": number}, key=f"customer-{number % 20}") for number in range(ORDERS)]
            await broker.send_batch("orders", orders)
            first = await other.stdout.readline()
            other.kill()
            rest, _ = await other.communicate()
            theirs = [int(number) for number in (first + rest).split()]
            page = await broker.admin.pending("orders", "billing")
            held = sum(entry.consumer == "victim" for entry in page.entries)
            print(f"killed:      it had handled {len(theirs)} and held {held} that were not acknowledged")

            print("taken over: ", await finished(broker))

        lost = {*range(ORDERS)} - {*mine} - {*theirs}
        again = {*mine} & {*theirs}
        print(f"{ORDERS} sent, {len(mine)} handled by the survivor, {len(again)} of them again, {len(lost)} lost")


if __name__ == "__main__":
    asyncio.run(victim(sys.argv[1]) if len(sys.argv) == 2 else main())
