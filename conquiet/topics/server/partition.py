"""An owned partition in Redis: typed calls of its scripts, each fenced by owner and epoch, and their typed replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeAlias, TypeVar

from conquiet.kit.clock import Clock
from conquiet.topics.server.instance import Instance
from conquiet.wire.keys import Keys
from conquiet.wire.lease import Lease
from conquiet.wire.parser import Reply
from conquiet.wire.scripts import Call, Script

__all__ = [
    "MOST_ACKED",
    "MOST_BYTES",
    "MOST_COPIED",
    "MOST_PAGED",
    "MOST_PARKED",
    "SUSPICIOUS",
    "Again",
    "Answer",
    "Asked",
    "Bury",
    "OwnedPartition",
    "Page",
    "Park",
    "Requeue",
    "Row",
    "Taken",
    "send",
]

_R_co = TypeVar("_R_co", covariant=True)

MOST_PAGED: Final = 500
MOST_PARKED: Final = 500
MOST_COPIED: Final = 100
MOST_BYTES: Final = 1 << 20
"""What a script settles at most before others get their turn; of entries that it copies, so many bytes."""
MOST_ACKED: Final = 3_500
SUSPICIOUS: Final = 3
"""From how many crashes on an entry is handled alone."""

_TAKE: Final = Script.named("take")
_TAKEOVER: Final = Script.named("takeover")
_PARK: Final = Script.named("park")
_REQUEUE: Final = Script.named("requeue")
_BURY: Final = Script.named("bury")
_SUSPECT: Final = Script.named("lease_suspect")

Row: TypeAlias = Sequence[Reply]
"""A new entry: its ID, and its fields and values in turn."""


# --- what becomes of an entry that failed -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Park:
    """Leave it pending, and try it again after ``delay`` seconds."""

    delay: float
    failures: int
    error_type: str


@dataclass(frozen=True, slots=True)
class Requeue:
    """Put a copy of it behind the others after ``delay`` seconds."""

    delay: float
    failures: int


@dataclass(frozen=True, slots=True)
class Bury:
    """Make it a dead letter."""

    failures: int
    reason: str
    error_type: str = ""
    error: str = ""
    traceback: str = ""


# --- replies ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Again:
    """An entry that was delivered before."""

    id: str
    fields: list[bytes]
    failures: int | None
    """How often its handler failed; ``None`` if it never did, as far as the server knows."""
    replayed_from: str
    crashes: int
    is_parked: bool = False
    was_others: bool = False


@dataclass(frozen=True, slots=True)
class Taken:
    """New entries, and parked ones that are due. ``next_due``: seconds until the next one is."""

    acknowledged: int
    fresh: Sequence[Row]
    due: Sequence[Again]
    next_due: float | None
    ghosts: int
    is_more: bool
    """Whether new entries were left because they are large."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the pending list. ``following``: where the next one begins; ``None`` after the last."""

    following: str | None
    entries: Sequence[Again]
    ghosts: int
    last_id: str
    """The ID up to which the group was given entries; told with the last page."""


Answer: TypeAlias = Taken | Page | int
"""What a script answers its owner: what it took, or how many entries it wrote."""


@dataclass(frozen=True, slots=True)
class Asked(Generic[_R_co]):
    """A call of a script, and how its reply is read."""

    call: Call
    read: Callable[[Reply], _R_co]


class OwnedPartition:
    """The scripts of one partition, for the group's owner. Every reply is ``None`` if the lease is another owner's."""

    def __init__(self, keys: Keys, clock: Clock, topic: str, index: int, stream: str, group: str, lease: Lease) -> None:
        self._clock = clock
        self._fence = (lease.owner, lease.epoch)
        self._group = group
        self._place = (topic, index)
        self._lease = [lease.key]
        self._retried = [lease.key, stream, keys.retry(stream, group), keys.attempts(stream, group)]
        delayed = [keys.delayed(stream), keys.delayed_items(stream)]
        self._taking = [*self._retried, *delayed]
        self._requeueing = [lease.key, stream, keys.attempts(stream, group), *delayed, keys.retry(stream, group)]
        self._burying = [*self._retried, keys.outbox(stream, group)]

    def take(
        self, fresh: int, due: int, last_id: str, limit: str | None = None, acks: Sequence[str] = (), known: str = ""
    ) -> Asked[Taken | None]:
        """Acknowledge ``acks``, then take up to ``fresh`` new entries behind ``last_id`` and ``due`` parked ones.

        The fields of the entry ``known`` are left out.
        """
        until = f"{limit or ''}|{known}" if known else limit or ""
        terms = (*self._fence, self._clock.offset_ms, self._group, fresh, due, last_id, until)
        return Asked(_TAKE(self._taking, *terms, *acks), _taken)

    def acknowledge(self, last_id: str, acks: Sequence[str]) -> Asked[Taken | None]:
        """Acknowledge ``acks``, and take nothing; it tells when the next parked entry is due."""
        return self.take(0, 0, last_id, None, acks)

    def page(self, start: str, size: int, crashed: str, running: str) -> Asked[Page | None]:
        """Take over the page of the pending list that begins at ``start``."""
        return Asked(
            _TAKEOVER(self._retried, *self._fence, self._group, start, size, crashed, running, SUSPICIOUS), _page
        )

    def park(self, entries: Sequence[tuple[str, Park]]) -> Asked[int | None]:
        """Leave failed entries pending until they are due again; how many were pending."""
        words = [
            word for id, park in entries for word in (id, round(park.delay * 1000), park.failures, park.error_type)
        ]
        return Asked(_PARK(self._retried, *self._fence, self._clock.offset_ms, self._group, *words), _written)

    def requeue(self, entries: Sequence[tuple[str, Requeue, str]]) -> Asked[int | None]:
        """Put copies of failed entries, each with the ID of the first one, behind the others; how many."""
        words = [
            word
            for id, requeue, original in entries
            for word in (id, round(requeue.delay * 1000), requeue.failures, original)
        ]
        return Asked(_REQUEUE(self._requeueing, *self._fence, self._clock.offset_ms, self._group, *words), _written)

    def bury(self, entries: Sequence[tuple[str, Bury, Sequence[bytes] | None]]) -> Asked[int | None]:
        """Make dead letters of entries, with other fields than their own where these are given; how many."""
        words: list[str | bytes | int] = []
        for id, bury, replaced in entries:
            words += (id, bury.failures, bury.reason, bury.error_type, bury.error, bury.traceback)
            words += (-1 if replaced is None else len(replaced), *(replaced or ()))
        terms = (*self._fence, self._clock.offset_ms, self._group, *self._place)
        return Asked(_BURY(self._burying, *terms, *words), _written)

    def mark(self, id: str) -> Asked[int | None]:
        """Note that ``id`` is about to be handled alone; ``""`` when none is any more."""
        return Asked(_SUSPECT(self._lease, *self._fence, id), _noted)


async def send(
    instance: Instance, stream: str, asked: Sequence[Asked[Answer | None]]
) -> list[Answer | Exception | None]:
    """The replies to calls for the node of ``stream``, in one write; what the server refuses comes as a value."""
    replies = await instance.run_many(stream, [one.call for one in asked])
    return [
        reply if isinstance(reply, Exception) else one.read(reply) for one, reply in zip(asked, replies, strict=True)
    ]


def _taken(reply: Reply) -> Taken | None:
    if not reply[0]:
        return None
    _, acknowledged, fresh, due, next_due, ghosts, more = reply
    return Taken(
        acknowledged,
        fresh,
        [_again(*entry) for entry in due],
        next_due / 1000 if next_due >= 0 else None,
        ghosts,
        bool(more),
    )


def _page(reply: Reply) -> Page | None:
    if not reply[0]:
        return None
    _, following, entries, ghosts, last = reply
    found = [
        _again(id, fields, record, crashes, parked != b"", others == b"1")
        for id, fields, parked, record, crashes, others in entries
    ]
    return Page(following.decode() or None, found, ghosts, last.decode())


def _written(reply: Reply) -> int | None:
    return int(reply[1]) if reply[0] else None


def _noted(reply: Reply) -> int | None:
    return reply or None


def _again(
    id: bytes, fields: list[bytes], record: bytes, crashes: bytes, is_parked: bool = False, was_others: bool = False
) -> Again:
    failures, replayed = None, ""
    if record:
        count, _, _, _, replayed = record.decode().split("|", 4)
        failures = int(count)
    return Again(id.decode(), fields, failures, replayed, int(crashes), is_parked, was_others)
