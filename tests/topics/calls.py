"""Calls of producers, operators and Spark, each with every command that it sends, and what holds after.

What consumers do is in :mod:`tests.topics.boundaries`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, TypeAlias

from conquiet import Outgoing, QueueError, Retention
from conquiet.errors import ConfigError, UnknownTopicError
from conquiet.topics.outside import scan
from conquiet.topics.produce import once
from conquiet.topics.produce.once import Appended, Appender, Chunk
from conquiet.topics.server.external_groups import Position, adopt_group, publish_progress
from conquiet.topics.server.group import count_after
from tests.rigs.calling import Path
from tests.topics.adopting import lasting, places
from tests.topics.call_scenes import (
    GROUP,
    QUERY,
    TOPIC,
    WRITE,
    Scene,
    begun,
    bounded_topic,
    dead_letters,
    entries,
    group,
    group_of_what_is_not_listed,
    query,
    topic,
)

__all__ = ["BACKGROUND", "CALLS", "REPEATED", "Scene"]

BACKGROUND: Final = {"CLIENT", "HELLO"}
"""What a connection begins with."""

# --- what is asked for ------------------------------------------------------------------------------------------------


async def delete_group(scene: Scene) -> None:
    with suppress(ConfigError):  # it is gone
        await scene.soon(scene.broker.admin.delete_group(TOPIC, GROUP))


async def delete_topic(scene: Scene) -> None:
    with suppress(UnknownTopicError):
        await scene.soon(scene.broker.admin.delete_topic(TOPIC))


async def send_batch(scene: Scene) -> list[str]:
    named = [Outgoing(n, message_id=f"m{n}") for n in range(3)]
    return list(await scene.broker.send_batch(TOPIC, named))


async def send_plain_batch(scene: Scene) -> list[str]:
    return list(await scene.broker.send_batch(TOPIC, [Outgoing(n) for n in range(3)]))


async def append(scene: Scene) -> Appended:
    appender, chunk = Appender(scene.instance, scene.topic, WRITE, 0), Chunk(0, 0)
    chunk.kinds += b"00"
    chunk.values += ["1", "2"]
    try:
        await appender.put(chunk)
        result = await scene.soon(appender.drain())
        assert isinstance(result, Appended)
        return result
    finally:
        await appender.aclose()


async def read_pages(scene: Scene) -> list[Any]:
    async def read() -> list[Any]:
        return [page async for page in scan.pages(scene.instance, scene.stream, "0-0", "+", 10)]

    result: list[Any] = await scene.soon(read())
    return result


# --- after ------------------------------------------------------------------------------------------------------------


async def it_is_there(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    found = await scene.looked()
    assert found is not None
    assert found.partitions == 2
    assert await scene.broker.admin.list_topics() == [TOPIC]
    assert await scene.stage.call("x", "SCARD", scene.instance.keys.partitions(TOPIC)) == 2


async def it_keeps_five(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    found = await scene.looked()
    assert found is not None
    assert found.retention.max_len == 5


async def it_has_grown(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    """Once, to what was asked for; each group is on the new partition, and none has lost its place."""
    found = await scene.looked()
    assert found is not None
    assert (found.partitions, second.partitions) == (2, 2)
    groups = {row[1] for row in await scene.stage.call("x", "XINFO", "GROUPS", scene.stage.stream(found, 1))}
    assert len(groups) == 1


async def the_group_begins_anew(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert await scene.stage.pending(scene.topic, GROUP) == []
    assert await scene.stage.read(scene.topic, GROUP, 10) == scene.ids


async def the_group_is_gone(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert await scene.broker.admin.list_groups(TOPIC) == []
    assert await scene.stage.ids(scene.topic) == scene.ids
    assert await places(scene.stage, scene.topic, GROUP) == [None]


async def all_is_gone(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert await scene.looked() is None
    assert await scene.broker.admin.list_topics() == []
    assert await lasting(scene.stage) == []


async def no_letter_is_left(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert await scene.broker.admin.dead_letters(TOPIC) == []
    assert second == (0 if "XDEL" in CALLS["purge"].commands[at] else 3)


async def it_tells(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    """A look changes nothing, and has an answer the second time."""
    assert second
    assert await scene.stage.ids(scene.topic) == scene.ids


async def is_there_once_more(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    """At most once by each call; the ID is that of the second call's entry."""
    sent = await scene.stage.ids(scene.topic)
    assert sent[-1] == second
    assert len(sent) == (2 if at == 3 else 1)


async def is_there_once(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert await scene.stage.ids(scene.topic) == [second]


async def waits_once_more(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    key = scene.instance.keys.delayed(scene.stream)
    assert await scene.stage.call(key, "ZCARD", key) == (2 if at == 3 else 1)


async def all_are_there_once(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert await scene.stage.ids(scene.topic) == second


async def all_are_there_once_more(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    sent = await scene.stage.ids(scene.topic)
    assert sent[-3:] == second
    assert len(sent) == (6 if at >= 3 else 3)


async def it_is_the_querys(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    found = await scene.looked()
    assert found is not None
    assert found.spark_groups == {QUERY}
    assert not found.claimed_groups
    assert await places(scene.stage, scene.topic, QUERY) == [scene.ids[0]]
    assert await scene.broker.admin.list_groups(TOPIC) == [QUERY]


async def it_has_moved(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert await places(scene.stage, scene.topic, QUERY) == [scene.ids[1]]


async def it_has_begun(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert second == 1


async def it_runs_out(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    key = scene.instance.keys.write(TOPIC, WRITE.known_as(scene.topic))
    assert 0 < await scene.stage.call(key, "PTTL", key) <= 3_600_000


# --- the paths --------------------------------------------------------------------------------------------------------


_Call: TypeAlias = Callable[[Scene], Awaitable[Any]]
_FOUND: Final = ("topic_look", "SISMEMBER registry", "SCARD partitions")
_DESCRIBED: Final = ("SMEMBERS groups", "XLEN dlq")
_GROUPS: Final = ("topic_look", "partition_look", "SMEMBERS groups")
_GROWN: Final = (
    *("grow_commit", "SISMEMBER registry", "SCARD partitions", "SADD partitions", "SMEMBERS groups", "members_call"),
    *("topic_look", "partition_look", "partition_look", *_DESCRIBED),
)
_GROWING: Final = ("topic_look", "grow_plan", "SMEMBERS groups", "members_call", *_GROUPS[:2])
_REMOVED: Final = ("members_look", "group_look")
CALLS: Final[dict[str, Path[Scene]]] = {
    "create": Path(
        (
            *("topic_look", "TYPE", "topic_create", "SISMEMBER registry", "SADD registry"),
            *("SCARD partitions", "SADD partitions"),
        ),
        lambda s: s.broker.create_topic(TOPIC, partitions=2),
        it_is_there,
    ),
    "configure": Path(
        ("topic_look", "topic_configure", "topic_look", "partition_look", *_DESCRIBED),
        lambda s: s.broker.admin.configure(TOPIC, Retention(max_len=5)),
        it_keeps_five,
        topic,
    ),
    "grow": Path(
        (*_GROWING, "topic_look", "SMEMBERS groups", "group_extend", *_GROWN),
        lambda s: s.soon(s.broker.admin.grow(TOPIC, 2)),
        it_has_grown,
        group,
    ),
    "grow with a query": Path(
        (*_GROWING, "topic_look", "SMEMBERS groups", "group_adopt", *_GROWN),
        lambda s: s.soon(s.broker.admin.grow(TOPIC, 2)),
        it_has_grown,
        query,
    ),
    "reset group": Path(
        (*_GROUPS, *_REMOVED, "group_reset", "topic_look", "members_call"),
        lambda s: s.broker.admin.reset_group(TOPIC, GROUP, "earliest"),
        the_group_begins_anew,
        group,
    ),
    "delete group": Path(
        (
            *(*_GROUPS, *_REMOVED, "group_delete", "members_drop", "HDEL forwarded", "HDEL meta"),
            *("topic_look", "SREM groups"),
        ),
        delete_group,
        the_group_is_gone,
        group,
    ),
    "delete topic": Path(
        (
            *("EXISTS meta", *_GROUPS, *_REMOVED, "SMEMBERS partitions", "members_drop", "UNLINK meta"),
            *("members_drop", "partition_look", "lease_retire", "UNLINK retry", "UNLINK dlq", "members_drop"),
            *("UNLINK groups", "EXISTS meta", "UNLINK partitions", "SREM registry"),
        ),
        delete_topic,
        all_is_gone,
        group,
    ),
    "delete topic that is not listed": Path(
        (
            *("EXISTS meta", *_GROUPS, *_REMOVED, "SMEMBERS partitions", "topic_list", "members_drop", "UNLINK meta"),
            *("members_drop", "partition_look", "lease_retire", "UNLINK retry", "UNLINK dlq", "members_drop"),
            *("UNLINK groups", "EXISTS meta", "UNLINK partitions", "SREM registry"),
        ),
        delete_topic,
        all_is_gone,
        group_of_what_is_not_listed,
    ),
    "purge": Path(
        (*_GROUPS, "XLEN dead", "XREVRANGE dlq", "XRANGE dlq", "XDEL dlq"),
        lambda s: s.broker.admin.purge(TOPIC),
        no_letter_is_left,
        dead_letters,
    ),
    "list topics": Path(("SMEMBERS registry",), lambda s: s.broker.admin.list_topics(), it_tells, entries),
    "describe topic": Path(
        ("topic_look", "partition_look", *_DESCRIBED), lambda s: s.broker.admin.describe_topic(TOPIC), it_tells, group
    ),
    "list groups": Path(_GROUPS, lambda s: s.broker.admin.list_groups(TOPIC), it_tells, group),
    "describe group": Path(
        ("topic_look", *_REMOVED), lambda s: s.broker.admin.describe_group(TOPIC, GROUP), it_tells, group
    ),
    "pending": Path((*_GROUPS, "pending_page"), lambda s: s.broker.admin.pending(TOPIC, GROUP), it_tells, group),
    "dead letters": Path(
        (*_GROUPS, "XLEN dead", "XRANGE dlq"), lambda s: s.broker.admin.dead_letters(TOPIC), it_tells, dead_letters
    ),
    "send": Path((*_FOUND, "XADD stream"), lambda s: s.broker.send(TOPIC, 1, key="k"), is_there_once_more, topic),
    "send to a bounded topic": Path(
        (*_FOUND, "append"), lambda s: s.broker.send(TOPIC, 1), is_there_once_more, bounded_topic
    ),
    "send by ID": Path((*_FOUND, "append"), lambda s: s.broker.send(TOPIC, 1, message_id="m"), is_there_once, topic),
    "send later": Path((*_FOUND, "delay"), lambda s: s.broker.send(TOPIC, 1, delay=5.0), waits_once_more, topic),
    "send batch": Path((*_FOUND, *["XADD stream"] * 3), send_plain_batch, all_are_there_once_more, topic),
    "send batch by ID": Path((*_FOUND, *["append"] * 3), send_batch, all_are_there_once, topic),
    "adopt": Path(
        (
            *("group_claim", *_REMOVED, "group_adopt", "group_settle", "group_adopt", "topic_look"),
            *("SISMEMBER groups", "SADD groups"),
        ),
        lambda s: s.soon(adopt_group(s.instance, s.registry, s.topic, QUERY, {0: Position(s.ids[0], 1)})),
        it_is_the_querys,
        entries,
    ),
    "publish": Path(
        ("group_publish",),
        lambda s: publish_progress(s.instance, s.topic, QUERY, {0: Position(s.ids[1], 2)}),
        it_has_moved,
        query,
    ),
    "begin to write": Path(("write_begin",), lambda s: once.begin(s.instance, s.topic, WRITE), it_has_begun, topic),
    "forget what was written": Path(
        ("PEXPIRE written", "PEXPIRE topic"),
        lambda s: once.forget(s.instance, s.topic, WRITE, 1),
        it_runs_out,
        begun,
    ),
    "ends": Path(("partition_end",), lambda s: scan.ends(s.instance, s.topic), it_tells, entries),
    "count": Path(("count_after",), lambda s: count_after(s.instance, s.stream, "0-0", "+", 10), it_tells, entries),
    "last": Path(("XREVRANGE stream",), lambda s: scan.last_up_to(s.instance, s.stream, "+"), it_tells, entries),
}
"""The commands of each call, in order."""


async def _unused(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    raise AssertionError("it does not fail")


REPEATED: Final[dict[str, Path[Scene]]] = {
    "append rows": Path(("append_rows",), append, _unused, begun),
    "read pages": Path(("XRANGE stream",), read_pages, _unused, entries),
}
"""Calls that ask again by themselves, since that is harmless."""
