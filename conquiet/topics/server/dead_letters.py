"""Dead letters: what they tell, and typed calls that forward, read and delete them."""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from conquiet.errors import ConfigError
from conquiet.kit import codec, entry_ids, rules
from conquiet.kit.chunks import by_number, by_size
from conquiet.kit.ids import incarnation
from conquiet.message import DATA
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.pace import Pace, paged
from conquiet.topics.server.topics import Topic
from conquiet.wire.keys import name
from conquiet.wire.scripts import Script
from conquiet.wire.streams import Entry, entries_of, xrange_one

__all__ = ["PAGE", "DeadLetter", "delete", "forward", "letters_of", "pages"]

PAGE: Final = 100
"""Letters of one page."""
_CHUNK_BYTES: Final = 1 << 20
_FOREIGN: Final = "foreign entry"
_FORWARD: Final = Script.named("forward")
_META: Final = tuple(
    b"originalTopic partitionId group originalMessageId attempts reason errorType error traceback"
    b" firstFailedAt failedAt consumer crashes fields".split()
)
"""The fields that a letter begins with, in this order; the entry's own, which may have the same names, follow."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that a group gave up on, with the entry as it was and the record of its failures.

    ``id`` is the letter's own, ``original_id`` (``ms-seq``) that of the entry in its partition. ``fields`` are the
    entry's, names and values in turn, verbatim. Whatever else lies in the dead-letter stream is listed too, with
    the reason ``foreign entry`` and nothing but its ``id`` and ``fields``.
    """

    id: str
    topic: str
    fields: tuple[bytes, ...]
    partition: int = -1
    group: str = ""
    original_id: str = ""
    attempts: int = 0
    crashes: int = 0
    reason: str = _FOREIGN
    error_type: str = ""
    error: str = ""
    traceback: str = ""
    first_failed_at: dt.datetime | None = None
    failed_at: dt.datetime | None = None
    consumer: str = ""

    @property
    def is_foreign(self) -> bool:
        """Whether this is no dead letter at all, and cannot be replayed."""
        return self.partition < 0

    @property
    def key(self) -> str | None:
        """The message's key."""
        key = self._field(b"key")
        return None if key is None else _text(key)

    @property
    def raw(self) -> bytes:
        """The payload as it is in Redis; empty if the entry has none."""
        raw = self._field(b"payload")
        return (self._field(DATA) if raw is None else raw) or b""

    @property
    def payload(self) -> Any:
        """The payload, decoded: JSON, or bytes as they are. ``None`` if it is neither, which may be why it is here."""
        written = self._field(b"codec")
        if written is not None and written != b"json":
            return self.raw if written == b"bytes" else None
        try:
            return codec.decode(self.raw)
        except codec.UNREADABLE:
            return None

    @property
    def headers(self) -> Mapping[str, str]:
        """The message's headers; none if they cannot be read."""
        try:
            headers = codec.decode(self._field(b"headers") or b"{}")
        except codec.UNREADABLE:
            return {}
        return cast("dict[str, str]", headers) if isinstance(headers, dict) else {}

    def _field(self, wanted: bytes) -> bytes | None:
        fields = self.fields
        return next((fields[at + 1] for at in range(0, len(fields), 2) if fields[at] == wanted), None)


def _letter(topic: Topic, entry: Entry) -> DeadLetter:
    id, words = entry[0].decode(), entry[1]
    try:
        return _read(topic, id, words)
    except (ValueError, OverflowError, OSError):
        return DeadLetter(id, topic.name, tuple(words))


def _read(topic: Topic, id: str, words: Sequence[bytes]) -> DeadLetter:
    head = 2 * len(_META)
    about = dict(zip(_META, words[1:head:2], strict=True))
    is_whole = tuple(words[0:head:2]) == _META and len(words) == head + 2 * int(about[b"fields"])
    if not is_whole or about[b"originalTopic"] != topic.name.encode():
        raise ValueError(_FOREIGN)
    return DeadLetter(
        id,
        topic.name,
        tuple(words[head:]),
        rules.integer("partitionId", int(about[b"partitionId"]), least=0),
        name("group", about[b"group"].decode()),
        entry_ids.checked("originalMessageId", about[b"originalMessageId"].decode()),
        int(about[b"attempts"]),
        int(about[b"crashes"]),
        _text(about[b"reason"]),
        _text(about[b"errorType"]),
        _text(about[b"error"]),
        _text(about[b"traceback"]),
        entry_ids.moment(about[b"firstFailedAt"]),
        entry_ids.moment(about[b"failedAt"]),
        _text(about[b"consumer"]).partition("#")[0],
    )


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


# --- on their way ---------------------------------------------------------------------------------------


async def forward(instance: Instance, topic: Topic, partition: int, group: str, limit: int = 100) -> int:
    """Move up to ``limit`` dead letters from a partition's outbox to the topic's dead letters; how many it was.

    Safe to repeat and to run several times at once: a crash at any point loses nothing, and no letter arrives
    twice. The forwarder that began last goes on, the others stop. As many as ``limit`` means that more may be waiting.
    """
    box = _Outbox(instance, topic, partition, group, incarnation())
    if await instance.ask("XLEN", box.key) == 0:
        return 0
    # Read only after the claim: an earlier forwarder cannot append any more what is found now.
    await box.say("claim", "0-0")
    left, moved, pace = entry_ids.LAST, 0, Pace(limit)
    while moved < limit and (page := await box.read(min(pace.count, limit - moved))):
        pace.saw(page)
        for chunk in by_size(page, _CHUNK_BYTES, _size):
            if await box.say("", chunk[0][0], *_words(chunk)) < 0:
                return moved
            left, moved = entry_ids.after(chunk[-1][0].decode()), moved + len(chunk)
            await instance.ask("XDEL", box.key, *(id for id, _ in chunk))
    await box.say("", left)
    return moved


@dataclass(frozen=True, slots=True)
class _Outbox:
    instance: Instance
    topic: Topic
    partition: int
    group: str
    claim: str

    @property
    def key(self) -> str:
        return self.instance.keys.outbox(self.topic.stream(self.instance.keys, self.partition), self.group)

    async def read(self, limit: int) -> list[Entry]:
        return entries_of(await self.instance.ask("XRANGE", self.key, "-", "+", "COUNT", limit))

    async def say(self, claiming: str, left: str | bytes, *letters: bytes | int) -> int:
        """Claim the outbox, or append letters, given the ID before which all have left the outbox."""
        keys, kept, topic = self.instance.keys, self.topic.retention, self.topic.name
        limit = -1 if kept.dead_letter_max_len is None else kept.dead_letter_max_len
        age = -1 if kept.dead_letter_max_age is None else round(kept.dead_letter_max_age * 1000)
        call = _FORWARD(
            [keys.dead_letters(topic), keys.forwarded(topic)],
            self.instance.clock.offset_ms,
            f"{self.group}/{self.partition}",
            self.claim,
            claiming,
            limit,
            age,
            left,
            *letters,
        )
        return cast("int", await self.instance.run(keys.dead_letters(topic), call))


def _words(chunk: Sequence[Entry]) -> Iterator[bytes | int]:
    for id, words in chunk:
        yield id
        yield len(words)
        yield from words


def _size(entry: Entry) -> int:
    return sum(map(len, entry[1]))


# --- where they are -------------------------------------------------------------------------------------


async def pages(
    instance: Instance, topic: Topic, start: str, end: str, group: str | None = None, size: int = PAGE
) -> AsyncIterator[list[DeadLetter]]:
    """The dead letters from ``start`` to ``end``, of ``group`` if one is given, in pages that may be empty."""
    async for page in paged(instance.ask, instance.keys.dead_letters(topic.name), start, end, size):
        yield [letter for letter in (_letter(topic, entry) for entry in page) if group in (None, letter.group)]


async def letters_of(
    instance: Instance, topic: Topic, ids: Iterable[str], group: str | None = None
) -> list[DeadLetter]:
    """The letters of these IDs that are still there, of ``group`` if one is given."""
    if isinstance(ids, str):
        raise ConfigError(f"ids must be several IDs, not the string {ids!r}")
    wanted = sorted({entry_ids.checked("ids", id) for id in ids}, key=entry_ids.order)
    key, found = instance.keys.dead_letters(topic.name), list[DeadLetter]()
    for some in by_number(wanted, PAGE):
        replies = await instance.link.call_many(key, [xrange_one(key, id) for id in some])
        for reply in replies:
            if isinstance(reply, Exception):
                instance.link.refuse(key, reply)
            found += [_letter(topic, entry) for entry in entries_of(reply)]
    return [letter for letter in found if group in (None, letter.group)]


async def delete(instance: Instance, topic: Topic, ids: Iterable[str]) -> int:
    """Remove letters; how many were there."""
    key, gone, words = instance.keys.dead_letters(topic.name), 0, list(ids)
    for some in by_number(words, PAGE):
        gone += await instance.ask("XDEL", key, *some)
    return gone
