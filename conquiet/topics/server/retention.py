"""Retention: typed calls of the script that removes what a topic need not keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from conquiet.topics.options import Retention
from conquiet.topics.server.group import look_at
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Topic
from conquiet.wire.scripts import Call, Script

__all__ = ["Trimmed", "make_room", "trim"]

_RUN: Final = 1000
"""How many entries a script looks at before others get their turn."""

_TRIM: Final = Script.named("trim")


@dataclass(frozen=True, slots=True)
class Trimmed:
    """What was removed from one partition.

    ``dropped`` of the ``removed`` entries were not finished by some group, which only ``on_full="drop"`` allows.
    No entry before ``bound`` is left, as far as retention has ever removed any, and none from there on was removed.
    ``expired_groups`` held nothing back: no consumer has served them for ``group_expiry``.
    """

    removed: int = 0
    dropped: int = 0
    bound: str | None = None
    expired_groups: tuple[str, ...] = ()


async def trim(
    instance: Instance, topic: Topic, partition: int, retention: Retention | None = None, *, room: int = 0
) -> Trimmed:
    """Remove from a partition what ``retention``, by default the topic's own, does not keep.

    With ``room``, so many fewer are kept than ``max_len`` allows.

    Nothing that some group has not finished goes, unless ``on_full="drop"``. Safe to repeat, to stop halfway and
    to run at the same time as anything else: each run of the script computes anew how far it may go.
    """
    kept = topic.retention if retention is None else retention
    if not kept.trims and kept.group_expiry is None:
        return Trimmed()
    stream = topic.stream(instance.keys, partition)
    groups = [] if kept.group_expiry is None else sorted((await look_at(instance, stream)).groups)
    removed = dropped = 0
    while True:
        gone, lost, more, bound, *expired = await instance.run(stream, _call(instance, stream, kept, groups, room))
        removed, dropped = removed + gone, dropped + lost
        if not more:
            return Trimmed(removed, dropped, bound.decode() or None, tuple(map(_text, expired)))


async def make_room(instance: Instance, topic: Topic, partition: int, count: int) -> bool:
    """Whether ``count`` entries were refused by a partition that is not full, and may fit now.

    It is not full if only groups without consumers hold it back.
    """
    kept = topic.retention
    if kept.group_expiry is None or kept.max_len is None:
        return False
    return (await trim(instance, topic, partition, room=count)).removed > 0


def _call(instance: Instance, stream: str, kept: Retention, groups: list[bytes], room: int) -> Call:
    keys = instance.keys
    return _TRIM(
        [stream, keys.trim(stream), *(keys.lease(stream, _text(group)) for group in groups)],
        instance.clock.offset_ms,
        -1 if kept.max_len is None else max(kept.max_len - room, 0),
        _ms(kept.max_age),
        "acked" if kept.delete_acked else "",
        "drop" if kept.on_full == "drop" else "",
        _ms(kept.group_expiry),
        _RUN,
        *groups,
    )


def _ms(seconds: float | None) -> int:
    return -1 if seconds is None else round(seconds * 1000)


def _text(name: bytes) -> str:
    return name.decode(errors="replace")
