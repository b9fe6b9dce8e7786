"""Writing to a partition: typed calls of the scripts that append messages, hold them back, and append rows once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from conquiet.errors import ConfigError, TopicFullError
from conquiet.topics.format import envelope
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Topic
from conquiet.wire.scripts import Call, Script

__all__ = ["Chunk", "Window", "Write", "append_rows", "appending", "begin", "delay", "forget", "full"]

_DAY_MS: Final = 86_400_000
_REPEATABLE_MS: Final = 7 * _DAY_MS
_REMEMBERED_MS: Final = 8 * _DAY_MS
"""Longer than a batch can be repeated: what is remembered never runs out before that does."""
_AFTER_NEXT_MS: Final = 3_600_000
"""How long the batch before is remembered: a task of it that was given up may write on for a while."""

_APPEND: Final = Script.named("append")
_DELAY: Final = Script.named("delay")
_ROWS: Final = Script.named("append_rows")
_BEGIN: Final = Script.named("write_begin")
_pack: Final = msgspec.msgpack.Encoder().encode


def full(topic: Topic, partition: int, holds: str) -> TopicFullError:
    """The error of a partition that ``holds`` as much as it may."""
    return TopicFullError(f"partition {partition} of topic {topic.name!r} holds {holds}")


def _bound(topic: Topic) -> tuple[int, str]:
    """How many entries a partition holds at most, or -1, and what happens then."""
    kept = topic.retention
    return (-1 if kept.max_len is None or kept.on_full == "grow" else kept.max_len), kept.on_full


@dataclass(frozen=True, slots=True)
class Window:
    """For how many milliseconds, and for how many messages, a message ID is remembered."""

    ms: int
    size: int


def appending(
    instance: Instance, topic: Topic, window: Window
) -> Callable[[str, str | None, Sequence[bytes | str | int]], Call]:
    """What makes the calls that append an entry to a stream unless its message ID is known or the partition is full.

    The replies: ``OK``, its ID and how many unfinished entries were dropped; ``AGAIN`` and the first ID; or ``FULL``.
    """
    keys, offset, bound = instance.keys, instance.clock.offset_ms, _bound(topic)

    def append(stream: str, message_id: str | None, fields: Sequence[bytes | str | int]) -> Call:
        names = [stream, keys.dedup(stream), keys.dedup_ids(stream), keys.trim(stream)]
        return _APPEND(names, offset, message_id or "", window.ms, window.size, *bound, *fields)

    return append


async def delay(
    instance: Instance,
    stream: str,
    ms: int,
    item: str,
    message_id: str | None,
    window: Window,
    fields: Sequence[bytes | str | int],
) -> tuple[bool, str]:
    """Hold an entry back; whether it is new, and what it is known by."""
    keys = instance.keys
    names = [keys.delayed(stream), keys.delayed_items(stream), keys.dedup(stream), keys.dedup_ids(stream)]
    terms = (instance.clock.offset_ms, ms, item, message_id or "", window.ms, window.size)
    status, id = await instance.run(stream, _DELAY(names, *terms, *fields))
    return status != b"AGAIN", id.decode()


# --- once -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Write:
    """One batch of a write. ``goes_on`` says that batches follow; ``by_id`` that rows are known by their IDs."""

    name: str
    batch: int = 0
    by_id: bool = False
    goes_on: bool = False

    def known_as(self, topic: Topic) -> str:
        """Its name in the keys of ``topic``; another one if that is deleted and made again, for then it is empty."""
        return f"{self.name}@{topic.created_ms}"


@dataclass(slots=True)
class Chunk:
    """Rows for one partition, in order: for each a digit that tells what it has, and its values."""

    partition: int
    number: int
    """Its place among the chunks of the same part and partition."""
    kinds: bytearray = field(default_factory=bytearray)
    values: list[str] = field(default_factory=list[str])
    size: int = 0

    def packed(self) -> tuple[bytes, bytes]:
        """The values as one, in MessagePack, and a digest, which is the same for the same rows only."""
        packed = _pack(self.values)
        return packed, hashlib.blake2b(self.kinds + b" " + packed, digest_size=12).digest()


def append_rows(instance: Instance, topic: Topic, write: Write, part: int, chunk: Chunk) -> Call:
    """Append rows, unless they are there.

    Replies ``OK``, ``AGAIN`` or ``DIFFERS`` with how many rows were appended and how many unfinished entries were
    dropped, or ``FULL``.
    """
    keys, stream = instance.keys, topic.stream(instance.keys, chunk.partition)
    name, (values, digest) = write.known_as(topic), chunk.packed()
    written = [keys.written(stream, name, batch) for batch in (write.batch, write.batch - 1)]
    place = ("", "") if write.by_id else (f"{part}:{chunk.number}", digest)
    forget = _AFTER_NEXT_MS if write.goes_on and chunk.number == 0 else ""
    return _ROWS(
        [stream, *written, keys.trim(stream)],
        *(instance.clock.offset_ms, *place, _REMEMBERED_MS, forget, *_bound(topic)),
        *(envelope.now_ms(), bytes(chunk.kinds), values),
    )


async def begin(instance: Instance, topic: Topic, write: Write) -> int:
    """Begin a batch, or join it; its number of partitions, which the first task has fixed."""
    key = instance.keys.write(topic.name, write.known_as(topic))
    until, known_by = "" if write.goes_on else _REMEMBERED_MS, "ids" if write.by_id else "order"
    call = _BEGIN([key], instance.clock.offset_ms, write.batch, topic.partitions, _REPEATABLE_MS, until, known_by)
    status, about = await instance.run(key, call)
    which = f"batch {write.batch} of the write {write.name!r} to topic {topic.name!r}"
    if status == b"EXPIRED":
        raise ConfigError(f"{which} was begun more than 7 days ago: what it wrote is not remembered any more")
    if status == b"OVERTAKEN":
        raise ConfigError(f"{which} cannot be repeated: batch {about.decode()} has begun since")
    if status == b"OTHERWISE":
        how = "without IDs, and cannot be repeated with" if write.by_id else "with IDs, and cannot be repeated without"
        raise ConfigError(f"{which} was begun {how} them")
    return int(about)


async def forget(instance: Instance, topic: Topic, write: Write, partitions: int) -> None:
    """The write is done and will not be repeated: remember it for an hour only, for tasks that write on."""
    keys, name = instance.keys, write.known_as(topic)
    streams = (topic.stream(keys, partition) for partition in range(partitions))
    for key in (*(keys.written(stream, name, write.batch) for stream in streams), keys.write(topic.name, name)):
        await instance.ask("PEXPIRE", key, _AFTER_NEXT_MS)
