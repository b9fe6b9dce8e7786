"""The operator's view of topics, groups and dead letters, and what an operator can do about them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from conquiet.errors import ConfigError, QueueError, UnknownTopicError
from conquiet.kit import codec, rules
from conquiet.kit.options import instance
from conquiet.kit.recent import Recent
from conquiet.message import Message
from conquiet.topics.codec import JSON, Codec
from conquiet.topics.operate import dead_letters, inspect, peek, removal, replay
from conquiet.topics.operate.inspect import GroupInfo, TopicInfo
from conquiet.topics.operate.peek import Since
from conquiet.topics.operate.pending import PendingPage, pending_page
from conquiet.topics.operate.removal import ResetTo
from conquiet.topics.options import Retention
from conquiet.topics.server import growth, retention
from conquiet.topics.server.dead_letters import DeadLetter
from conquiet.topics.server.group import existing_group, group_names
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Registry, Topic, TopicLike
from conquiet.wire.keys import name
from conquiet.wire.scripts import Script

__all__ = ["Admin"]

_CONFIGURE: Final = Script.named("topic_configure")
_MOST_GROWTHS: Final = 100
"""Of how many growths it is remembered that they failed."""


class Admin:
    """Looks at topics and changes them; never creates one.

    Every method raises ``UnknownTopicError`` for a topic that does not exist, and ``ConfigError`` for a group that
    the topic does not have. Whatever changes something can be repeated after a failure.
    """

    def __init__(self, instance: Instance, registry: Registry, codec: Codec = JSON) -> None:
        self._instance = instance
        self._registry = registry
        self._codec = codec
        self._growths: Recent[tuple[str, int], None] = Recent(_MOST_GROWTHS)
        """Calls that failed, and may have been done all the same."""

    # --- looking ----------------------------------------------------------------------------------------

    async def list_topics(self) -> list[str]:
        """The names of all topics, sorted; without legacy streams, of which there is no list."""
        return await self._registry.names()

    async def describe_topic(self, topic: TopicLike) -> TopicInfo:
        """Size, age and policies of a topic, and each of its partitions."""
        return await inspect.describe_topic(self._instance, await self._registry.existing(topic))

    async def list_groups(self, topic: TopicLike) -> list[str]:
        """The groups of a topic, sorted: all that ever subscribed, and those of other readers of its streams."""
        return await group_names(self._instance, await self._registry.existing(topic))

    async def describe_group(self, topic: TopicLike, group: str) -> GroupInfo:
        """Where a group stands, exactly: what it has not got, what it has not finished, and who owns what."""
        return await inspect.describe_group(
            self._instance, await self._registry.existing(topic), rules.text("group", group)
        )

    async def read(
        self,
        topic: TopicLike,
        *,
        last: int | None = None,
        since: Since | None = None,
        count: int = 100,
        partition: int | None = None,
        key: str | None = None,
    ) -> list[Message]:
        """Look at messages, in the order of their IDs, without a group: nothing is delivered, and nothing changes.

        The newest ``last`` over all partitions, 10 unless told otherwise; or the first ``count`` since a time (a
        datetime, or seconds since 1970), after an entry ID, or of all (``"earliest"``). With both ``last`` and
        ``since``: the newest since then. ``partition`` and ``key`` choose among them; the messages of a key are looked
        for among 10,000 entries of each partition. An entry that cannot be read has no payload: see its ``fields``.
        """
        found = await self._registry.existing(topic)
        newest = last is not None or since is None
        limit = rules.integer("last", 10 if last is None else last, least=1) if newest else count
        since = "earliest" if since is None else since
        return await peek.messages(
            self._instance, found, self._codec, limit, since, newest=newest, partition=partition, key=key
        )

    async def pending(self, topic: TopicLike, group: str, count: int = 100, cursor: str | None = None) -> PendingPage:
        """One page of what a group was given and has not finished, over all partitions in the order of the IDs."""
        found = await self._registry.existing(topic)
        rules.text("group", group)
        if cursor is None:
            await existing_group(self._instance, found, group)
        return await pending_page(self._instance, found, group, count, cursor)

    async def dead_letters(
        self, topic: TopicLike, count: int = 100, after: str | None = None, group: str | None = None
    ) -> list[DeadLetter]:
        """Up to ``count`` dead letters, oldest first, after the letter of the ID ``after``."""
        found = await self._with_letters(topic)
        return await dead_letters.letters(self._instance, found, count, after, _group(group))

    # --- dead letters -----------------------------------------------------------------------------------

    async def replay(self, topic: TopicLike, ids: Iterable[str] | None = None, group: str | None = None) -> int:
        """Give dead letters back to the groups that they failed in, and to no other; how many.

        ``ids`` and ``group`` choose among them; without, all there are now. An entry that is still in its partition
        is delivered under its old ID, one that is gone as a copy. Each letter is given back once, however often
        and by however many this is called.
        """
        return await replay.replay(self._instance, await self._with_letters(topic), ids, _group(group))

    async def purge(self, topic: TopicLike, ids: Iterable[str] | None = None, group: str | None = None) -> int:
        """Remove dead letters for good: those of ``ids`` and ``group``; without, all there are now. How many."""
        return await dead_letters.purge(self._instance, await self._with_letters(topic), ids, _group(group))

    # --- changing ---------------------------------------------------------------------------------------

    async def grow(self, topic: str, partitions: int) -> TopicInfo:
        """Give a topic more partitions, keeping the order of each key's messages; takes about two seconds."""
        try:
            found = await self._own(topic, "grow")
            if (topic, partitions) in self._growths and found.partitions == partitions:
                await growth.announce(self._instance, self._registry, found)  # it was done, and not answered
            else:
                await growth.grow(self._instance, self._registry, found.name, partitions)
            info = await self.describe_topic(topic)
        except QueueError:
            self._growths.keep((topic, partitions), None)
            raise
        self._growths.pop((topic, partitions), None)
        return info

    async def configure(self, topic: str, retention: Retention) -> TopicInfo:
        """Change what a topic keeps; producers and consumers go by it within seconds."""
        instance("retention", retention, of=Retention)
        found = await self._own(topic, "configure")
        key = self._instance.keys.meta(found.name)
        policies = codec.encode({"retention": retention.plain()})
        if not await self._instance.run(key, _CONFIGURE([key], self._instance.clock.offset_ms, policies)):
            raise UnknownTopicError(f"there is no topic {topic!r}")
        self._registry.forget(found.name)
        return await self.describe_topic(topic)

    async def trim(self, topic: TopicLike, max_len: int | None = None, max_age: float | None = None) -> int:
        """Remove old messages, never such as some group has not finished; how many.

        ``max_len`` (for each partition) and ``max_age`` (in seconds) are limits for this time only. Without them
        the topic's own retention applies, which may allow more.
        """
        found = await self._registry.existing(topic)
        kept = found.retention
        if max_len is not None or max_age is not None:
            kept = replace(kept, max_len=max_len, max_age=max_age, on_full="grow", delete_acked=False)
        work = (retention.trim(self._instance, found, index, kept) for index in range(found.partitions))
        return sum(trimmed.removed for trimmed in await asyncio.gather(*work))

    async def reset_group(self, topic: TopicLike, group: str, to: ResetTo, force: bool = False) -> None:
        """Let a group go on from ``"earliest"``, ``"latest"``, a time, or after an entry ID for each partition.

        A time is a datetime, or seconds since 1970. What the group had not finished is forgotten. Refused while it has
        live members, unless ``force``, and for the group of a Spark query always: where that goes on is in its
        checkpoint.
        """
        await removal.reset_group(
            self._instance, self._registry, await self._registry.existing(topic), rules.text("group", group), to, force
        )

    async def delete_group(self, topic: TopicLike, group: str, force: bool = False) -> None:
        """Remove a group; its dead letters stay. Refused while it has live members, unless ``force``."""
        await removal.delete_group(
            self._instance, self._registry, await self._registry.existing(topic), rules.text("group", group), force
        )

    async def delete_topic(self, topic: str, force: bool = False) -> None:
        """Remove a topic, all its messages, groups and dead letters; takes about two seconds.

        Refused while one of its groups has live members, unless ``force``, and for legacy streams always.
        """
        found = await self._half_deleted(topic) or await self._own(topic, "delete")
        await removal.delete_topic(self._instance, self._registry, found, force)

    # --- which ------------------------------------------------------------------------------------------

    async def _with_letters(self, topic: TopicLike) -> Topic:
        """The topic, once the letters that are still in the outboxes of its partitions have arrived."""
        found = await self._registry.existing(topic)
        await dead_letters.collect(self._instance, found, await group_names(self._instance, found))
        return found

    async def _own(self, topic: str, what: str) -> Topic:
        """A topic that is no legacy stream."""
        found = await self._registry.existing(topic)
        if found.legacy:
            raise ConfigError(f"cannot {what} {found.name!r}: it is a legacy stream, not a topic")
        return found

    async def _half_deleted(self, topic: str) -> Topic | None:
        """What is left of a topic whose deletion was begun and not completed."""
        ask, keys = self._instance.ask, self._instance.keys
        if await ask("EXISTS", keys.meta(name("topic", topic))) or not await ask("SISMEMBER", keys.registry, topic):
            return None
        return Topic(topic, max(await ask("SCARD", keys.partitions(topic)), 1))


def _group(group: str | None) -> str | None:
    return None if group is None else rules.text("group", group)
