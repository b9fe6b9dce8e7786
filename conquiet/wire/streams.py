"""Stream commands as packed bytes, and the one parser of their replies.

Every connection speaks RESP2 undecoded, so each reply has one shape, on every server and for every client
that a user may pass. A newer command with a better shape would enter here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

import hiredis

from conquiet.wire.capabilities import still_there
from conquiet.wire.parser import Reply

__all__ = [
    "MOST_ARGUMENTS",
    "MOST_IDS",
    "Entry",
    "Pending",
    "PendingSummary",
    "entries_of",
    "group_named",
    "pack",
    "pending_of",
    "pending_summary_of",
    "read_entries_of",
    "streams_of",
    "xack",
    "xadd",
    "xadd_head",
    "xclaim",
    "xgroup_create",
    "xinfo_groups",
    "xlen",
    "xpending",
    "xpending_summary",
    "xrange_one",
    "xread",
    "xreadgroup",
]

MOST_ARGUMENTS: Final = 3999
"""Of one request: some managed services refuse more."""
MOST_IDS: Final = 2000
"""How many IDs one ``XACK`` or ``XCLAIM`` names."""

Entry: TypeAlias = tuple[bytes, list[bytes]]
"""An entry's ID, and its fields and values in turn."""


def pack(*words: str | bytes | int) -> bytes:
    """A command in the wire protocol."""
    return cast("bytes", hiredis.pack_command(cast("Any", words)))


# --- commands ----------------------------------------------------------------------------------------


def xadd_head(stream: str, field: bytes) -> bytes:
    """All of an ``XADD`` of one field but the value: the same for each entry, so packed once."""
    return pack("XADD", stream, "*", field, "")[: -len(b"$0\r\n\r\n")]


def xadd(head: bytes, value: bytes) -> bytes:
    """The ``XADD`` that ``head`` begins; put together by hand, three times as fast as packing it whole."""
    return b"%b$%d\r\n%b\r\n" % (head, len(value), value)


def xgroup_create(stream: str, group: str, start: str) -> bytes:
    """Create ``group`` at ``start``, and the stream if need be."""
    return pack("XGROUP", "CREATE", stream, group, start, "MKSTREAM")


def xreadgroup(stream: str, group: str, consumer: str, *, count: int, block_ms: int) -> bytes:
    """Take up to ``count`` entries that the group has not seen, waiting up to ``block_ms`` for the first."""
    return pack(*("XREADGROUP", "GROUP", group, consumer, "COUNT", count, "BLOCK", block_ms, "STREAMS", stream, ">"))


def xread(after: Mapping[str, str], *, count: int = 1, block_ms: int | None = None) -> bytes:
    """Up to ``count`` entries of each stream behind its ID in ``after``, waiting up to ``block_ms`` for the first.

    It has no side effect.
    """
    block: tuple[str | int, ...] = () if block_ms is None else ("BLOCK", block_ms)
    return pack("XREAD", "COUNT", count, *block, "STREAMS", *after, *after.values())


def xack(stream: str, group: str, ids: Iterable[str]) -> bytes:
    """Take ``ids`` off the group's pending list."""
    return pack("XACK", stream, group, *ids)


def xclaim(stream: str, group: str, consumer: str, min_idle_ms: int, ids: Iterable[str]) -> bytes:
    """Make ``consumer`` the owner of those of ``ids`` that are idle for ``min_idle_ms``."""
    return pack("XCLAIM", stream, group, consumer, min_idle_ms, *ids)


def xpending(stream: str, group: str, *, begin: str = "-", count: int) -> bytes:
    """The first ``count`` pending entries from ``begin`` on."""
    return pack("XPENDING", stream, group, begin, "+", count)


def xpending_summary(stream: str, group: str) -> bytes:
    """How many entries are pending, and with whom."""
    return pack("XPENDING", stream, group)


def xrange_one(stream: str, id: str) -> bytes:
    """The entry ``id``, if it is still there."""
    return pack("XRANGE", stream, id, id)


def xlen(stream: str) -> bytes:
    """The number of entries in the stream."""
    return pack("XLEN", stream)


def xinfo_groups(stream: str) -> bytes:
    """What the server knows of the stream's groups."""
    return pack("XINFO", "GROUPS", stream)


# --- replies -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pending:
    """A delivered, unacknowledged entry."""

    id: str
    consumer: str
    idle_ms: int
    deliveries: int


@dataclass(frozen=True, slots=True)
class PendingSummary:
    """The whole pending list in a few numbers; the IDs are ``None`` when it is empty."""

    count: int
    first_id: str | None
    last_id: str | None
    consumers: tuple[tuple[str, int], ...]


def streams_of(reply: Reply) -> list[str]:
    """The streams that an ``XREAD`` found something in."""
    return [stream.decode() for stream, _ in reply or ()]


def read_entries_of(reply: Reply) -> Sequence[Entry]:
    """The entries of a one-stream ``XREADGROUP``; a nil reply means none."""
    return cast("Sequence[Entry]", reply[0][1]) if reply else ()


def entries_of(reply: Reply) -> list[Entry]:
    """The entries of ``XCLAIM`` or ``XRANGE``, without the holes that Redis 6.2 leaves for deleted ones."""
    return [(entry[0], entry[1]) for entry in reply if still_there(entry)]


def pending_of(reply: Reply) -> list[Pending]:
    """The rows of an extended ``XPENDING``."""
    return [
        Pending(id.decode(), name.decode(errors="replace"), int(idle), int(count)) for id, name, idle, count in reply
    ]


def pending_summary_of(reply: Reply) -> PendingSummary:
    """The reply to a plain ``XPENDING``."""
    count, first, last, consumers = reply
    owners = tuple((name.decode(errors="replace"), int(pending)) for name, pending in consumers or ())
    return PendingSummary(int(count), first and first.decode(), last and last.decode(), owners)


def group_named(reply: Reply, group: str) -> dict[str, Any] | None:
    """The row of ``group`` in ``XINFO GROUPS``; what an older server does not tell is missing from it."""
    for row in reply:
        fields = {name.decode(): value for name, value in zip(row[::2], row[1::2], strict=True)}
        if fields["name"] == group.encode():
            return fields
    return None
