"""Consumers for the scenes of cancelling: what each has before it is cancelled, and what holds after it."""

from __future__ import annotations

import asyncio
from typing import ClassVar, Final

from conquiet import Message, Messages, Subscription
from conquiet.kit.loopthread import PRIVATE_LOOP
from conquiet.topics.consume.handling import Handler
from conquiet.topics.server.topics import TopicLike
from tests.contracts.topics_cancellation import Case
from tests.rigs.waiting import LONG
from tests.topics.consuming import finished, impatient, vanish

__all__ = ["SENT", "TTL", "Consumed", "Entered"]

TTL: Final = 15.0
"""Seconds that leases last."""
SENT: Final = 3
"""How many messages there are."""


def _beats() -> bool:
    """Whether some consumer of this process says that it is alive."""
    loop = PRIVATE_LOOP._loop
    return loop is not None and any(task.get_name() == "conquiet-keepalive" for task in asyncio.all_tasks(loop))


class Consumed(Case):
    """A topic with three messages, and a consumer that pulls or a subscriber that notes what it handled."""

    takes = True
    subscribes: ClassVar = False
    count: ClassVar = SENT

    async def prepare(self) -> None:
        await self.other.create_topic(self.topic)
        self.handled: list[str] = []
        self.all_handled = asyncio.Event()
        self.consumer = self.new()
        self.sent = [await self.other.send(self.topic, n, key="k") for n in range(self.count)]

    @property
    def source(self) -> TopicLike:
        return self.topic

    def new(self) -> Subscription | Messages:
        options = impatient(lease_ttl=TTL, drain_timeout=10 * LONG)
        if self.subscribes:
            return self.broker.subscribe(self.source, group="g", handler=self.handler, options=options)
        return self.broker.consume(self.source, group="g", options=options)

    @property
    def handler(self) -> Handler:
        return self.handle

    async def handle(self, message: Message) -> None:
        await asyncio.sleep(0)
        self.handled.append(message.id)
        if len(self.handled) == len(self.sent):
            self.all_handled.set()

    @property
    def messages(self) -> Messages:
        assert isinstance(self.consumer, Messages)
        return self.consumer

    async def check(self) -> None:
        """It is gone: it says so, nothing of it beats, and another gets what it has not handled."""
        assert not self.consumer.health().healthy
        assert not _beats(), "a heartbeat goes on"
        if isinstance(self.consumer, Messages):
            assert await self.consumer.next(LONG) is None
        else:
            await self.consumer.wait()
        self.ground.clock.advance(TTL + 1)
        await self.another_gets({*map(str, self.sent)}.difference(self.handled))

    async def another_gets(self, unhandled: set[str]) -> None:
        async with self.other.consume(self.source, group="g", options=impatient(lease_ttl=TTL)) as messages:
            while unhandled:
                message = await messages.next(LONG)
                assert message is not None, f"these are lost: {unhandled}"
                unhandled.discard(message.id)
                await message.ack()

    async def end(self) -> None:
        await vanish(self.consumer)
        await super().end()


class Entered(Consumed):
    """One that is consuming already."""

    async def prepare(self) -> None:
        await super().prepare()
        await self.consumer.__aenter__()

    async def check(self) -> None:
        """It works on: all is handled, and then settled, so that leaving waits for nothing."""
        await finished(self.other, self.topic, "g")
        async with asyncio.timeout(LONG):
            await self.consumer.aclose()
