"""What consumer processes note outside of the library, and the judge of it.

A line is appended in one write, so lines of several processes never mix, and a kill leaves whole lines only. Times are
those of a server, in microseconds. A delivery is two lines, since whoever is killed in a handler writes no second one.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

__all__ = ["Disturbance", "Log", "Note", "Pen", "Record", "check", "first_deliveries", "repetitions"]


@dataclass(slots=True)
class Record:
    """One call of a handler."""

    owner: str
    partition: int
    epoch: int
    id: str
    key: str
    seq: int
    retry: int
    start: int
    end: int | None = None
    outcome: str = ""
    """``done`` or ``failed``; empty if the handler never ended."""

    @property
    def message(self) -> tuple[str, int]:
        return self.key, self.seq

    @property
    def place(self) -> tuple[int, str]:
        return self.partition, self.id


@dataclass(frozen=True, slots=True)
class Note:
    """Something else that a process had to say."""

    name: str
    what: str
    at: int
    detail: Any


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A consumer was killed, or stopped for longer than its lease, while it held these entries."""

    kind: Literal["kill", "stop"]
    owner: str
    at: int
    held: frozenset[tuple[int, str]] = frozenset()


# --- writing and reading -----------------------------------------------------------------------------------------


class Pen:
    """Writes the lines of one process."""

    def __init__(self, path: str, name: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._name = name
        self._count = 0

    def begin(self, record: Record) -> str:
        """Note that a handler begins; the token to end it by."""
        self._count += 1
        token = f"{record.owner}/{self._count}"
        made = (record.owner, record.partition, record.epoch, record.id, record.key, record.seq, record.retry)
        self._write("begin", token, *made, record.start)
        return token

    def end(self, token: str, outcome: str, at: int) -> None:
        self._write("end", token, outcome, at)

    def note(self, what: str, at: int, detail: Any = None) -> None:
        self._write("note", self._name, what, at, json.dumps(detail, separators=(",", ":")))

    def _write(self, *words: object) -> None:
        os.write(self._file, f"{' '.join(map(str, words))}\n".encode())


@dataclass
class Log:
    """The log as far as it was read; ``read`` goes on from there."""

    path: Path
    records: list[Record] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    _open: dict[str, Record] = field(default_factory=dict)
    _done: set[tuple[str, int]] = field(default_factory=set)
    _at: int = 0

    def read(self) -> Log:
        """Take in what was appended since."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._at)
                text = file.read()
            whole = text.rfind(b"\n") + 1
            self._at += whole
            for line in text[:whole].decode().splitlines():
                self._take_in(*line.split())
        return self

    def _take_in(self, kind: str, *words: str) -> None:
        if kind == "note":
            name, what, at, detail = words
            self.notes.append(Note(name, what, int(at), json.loads(detail)))
        elif kind == "end":
            record = self._open.pop(words[0])
            record.outcome, record.end = words[1], int(words[2])
            if record.outcome == "done":
                self._done.add(record.message)
        else:
            token, owner, partition, epoch, id, key, seq, retry, start = words
            record = Record(owner, int(partition), int(epoch), id, key, int(seq), int(retry), int(start))
            self._open[token] = record
            self.records.append(record)

    def noted(self, name: str, what: str) -> list[Note]:
        """What one process noted under ``what``, so far."""
        return [note for note in self.read().notes if (note.name, note.what) == (name, what)]

    def done(self) -> set[tuple[str, int]]:
        """The messages that were handled with success, so far."""
        return self.read()._done


# --- judging ---------------------------------------------------------------------------------------------------


def check(
    sent: Iterable[tuple[str, int]], records: Sequence[Record], disturbances: Sequence[Disturbance] = ()
) -> list[str]:
    """Everything that is wrong with ``records``; nothing, if the promises were kept.

    * Each message that was sent was handled with success, and nothing else was handled.
    * First deliveries are in the order of sending for each key, and an owner never handles two of a key at once.
    * Nobody begins with a message after the partition's next owner has begun, and nobody is still at work then, but
      for what a killed or stopped owner had begun before. A stop may fall between the owner's look at its lease
      and the first line of the handler: once for each.
    * A message is handled again, at the same retry count, only if it was in flight in a kill or a stop.
    * Whatever was begun has ended, but for what a killed owner had begun.
    """
    late = list(_late_starts(records))
    excused = _excused(late, disturbances)
    in_time = [record for record in records if not any(record is other for other in excused)]
    return [
        *_lost(set(sent), records),
        *_disorder(in_time),
        *_side_by_side(records),
        *(f"begun after the next owner had: {record}" for record in late if record in in_time),
        *_overlaps(in_time, late, disturbances),
        *_repeated(records, disturbances),
        *_unfinished(records, disturbances),
    ]


def first_deliveries(records: Iterable[Record]) -> dict[tuple[str, int], Record]:
    """The earliest call of each message."""
    found: dict[tuple[str, int], Record] = {}
    for record in sorted(records, key=lambda record: record.start):
        found.setdefault(record.message, record)
    return found


def repetitions(records: Iterable[Record]) -> dict[tuple[tuple[int, str], int], int]:
    """How often an entry was handled at a retry count, where that is more than once."""
    counts = Counter((record.place, record.retry) for record in records)
    return {which: count for which, count in counts.items() if count > 1}


def _lost(sent: set[tuple[str, int]], records: Iterable[Record]) -> Iterator[str]:
    handled = {record.message for record in records}
    done = {record.message for record in records if record.outcome == "done"}
    for message in sorted(sent - done):
        yield f"lost: {message}{', though begun' if message in handled else ''}"
    for message in sorted(handled - sent):
        yield f"never sent: {message}"


def _disorder(records: Iterable[Record]) -> Iterator[str]:
    by_key: defaultdict[str, list[Record]] = defaultdict(list)
    for record in first_deliveries(records).values():
        by_key[record.key].append(record)
    for of_key in by_key.values():
        for before, after in pairwise(of_key):
            if after.seq < before.seq:
                yield f"out of order: {after} after {before}"


def _side_by_side(records: Iterable[Record]) -> Iterator[str]:
    latest: dict[tuple[int, int, str], Record] = {}
    for record in sorted(records, key=lambda record: record.start):
        before = latest.get((record.partition, record.epoch, record.key))
        if before is not None and (before.end is None or before.end > record.start):
            yield f"two of a key at once: {before} and {record}"
        latest[record.partition, record.epoch, record.key] = record


def _next_starts(records: Iterable[Record]) -> dict[tuple[int, int], int]:
    """For each partition and epoch, when an owner of a later epoch first began with something."""
    first: dict[tuple[int, int], int] = {}
    for record in records:
        which = record.partition, record.epoch
        first[which] = min(record.start, first.get(which, record.start))
    found: dict[tuple[int, int], int] = {}
    earliest: dict[int, int] = {}
    for partition, epoch in sorted(first, reverse=True):
        if partition in earliest:
            found[partition, epoch] = earliest[partition]
        start = first[partition, epoch]
        earliest[partition] = min(start, earliest.get(partition, start))
    return found


def _late_starts(records: Sequence[Record]) -> Iterator[Record]:
    starts = _next_starts(records)
    for record in records:
        if record.start >= starts.get((record.partition, record.epoch), record.start + 1):
            yield record


def _excused(late: Iterable[Record], disturbances: Iterable[Disturbance]) -> list[Record]:
    stops = [one for one in disturbances if one.kind == "stop"]
    excused: list[Record] = []
    for record in late:
        cause = next((one for one in stops if one.owner == record.owner and record.place in one.held), None)
        if cause is not None:
            stops.remove(cause)
            excused.append(record)
    return excused


def _overlaps(records: Sequence[Record], late: Sequence[Record], disturbances: Sequence[Disturbance]) -> Iterator[str]:
    starts = _next_starts(records)
    known = {id(record) for record in late}
    for record in records:
        following = starts.get((record.partition, record.epoch))
        if following is None or id(record) in known or (record.end is not None and record.end <= following):
            continue
        if not any(one.owner == record.owner and record.start <= one.at <= following for one in disturbances):
            yield f"still at work when the next owner began: {record}"


def _repeated(records: Iterable[Record], disturbances: Iterable[Disturbance]) -> Iterator[str]:
    allowed = Counter(place for one in disturbances for place in one.held)
    for (place, retry), count in repetitions(records).items():
        if count > 1 + allowed[place]:
            yield f"handled {count} times at retry {retry}, in flight in {allowed[place]} disturbances: {place}"


def _unfinished(records: Iterable[Record], disturbances: Iterable[Disturbance]) -> Iterator[str]:
    killed = {one.owner for one in disturbances if one.kind == "kill"}
    for record in records:
        if record.end is None and record.owner not in killed:
            yield f"begun and never ended: {record}"
