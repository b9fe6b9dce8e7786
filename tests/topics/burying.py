"""What tests of dead letters share: entries that are buried, and what is left of them."""

from __future__ import annotations

from conquiet.topics.server.topics import Topic
from tests.topics.staging import Held, Stage

__all__ = ["Interrupted", "buried_by_owner", "left_of", "waiting_on"]


async def buried_by_owner(stage: Stage, topic: Topic, count: int, **more: str) -> tuple[Held, list[str]]:
    """Dead letters that are still in the outbox."""
    held = await stage.acquire(topic, "billing")
    ids = await stage.add(topic, count, **more)
    await stage.take(held, count)
    for start in range(0, count, 100):
        await stage.bury(held, *ids[start : start + 100])
    return held, ids


async def waiting_on(stage: Stage, topic: Topic) -> int:
    outbox = stage.instance.keys.outbox(stage.stream(topic), "billing")
    return int(await stage.call(outbox, "XLEN", outbox))


async def left_of(stage: Stage, key: str) -> list[bytes]:
    return list(await stage.call(key, "HKEYS", key))


class Interrupted(Exception):
    """A crash at a chosen point."""
