"""Reading partitions by entry IDs, without a group: the same range gives the same entries, however often it is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from conquiet.kit.entry_ids import BEGINNING, after, order
from conquiet.kit.retrying import patiently
from conquiet.kit.service import Background
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.pace import paged
from conquiet.topics.server.topics import Topic
from conquiet.wire.parser import Reply
from conquiet.wire.scripts import Script
from conquiet.wire.streams import Entry

__all__ = ["End", "ends", "last_up_to", "pages", "removed_after"]

_END: Final = Script.named("partition_end")


@dataclass(frozen=True, slots=True)
class End:
    """How a partition stands: its last ID ever given, its first entry, and how many entries it was ever given."""

    last: str
    first: str | None
    length: int
    added: int | None
    """``None`` where the server does not count (before 7.0)."""
    bound: str | None
    """Before which retention has removed everything, as far as it has removed anything."""

    @property
    def gone(self) -> int | None:
        """How many entries were removed, if the server knows."""
        return None if self.added is None else self.added - self.length


async def ends(instance: Instance, topic: Topic) -> list[End]:
    """How each partition stands now."""
    return await asyncio.gather(*(_end(instance, stream) for stream in topic.streams(instance.keys)))


async def _end(instance: Instance, stream: str) -> End:
    last, first, length, added, bound = await instance.run(stream, _END([stream, instance.keys.trim(stream)]))
    return End(
        last.decode(),
        first.decode() or None,
        length,
        None if added < 0 else added,
        bound.decode() or None,
    )


async def pages(instance: Instance, stream: str, since: str, until: str, count: int) -> AsyncIterator[list[Entry]]:
    """The entries after ``since`` up to ``until``, in pages of up to ``count``, and of some megabytes.

    The next page is fetched meanwhile.

    A page whose answer was lost is asked for again, for about ten seconds.
    """
    background = Background()
    fetched: asyncio.Queue[list[Entry] | Exception] = asyncio.Queue(1)
    background.start(_fetch(instance, stream, since, until, count, fetched), "pages")
    try:
        while page := await fetched.get():
            if isinstance(page, Exception):
                raise page
            yield page
    finally:
        await background.aclose()


async def _fetch(
    instance: Instance, stream: str, since: str, until: str, count: int, fetched: asyncio.Queue[list[Entry] | Exception]
) -> None:
    async def ask(*words: str) -> Reply:
        return await patiently(instance.clock, partial(instance.ask, *words))

    try:
        async for page in paged(ask, stream, f"({since}", until, count):
            if page:
                await fetched.put(page)
        await fetched.put([])
    except Exception as error:
        await fetched.put(error)


async def last_up_to(instance: Instance, stream: str, id: str) -> str | None:
    """The last entry up to ``id``; ``None`` if there is none."""
    found = await instance.ask("XREVRANGE", stream, id, "-", "COUNT", 1)
    return str(found[0][0].decode()) if found else None


def removed_after(end: End, since: str, read: int | None) -> int | None:
    """How many entries after ``since`` were removed unread, if ``read`` entries were ever added up to there.

    0 for none, ``None`` for some, on a server that does not count. There, what retention notes decides, and where
    another program has removed entries, that the first one left comes later than ``since``, which is gone itself.
    """
    if end.gone is not None and read is not None:
        return max(0, end.gone - read)
    first = end.first or after(end.last)
    if order(first) <= order(after(since)):
        return 0
    if since == BEGINNING:  # no entry's ID: whether the first one is gone, only these tell
        return 0 if end.first is not None and end.bound is None else None
    return 0 if end.bound is not None and order(end.bound) <= order(after(since)) else None
