"""Giving dead letters back to the groups that they failed in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from conquiet.errors import ConfigError, ConquietError, GroupLostError, QueueError
from conquiet.kit.chunks import by_number
from conquiet.kit.ids import incarnation
from conquiet.topics.operate.dead_letters import pages_of_now
from conquiet.topics.server.dead_letters import DeadLetter, delete, letters_of
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Topic
from conquiet.wire.parser import Reply
from conquiet.wire.scripts import Call, Script

__all__ = ["replay"]

_PAGE: Final = 100
_PATIENCE_MS: Final = 600_000
"""A replay that is not heard of for so long is given up: it can change nothing any more."""

_BEGIN: Final = Script.named("replay_begin")
_REPLAY: Final = Script.named("replay")
_END: Final = Script.named("replay_end")


async def replay(instance: Instance, topic: Topic, ids: Iterable[str] | None = None, group: str | None = None) -> int:
    """As :meth:`Admin.replay`. An entry that is still in its partition becomes pending again, with no failures.

    Letters that are refused stay where they are; the error comes after the others were replayed. Foreign entries are
    refused, or left alone if ``ids`` is ``None``.
    """
    run = _Run(instance, topic, incarnation())
    async for page in _chosen(instance, topic, ids, group):
        await run.give_back(page)
    if run.refusals:
        first, others = run.refusals[0], len(run.refusals) - 1
        more = f" (and {others} more were refused)" if others else ""
        raise type(first)(f"{first}{more}; {run.replayed} letters were replayed") from None
    return run.replayed


async def _chosen(
    instance: Instance, topic: Topic, ids: Iterable[str] | None, group: str | None
) -> AsyncIterator[Sequence[DeadLetter]]:
    if ids is not None:
        letters = await letters_of(instance, topic, ids, group)
        for letter in letters:
            if letter.is_foreign:
                raise ConfigError(
                    f"entry {letter.id} is no dead letter of topic {topic.name!r}, so it cannot be replayed"
                )
        for some in by_number(letters, _PAGE):
            yield some
        return
    # Of now only: what fails again meanwhile is not replayed again.
    async for page in pages_of_now(instance, topic, group):
        yield [letter for letter in page if not letter.is_foreign]


@dataclass(slots=True)
class _Run:
    """One replay, and how far it is."""

    instance: Instance
    topic: Topic
    name: str
    replayed: int = 0
    refusals: list[ConquietError] = field(default_factory=list)

    async def give_back(self, page: Sequence[DeadLetter]) -> None:
        partitions = sorted({letter.partition for letter in page})
        marked = await asyncio.gather(*(self._begin(partition) for partition in partitions))
        # Read again after each partition knows of this run: what is still there now was not replayed, or by a run
        # whose mark stays until this one has ended.
        asked = dict.fromkeys([*(letter.id for letter in page), *(id for marks in marked for id in marks)])
        there = await letters_of(self.instance, self.topic, asked)
        done = await asyncio.gather(*(self._replay(partition, there) for partition in partitions))
        await delete(self.instance, self.topic, [id for removed in done for id in removed])
        # Marks that a replay left which died before its end go too.
        found = {letter.id for letter in there}
        for removed, marks in zip(done, marked, strict=True):
            removed += [id for id in marks if id not in found]
        await asyncio.gather(*map(self._end, partitions, done))

    async def _begin(self, partition: int) -> list[str]:
        key = self.instance.keys.replayed(self._stream(partition))
        call = _BEGIN([key], self.instance.clock.offset_ms, self.name, _PATIENCE_MS, _PAGE)
        return [mark.decode() for mark in await self.instance.run(key, call)]

    async def _replay(self, partition: int, letters: Sequence[DeadLetter]) -> list[str]:
        """The letters of a partition that are given back, now or before."""
        mine = [letter for letter in letters if letter.partition == partition and not self._refuses(letter)]
        replies = await self.instance.run_many(self._stream(partition), [self._call(letter) for letter in mine])
        return [letter.id for letter, reply in zip(mine, replies, strict=True) if self._took(letter, reply)]

    def _refuses(self, letter: DeadLetter) -> bool:
        """Whether no consumer would get the letter: what a Spark query reads is no matter of its group."""
        is_spark = letter.group in self.topic.spark_groups
        if is_spark:
            what = f"group {letter.group!r} is a Spark query's, which is given nothing"
            self.refusals.append(ConfigError(f"letter {letter.id}: {what}"))
        return is_spark

    async def _end(self, partition: int, removed: Sequence[str]) -> None:
        stream = self._stream(partition)
        keys = [self.instance.keys.replayed(stream), self.instance.keys.replayed_gone(stream)]
        await self.instance.run(stream, _END(keys, self.instance.clock.offset_ms, self.name, _PATIENCE_MS, *removed))

    def _call(self, letter: DeadLetter) -> Call:
        keys, stream = self.instance.keys, self._stream(letter.partition)
        lease, retry, attempts, _ = keys.of_group(stream, letter.group)
        return _REPLAY(
            [stream, retry, attempts, keys.replayed(stream), keys.replayed_gone(stream), lease],
            self.instance.clock.offset_ms,
            self.name,
            letter.id,
            letter.group,
            letter.original_id,
            letter.partition,
            "" if self.topic.legacy or not letter.fields else "copy",
            *letter.fields,
        )

    def _took(self, letter: DeadLetter, reply: Reply) -> bool:
        stream = self._stream(letter.partition)
        if isinstance(reply, Exception):
            self.instance.link.refuse(stream, reply)
        status = reply[0]
        if status == b"STALE":
            raise QueueError(f"letter {letter.id} was not replayed: this replay stood still for too long")
        if status == b"NOGROUP":
            self.refusals.append(
                GroupLostError(f"letter {letter.id}: there is no group {letter.group!r} on {stream!r}")
            )
        elif status == b"GONE":
            is_legacy = self.topic.legacy
            why = "a legacy stream cannot hold a copy for one group" if is_legacy else "its letter has no fields"
            self.refusals.append(ConfigError(f"letter {letter.id}: entry {letter.original_id} is gone, and {why}"))
        elif status == b"RESET":
            what = f"group {letter.group!r} is being reset: if nobody is at it any more, reset it again"
            self.refusals.append(QueueError(f"letter {letter.id}: {what}"))
        self.replayed += status == b"OK"
        return status in (b"OK", b"AGAIN")

    def _stream(self, partition: int) -> str:
        return self.topic.stream(self.instance.keys, partition)
