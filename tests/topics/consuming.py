"""What tests of consuming share: options for impatient ones, handlers that remember, consumers that vanish."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from conquiet import Backoff, RetryPolicy
from conquiet.message import Message
from conquiet.topics import Broker, DeadLetter, Messages, SubscribeOptions, Subscription
from tests.rigs.scraping import samples
from tests.rigs.waiting import eventually

__all__ = [
    "AT_ONCE",
    "Recorder",
    "answers",
    "buried",
    "counted",
    "finished",
    "hands_over",
    "impatient",
    "stays_below",
    "vanish",
]

_LOOK: Final = 1.5
AT_ONCE: Final = Backoff(base=0.0, cap=0.0, kind="fixed")


def impatient(**changes: Any) -> SubscribeOptions:
    """Options with short waits and retries at once, unless ``changes`` says otherwise."""
    retry = {name: changes.pop(name) for name in ("max_retries", "mode", "retry_on", "give_up_on") if name in changes}
    backoff = changes.pop("backoff", AT_ONCE)
    given = {"poll_timeout": 0.1, "handle_signals": False, "retry": RetryPolicy(backoff=backoff, **retry)}
    return SubscribeOptions(**{**given, **changes})


class Recorder:
    """A handler that remembers what it got, and then does as ``act`` says."""

    def __init__(self, act: Callable[[Message], Awaitable[None]] | None = None) -> None:
        self.messages: list[Message] = []
        self._act = act

    async def __call__(self, message: Message) -> None:
        self.messages.append(message)
        if self._act is not None:
            await self._act(message)

    @property
    def payloads(self) -> list[Any]:
        return [message.payload for message in self.messages]

    async def saw(self, count: int) -> None:
        """Return once it was called so many times, and no more often."""
        await eventually(lambda: len(self.messages) >= count, f"{count} calls of the handler")
        assert len(self.messages) == count, self.messages


async def finished(broker: Broker, topic: Any, *groups: str) -> None:
    """Return once the groups have everything, and have settled it."""

    async def is_done() -> bool:
        found = [await broker.admin.describe_group(topic, group) for group in groups]
        return all(info.lag == 0 and info.pending == 0 for info in found)

    await eventually(is_done, f"{groups} to finish {topic!r}")


async def buried(broker: Broker, topic: Any, count: int = 1) -> list[DeadLetter]:
    """The dead letters, once there are so many."""
    found: list[DeadLetter] = []

    async def are_there() -> bool:
        found[:] = await broker.admin.dead_letters(topic, 1000)
        return len(found) >= count

    await eventually(are_there, f"{count} dead letters")
    assert len(found) == count, found
    return found


async def answers(broker: Broker, count: int = 100) -> None:
    """Return after so many answers of the server: what must not happen would have happened by then."""
    for _ in range(count):
        await broker.admin.list_topics()


async def vanish(consumer: Subscription | Messages) -> None:
    """End a consumer as a killed process would: nothing is settled, released or told."""

    async def nothing() -> None: ...

    consumer._end()
    await consumer._membership.stop()
    await consumer._hands.aclose()
    await consumer._worker.aclose()
    await consumer._membership.aclose()
    with consumer._open.pop_all():
        await consumer._life.leave(nothing, nothing, 0.0)


def hands_over(consumer: Subscription | Messages) -> bool:
    """Whether it is about to give a partition up, and begins nothing more of it."""
    return any(member._draining for member in consumer._membership.members.values())


async def stays_below(most: int, count: Callable[[], int], what: str) -> None:
    """Look on for a while, and fail as soon as there were more than ``most``: whoever does too much is soon there."""
    try:
        async with asyncio.timeout(_LOOK):
            while count() <= most:  # noqa: ASYNC110 - it is about what must not happen
                await asyncio.sleep(0.01)  # what is measured: how much happens in a time
    except TimeoutError:
        return
    raise AssertionError(f"more than {most} {what} in {_LOOK} s")


def counted(what: str, **labels: str) -> float:
    """What a counter of the topics room shows, over all labels that are not given."""
    name = f"conquiet_topics_{what}_total"
    return sum(sample.value for sample in samples(name) if labels.items() <= sample.labels.items())
