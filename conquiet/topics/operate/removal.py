"""Taking groups and topics away, and setting groups back."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal, TypeAlias, cast

from conquiet.errors import ConfigError, QueueError
from conquiet.kit import entry_ids
from conquiet.kit.chunks import by_number
from conquiet.topics.server.dead_letters import forward
from conquiet.topics.server.external_groups import unmark
from conquiet.topics.server.group import (
    call_members,
    existing_group,
    group_names,
    live_members,
    look_at,
    on_every_partition,
)
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import FRESH, Registry, Topic
from conquiet.wire.scripts import Call, Script

__all__ = ["ResetTo", "delete_group", "delete_topic", "reset_group"]

ResetTo: TypeAlias = Literal["earliest", "latest"] | float | dt.datetime | Mapping[int, str]

_NOTICE_MS: Final = 3_600_000
"""For how long a member can tell that its group or topic was deleted, and is not just lost with the whole server."""
_ROUNDS: Final = 1000
_PAGE: Final = 500
_FORGOTTEN: Final = 1000
"""Pending entries that a script forgets before others get their turn."""

_RESET: Final = Script.named("group_reset")
_DELETE: Final = Script.named("group_delete")
_DROP: Final = Script.named("members_drop")
_RETIRE: Final = Script.named("lease_retire")
_LIST: Final = Script.named("topic_list")


async def reset_group(
    instance: Instance, registry: Registry, topic: Topic, group: str, to: ResetTo, force: bool = False
) -> None:
    """As :meth:`Admin.reset_group`. With ``force`` live members lose what they have, and take their partitions again.

    Each partition is moved at once, one after the other, and its pending entries are forgotten page by page; nothing is
    delivered before that is done. What was begun and not completed, a repetition or the next owner completes.
    """
    place = _place(topic, to)
    if group in topic.spark_groups:
        what = f"group {group!r} of topic {topic.name!r} is a Spark query's: where it goes on is in its checkpoint"
        raise ConfigError(f"cannot reset it here, since {what}")
    await existing_group(instance, topic, group)
    await _refuse_if_live(instance, topic, [group], "reset group", force)

    async def move(partitions: range) -> None:
        for partition in partitions:  # in this order: what a growth has added waits for what was there before
            id = place(partition)
            if id is not None:
                await _reset_on(instance, topic.stream(instance.keys, partition), group, id)

    await on_every_partition(registry, topic, move)
    await call_members(instance, topic.name, group)


async def _reset_on(instance: Instance, stream: str, group: str, id: str) -> None:
    lease, retry, attempts, _ = instance.keys.of_group(stream, group)
    keys, offset = [lease, stream, retry, attempts], instance.clock.offset_ms
    while await instance.run(stream, _RESET(keys, offset, group, id, _FORGOTTEN)):
        id = ""  # the first page has put the group there


def _place(topic: Topic, to: object) -> Callable[[int], str | None]:
    """The ID after which a partition goes on; ``None`` for one that stays where it is."""
    if isinstance(to, Mapping):
        given = cast("Mapping[object, object]", to).items()
        places = {topic.check_partition(index): entry_ids.checked("to", id) for index, id in given}
        if not places:
            raise ConfigError("to must name at least one partition")
        return places.get
    start = entry_ids.start("to", to)
    return lambda partition: start


async def delete_group(instance: Instance, registry: Registry, topic: Topic, group: str, force: bool = False) -> None:
    """As :meth:`Admin.delete_group`, also while the topic grows. With ``force`` the subscriptions of members end."""
    await existing_group(instance, topic, group)
    await _refuse_if_live(instance, topic, [group], "delete group", force)

    async def remove(partitions: range) -> None:
        for partition in partitions:
            await _delete_from(instance, topic, partition, group)
        await _drop_members(instance, topic.name, [group])
        outboxes = [f"{group}/{partition}" for partition in partitions]
        for some in by_number(outboxes, _PAGE):
            await instance.ask("HDEL", instance.keys.forwarded(topic.name), *some)
        if not topic.legacy:
            await unmark(instance, topic, group)  # before it is off the list, so that a repetition finds it

    await on_every_partition(registry, topic, remove)
    await instance.ask("SREM", instance.keys.groups(topic.name), group)


async def _delete_from(instance: Instance, topic: Topic, partition: int, group: str) -> None:
    """Remove a group from a partition, once its dead letters are where they belong."""
    stream = topic.stream(instance.keys, partition)
    rounds = 0
    while rounds < _ROUNDS:
        waiting, more = await instance.run(stream, _delete_call(instance, stream, group))
        if not waiting and not more:
            return
        if waiting and await forward(instance, topic, partition, group) == 0:
            rounds += 1
            await instance.clock.sleep(0.01)  # another forwarder is at it
    raise QueueError(f"the dead letters of group {group!r} on {stream!r} do not come to an end")


def _delete_call(instance: Instance, stream: str, group: str) -> Call:
    lease, retry, attempts, outbox = instance.keys.of_group(stream, group)
    keys = [lease, stream, retry, attempts, outbox, instance.keys.trim(stream)]
    return _DELETE(keys, instance.clock.offset_ms, group, _FORGOTTEN)


async def _drop_members(instance: Instance, topic: str, groups: Iterable[str]) -> None:
    """Take all members off, and leave word for those who live: a generation that expires means a deletion."""
    for group in groups:
        key = instance.keys.members(topic, group)
        keys = [key, instance.keys.members_info(topic, group), instance.keys.generation(topic, group)]
        await instance.run(key, _DROP(keys, _NOTICE_MS))


async def _refuse_if_live(instance: Instance, topic: Topic, groups: Iterable[str], what: str, force: bool) -> None:
    for group in () if force else groups:
        members = await live_members(instance, topic, group)
        if members:
            names = ", ".join(sorted({member.partition("#")[0] for member in members}))
            raise ConfigError(f"cannot {what} {group!r} of topic {topic.name!r} while it has live members: {names}")


# --- topics ---------------------------------------------------------------------------------------------


async def delete_topic(instance: Instance, registry: Registry, topic: Topic, force: bool = False) -> None:
    """As :meth:`Admin.delete_topic`. With ``force`` the subscriptions of members end.

    The topic is gone for producers first; its streams go when each producer knows, so that none comes back to life.
    """
    groups = await group_names(instance, topic)
    await _refuse_if_live(instance, topic, groups, "delete the topic of group", force)
    keys, listed = instance.keys, instance.keys.partitions(topic.name)
    streams = [keys.partition(topic.name, index) for index in range(topic.span)]
    # From here on this list and the registry know what is left to do.
    known = {key.decode() for key in await instance.ask("SMEMBERS", listed)}
    unlisted = [stream for stream in streams if stream not in known]
    for some in by_number(unlisted, _PAGE):
        await instance.run(listed, _LIST([listed], *some))
    # Members that live have to find out why there is no meta: before it goes, and when it has gone.
    await _drop_members(instance, topic.name, groups)
    await _unlink(instance, [keys.meta(topic.name)])
    registry.forget(topic.name)
    await _drop_members(instance, topic.name, groups)
    await instance.clock.sleep(FRESH + 0.5)
    await asyncio.gather(*(_delete_stream(instance, stream, groups) for stream in streams))
    await _unlink(instance, [keys.dead_letters(topic.name), keys.forwarded(topic.name)])
    await _drop_members(instance, topic.name, groups)
    await _unlist(instance, topic.name)
    registry.forget(topic.name)


async def _delete_stream(instance: Instance, stream: str, groups: Iterable[str]) -> None:
    look = await look_at(instance, stream)
    leases, doomed = list[str](), list[str]()
    there = {group.decode(errors="replace") for group in look.groups | look.deleted_groups}
    for group in sorted(there.union(groups)):
        lease, *others = instance.keys.of_group(stream, group)
        leases.append(lease)
        doomed += others
    # The epochs are remembered for a day, lest a topic that is made again begins with one that an owner still has.
    for some in by_number(leases, _PAGE):
        await instance.run(stream, _RETIRE(some, instance.clock.offset_ms))
    doomed += instance.keys.of_partition(stream)
    for some in by_number(doomed, _PAGE):
        await _unlink(instance, some)


async def _unlist(instance: Instance, topic: str) -> None:
    keys = instance.keys
    await _unlink(instance, [keys.groups(topic)])
    if await instance.ask("EXISTS", keys.meta(topic)):
        return  # a new topic of that name was made meanwhile
    await _unlink(instance, [keys.partitions(topic)])
    await instance.ask("SREM", keys.registry, topic)


async def _unlink(instance: Instance, keys: Sequence[str]) -> None:
    """Remove keys of one slot."""
    await instance.ask("UNLINK", *keys)
