"""The operator's look through dead letters, and their removal."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence

from conquiet.kit import entry_ids, rules
from conquiet.kit.chunks import by_number
from conquiet.topics.server.dead_letters import PAGE, DeadLetter, delete, forward, letters_of, pages
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Topic
from conquiet.wire.streams import entries_of, xlen

__all__ = ["collect", "letters", "pages_of_now", "purge"]


async def collect(instance: Instance, topic: Topic, groups: Sequence[str]) -> None:
    """Forward what lies in the outboxes of some groups now, whichever consumers own the partitions."""
    for index, stream in enumerate(topic.streams(instance.keys)):
        for page in by_number(groups, PAGE):
            asked = [xlen(instance.keys.outbox(stream, group)) for group in page]
            for group, waiting in zip(page, await instance.link.call_many(stream, asked), strict=True):
                if isinstance(waiting, Exception):
                    instance.link.refuse(stream, waiting)
                for _ in range(0, waiting, PAGE):
                    if await forward(instance, topic, index, group, PAGE) < PAGE:
                        break  # that was all, or another forwarder is at it


async def letters(
    instance: Instance, topic: Topic, count: int = 100, after: str | None = None, group: str | None = None
) -> list[DeadLetter]:
    """Up to ``count`` dead letters, oldest first: those after the letter ``after``, of ``group`` if one is given."""
    rules.integer("count", count, least=1)
    start = "-" if after is None else f"({entry_ids.checked('after', after)}"
    found: list[DeadLetter] = []
    async for page in pages(instance, topic, start, "+", group, min(count, PAGE)):
        found += page
        if len(found) >= count:
            break
    return found[:count]


async def pages_of_now(instance: Instance, topic: Topic, group: str | None) -> AsyncIterator[list[DeadLetter]]:
    """The dead letters up to the last one of now, of ``group`` if one is given, in pages that may be empty."""
    newest = entries_of(await instance.ask("XREVRANGE", instance.keys.dead_letters(topic.name), "+", "-", "COUNT", 1))
    if newest:
        async for page in pages(instance, topic, "-", newest[0][0].decode(), group):
            yield page


async def purge(instance: Instance, topic: Topic, ids: Iterable[str] | None = None, group: str | None = None) -> int:
    """Remove the letters of these IDs, or all there are now, of ``group`` if one is given; how many were removed."""
    if ids is not None:
        return await delete(instance, topic, [letter.id for letter in await letters_of(instance, topic, ids, group)])
    gone = 0
    async for page in pages_of_now(instance, topic, group):
        gone += await delete(instance, topic, [letter.id for letter in page])
    return gone
