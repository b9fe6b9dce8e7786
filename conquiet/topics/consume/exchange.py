"""The fenced scripts of an owned partition: how they are called, and what their answers mean."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from conquiet.errors import MalformedMessageError
from conquiet.kit import codec as json
from conquiet.topics.codec import Codec
from conquiet.topics.consume.delivery import Delivery
from conquiet.topics.consume.outcomes import Bury, Outcome, Park, Requeue
from conquiet.topics.consume.partition import Partition
from conquiet.topics.format import envelope
from conquiet.topics.options import DeadLetterPolicy
from conquiet.topics.server.instance import Instance
from conquiet.wire.parser import Reply
from conquiet.wire.scripts import Call, Script

__all__ = ["Exchanges", "Step", "Taken"]

_log = logging.getLogger("conquiet.topics")
_TAKE: Final = Script.named("take")
_TAKEOVER: Final = Script.named("takeover")
_PARK: Final = Script.named("park")
_REQUEUE: Final = Script.named("requeue")
_BURY: Final = Script.named("bury")
_SUSPECT: Final = Script.named("lease_suspect")
_SUSPICIOUS: Final = 3
"""From how many crashes on an entry is handled alone."""
_MOST_PARKED: Final = 500
_MOST_COPIED: Final = 100
_MOST_BYTES: Final = 1 << 20
"""What a script settles at most before others get their turn; of entries that it copies, so many bytes."""
_MOST_ACKED: Final = 5_000

Kind: TypeAlias = Literal["take", "takeover", "park", "requeue", "bury", "suspect"]
_Failed: TypeAlias = list[tuple[Delivery, Outcome]]


@dataclass(slots=True)
class Step:
    """One script call of an exchange, and what it takes along, so that a lost answer loses nothing."""

    partition: Partition
    kind: Kind
    call: Call
    acks: list[Delivery] = field(default_factory=list)
    failed: _Failed = field(default_factory=list)
    fresh: int = 0
    asked: int = 0

    @property
    def carried(self) -> int:
        """How many settlements it carries."""
        return len(self.acks) + len(self.failed)


@dataclass(slots=True)
class Taken:
    """An entry as a script returned it."""

    delivery: Delivery
    malformed: MalformedMessageError | None = None
    is_foreign: bool = False
    parked_until: float | None = None
    was_others: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is a message like most."""
        return self.malformed is None and not self.is_foreign


class Exchanges:
    """Builds the calls of one subscription and reads their answers."""

    def __init__(
        self,
        instance: Instance,
        group: str,
        codec: Codec,
        letters: DeadLetterPolicy,
        delivery: type[Delivery] = Delivery,
    ) -> None:
        self._instance = instance
        self._group = group
        self._delivery = delivery
        self._codec = codec
        self._letters = letters
        self._only = group.encode()

    # --- calls ---------------------------------------------------------------------------------------------

    def take(self, partition: Partition, most: int, most_due: int) -> Step:
        """Acknowledge what is done, then take up to ``most`` new entries and ``most_due`` parked ones."""
        acks, partition.acks = partition.acks, []
        if len(acks) > _MOST_ACKED:
            acks, partition.acks = acks[:_MOST_ACKED], acks[_MOST_ACKED:]
        keys, stream = self._instance.keys, partition.stream
        call = _TAKE(
            [
                partition.lease.key,
                stream,
                keys.retry(stream, self._group),
                keys.attempts(stream, self._group),
                keys.delayed(stream),
                keys.delayed_items(stream),
            ],
            *self._fence(partition),
            self._instance.clock.offset_ms,
            self._group,
            most,
            most_due,
            partition.last_id,
            partition.limit or "",
            *[delivery.id for delivery in acks],
        )
        partition.sending += len(acks)
        partition.asking += max(most, most_due)
        return Step(partition, "take", call, acks=acks, fresh=most, asked=max(most, most_due))

    def takeover(self, partition: Partition, size: int) -> Step:
        """Take over the next page of the pending list."""
        keys, stream = self._instance.keys, partition.stream
        call = _TAKEOVER(
            [partition.lease.key, stream, keys.retry(stream, self._group), keys.attempts(stream, self._group)],
            *self._fence(partition),
            self._group,
            partition.page or "-",
            size,
            partition.crashed,
            partition.running,
            _SUSPICIOUS,
        )
        partition.asking += size
        return Step(partition, "takeover", call, asked=size)

    def suspect(self, partition: Partition, id: str) -> Step:
        """Note that ``id`` is about to be handled alone; ``""`` when none is any more."""
        return Step(partition, "suspect", _SUSPECT([partition.lease.key], *self._fence(partition), id))

    def failures(self, partition: Partition) -> Iterator[Step]:
        """Write down every failure that waits for it."""
        failed, partition.failed = partition.failed, []
        partition.sending += len(failed)
        parks = [pair for pair in failed if isinstance(pair[1], Park)]
        requeues = [pair for pair in failed if isinstance(pair[1], Requeue)]
        buries = [pair for pair in failed if isinstance(pair[1], Bury)]
        for chunk in _chunks(parks, _MOST_PARKED, None):
            yield Step(partition, "park", self._park(partition, chunk), failed=chunk)
        for chunk in _chunks(requeues, _MOST_COPIED, _MOST_BYTES):
            yield Step(partition, "requeue", self._requeue(partition, chunk), failed=chunk)
        for chunk in _chunks(buries, _MOST_COPIED, _MOST_BYTES):
            yield Step(partition, "bury", self._bury(partition, chunk), failed=chunk)

    def _fence(self, partition: Partition) -> tuple[str, int]:
        return partition.lease.owner, partition.lease.epoch

    def _park(self, partition: Partition, failed: _Failed) -> Call:
        keys, stream = self._instance.keys, partition.stream
        words: list[str | int] = []
        for delivery, outcome in failed:
            assert isinstance(outcome, Park)
            words += (delivery.id, round(outcome.delay * 1000), outcome.failures, outcome.error_type)
        return _PARK(
            [partition.lease.key, stream, keys.retry(stream, self._group), keys.attempts(stream, self._group)],
            *self._fence(partition),
            self._instance.clock.offset_ms,
            self._group,
            *words,
        )

    def _requeue(self, partition: Partition, failed: _Failed) -> Call:
        keys, stream = self._instance.keys, partition.stream
        words: list[str | int] = []
        for delivery, outcome in failed:
            assert isinstance(outcome, Requeue)
            words += (delivery.id, round(outcome.delay * 1000), outcome.failures, delivery.original_id)
        return _REQUEUE(
            [
                partition.lease.key,
                stream,
                keys.attempts(stream, self._group),
                keys.delayed(stream),
                keys.delayed_items(stream),
                keys.retry(stream, self._group),
            ],
            *self._fence(partition),
            self._instance.clock.offset_ms,
            self._group,
            *words,
        )

    def _bury(self, partition: Partition, failed: _Failed) -> Call:
        keys, stream = self._instance.keys, partition.stream
        words: list[str | bytes | int] = []
        for delivery, outcome in failed:
            assert isinstance(outcome, Bury)
            words += (delivery.id, outcome.failures, outcome.reason, outcome.error_type, outcome.error)
            replaced = self._replaced(delivery)
            words += (outcome.traceback, -1 if replaced is None else len(replaced), *(replaced or ()))
        return _BURY(
            [
                partition.lease.key,
                stream,
                keys.retry(stream, self._group),
                keys.attempts(stream, self._group),
                keys.outbox(stream, self._group),
            ],
            *self._fence(partition),
            self._instance.clock.offset_ms,
            self._group,
            partition.topic.name,
            partition.index,
            *words,
        )

    def _replaced(self, delivery: Delivery) -> list[bytes] | None:
        """The fields that a dead letter holds instead of its entry's; ``None`` to keep them as they are."""
        letters = self._letters
        if letters.transform is None and not letters.drop_headers:
            return None
        try:
            return _words(_transformed(delivery, letters))
        except Exception:
            # A letter that tells too much is better than none.
            _log.exception("a dead letter is left as it is, since its policy failed")
            return None

    # --- answers -------------------------------------------------------------------------------------------

    def fresh(self, partition: Partition, entries: Sequence[Reply]) -> list[Taken]:
        """New entries."""
        taken = self._taken
        return [taken(partition, id.decode(), fields) for id, fields in entries]

    def due(self, partition: Partition, entries: Sequence[Reply]) -> list[Taken]:
        """Parked entries whose time has come."""
        return [self._again(partition, *entry) for entry in entries]

    def taken_over(self, partition: Partition, entries: Sequence[Reply]) -> list[Taken]:
        """Entries that were pending before."""
        found: list[Taken] = []
        for id, fields, parked, record, crashes, others in entries:
            taken = self._again(partition, id, fields, record, crashes)
            taken.parked_until = float(parked) if parked else None
            taken.was_others = others == b"1"
            found.append(taken)
        return found

    def _again(self, partition: Partition, id: bytes, fields: list[bytes], record: bytes, crashes: bytes) -> Taken:
        taken = self._taken(partition, id.decode(), fields)
        taken.delivery.crashes = int(crashes)
        if record:
            failures, _, _, _, replayed = record.decode().split("|", 4)
            taken.delivery.retry_count = int(failures)
            if replayed:
                taken.delivery.replayed_from = replayed
        return taken

    def _taken(self, partition: Partition, id: str, fields: list[bytes]) -> Taken:
        delivery = self._delivery()
        delivery.owner = partition
        delivery.topic = partition.topic.name
        delivery.partition = partition.index
        delivery.group = self._group
        delivery.epoch = partition.lease.epoch
        delivery.crashes = 0
        delivery.confirmed = None
        delivery.settled = delivery.alone = False
        delivery.timed = True
        if b"onlyGroup" in fields and envelope.only_group(fields) not in (None, self._only):
            envelope.fill_blank(delivery, id, fields)
            return Taken(delivery, is_foreign=True)
        try:
            envelope.fill(delivery, id, fields, self._codec)
        except MalformedMessageError as error:
            envelope.fill_blank(delivery, id, fields)
            return Taken(delivery, malformed=error)
        return Taken(delivery)


def _transformed(delivery: Delivery, letters: DeadLetterPolicy) -> Mapping[bytes, bytes]:
    fields = dict(delivery.fields)
    if letters.drop_headers and b"headers" in fields:
        dropped = {*letters.drop_headers, "partitionId"}
        kept = {name: value for name, value in delivery.headers.items() if name not in dropped}
        fields[b"headers"] = json.encode_object(kept)
    return fields if letters.transform is None else letters.transform(fields)


def _words(fields: Mapping[bytes, bytes]) -> list[bytes]:
    words = [word for pair in fields.items() for word in pair]
    if not all(isinstance(word, bytes) for word in words):
        raise TypeError("transform must return names and values as bytes")
    return words


def _chunks(failed: _Failed, most: int, most_bytes: int | None) -> Iterator[_Failed]:
    """``failed`` in runs that do not hold the server up: by number, and by size where entries are copied."""
    start = size = 0
    for at, (delivery, _) in enumerate(failed):
        length = 0 if most_bytes is None else sum(map(len, delivery._entry))
        if at > start and (at - start >= most or (most_bytes is not None and size + length > most_bytes)):
            yield failed[start:at]
            start, size = at, 0
        size += length
    if start < len(failed):
        yield failed[start:]
