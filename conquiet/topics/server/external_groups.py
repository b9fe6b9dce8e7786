"""Groups of Spark queries on the server: typed calls of their scripts, and what growth and subscribers need of them.

Such a group has a place on every partition, and neither members nor a pending list. The topic's meta says whose it is,
as the field ``group:<name>``; the lease of each partition says so too, so that no member can slip in.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final, Literal

from conquiet.errors import ConfigError
from conquiet.kit import entry_ids, rules
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Registry, Topic
from conquiet.wire.parser import Reply
from conquiet.wire.scripts import Script

__all__ = [
    "ADVICE",
    "GLANCE",
    "Position",
    "Used",
    "adopt",
    "claim",
    "extend_queries",
    "publish",
    "refuse_spark",
    "retract",
    "settle",
    "settled",
    "spark_owned",
    "unmark",
]

_log = logging.getLogger("conquiet.topics")

ADVICE: Final = "choose another name, or remove that group with admin.delete_group"
GLANCE: Final = 0.05
"""Seconds between two looks at an adoption under way."""
_CLAIM_MS: Final = 10_000
"""For how long a subscriber waits for the outcome of an adoption whose author is not heard of any more."""

_CLAIM: Final = Script.named("group_claim")
_SETTLE: Final = Script.named("group_settle")
_ADOPT: Final = Script.named("group_adopt")
_RETRACT: Final = Script.named("group_retract")
_PUBLISH: Final = Script.named("group_publish")


@dataclass(frozen=True, slots=True)
class Position:
    """How far a query is on one partition: all up to the entry ``id`` is done.

    ``entries_read`` is the number of entries that were ever appended up to there, or ``None`` if that is not known:
    then the lag has to be counted.
    """

    id: str
    entries_read: int | None = None

    def __post_init__(self) -> None:
        entry_ids.checked("id", self.id)
        if self.entries_read is not None:
            rules.integer("entries_read", self.entries_read, least=0)

    @property
    def words(self) -> tuple[str, str | int]:
        """Both as scripts take them."""
        return self.id, "" if self.entries_read is None else self.entries_read


@dataclass(frozen=True, slots=True)
class Used:
    """Why a group is not adopted on one partition."""

    stream: str
    owner: str
    consumers: int
    pending: int
    parked: int

    def __str__(self) -> str:
        counts = f"{self.consumers} consumers, {self.pending} pending entries and {self.parked} parked retries"
        lease = f", and {self.owner.partition('#')[0]!r} holds its lease" if self.owner else ""
        return f"on {self.stream!r} it has {counts}{lease}"


async def claim(instance: Instance, topic: Topic, group: str, token: str) -> Reply:
    """Announce that ``group`` is to become a Spark query's: ``OK``, ``SPARK``, ``BUSY`` or ``UNKNOWN``."""
    key = instance.keys.meta(topic.name)
    return await instance.run(key, _CLAIM([key], instance.clock.offset_ms, group, token, _CLAIM_MS))


async def settle(instance: Instance, topic: Topic, group: str, token: str, mark: str) -> bool:
    """End an announcement with ``"spark"``, or take it back with ``""``; whether it still counted."""
    key = instance.keys.meta(topic.name)
    return bool(await instance.run(key, _SETTLE([key], instance.clock.offset_ms, group, token, mark)))


async def adopt(
    instance: Instance,
    stream: str,
    group: str,
    position: Position | None = None,
    action: Literal["take", "look", "extend"] = "take",
    since: int = 0,
) -> str | Used:
    """Where the group stood on a partition, or ``""`` if it is new; or why it is not adopted."""
    keys = [instance.keys.lease(stream, group), stream, instance.keys.retry(stream, group)]
    place = ("", "") if position is None else position.words
    status, first, *rest = await instance.run(
        stream, _ADOPT(keys, instance.clock.offset_ms, group, *place, action, since)
    )
    return str(first.decode()) if status == b"OK" else Used(stream, first.decode(), *rest)


async def retract(instance: Instance, stream: str, group: str, stood: str) -> None:
    """Take an adoption on one partition back."""
    await instance.run(stream, _RETRACT([instance.keys.lease(stream, group), stream], group, stood))


async def publish(instance: Instance, stream: str, group: str, position: Position) -> Reply:
    """Put the group where its query is: ``OK``, ``LOST`` or ``BUSY``."""
    keys = [instance.keys.lease(stream, group), stream]
    return await instance.run(stream, _PUBLISH(keys, instance.clock.offset_ms, group, *position.words))


async def unmark(instance: Instance, topic: Topic, group: str) -> None:
    """Forget in the meta whose the group was."""
    await instance.ask("HDEL", instance.keys.meta(topic.name), f"group:{group}")


async def extend_queries(instance: Instance, topic: Topic, announced_ms: int) -> None:
    """Put all groups of Spark queries on the partitions that ``topic`` is about to get."""
    for partition in range(topic.partitions, topic.span):
        for group in sorted(topic.spark_groups):
            reply = await adopt(instance, topic.stream(instance.keys, partition), group, None, "extend", announced_ms)
            if isinstance(reply, Used):
                _log.warning("group %r is a Spark query's, but %s", group, reply)


# --- for subscribers --------------------------------------------------------------------------------------


async def settled(instance: Instance, registry: Registry, topic: Topic, group: str) -> Topic:
    """The topic once no adoption of ``group`` is under way."""
    while group in topic.claimed_groups:
        await instance.clock.sleep(GLANCE)
        topic = await registry.existing(topic.name)
    return topic


def refuse_spark(topic: Topic, group: str) -> None:
    """``ConfigError`` if ``group`` is a Spark query's."""
    if group in topic.spark_groups:
        raise spark_owned(topic, group)


def spark_owned(topic: Topic, group: str) -> ConfigError:
    """The error of a subscription to a Spark query's group."""
    what = f"group {group!r} of topic {topic.name!r} is a Spark query's, and nobody can subscribe to it"
    return ConfigError(f"{what}: {ADVICE}")
