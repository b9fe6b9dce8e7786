"""The backlog of a consumer group, read at bounded cost and without side effects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from conquiet.wire.capabilities import lag_of
from conquiet.wire.parser import Reply
from conquiet.wire.streams import (
    group_named,
    pending_of,
    pending_summary_of,
    xinfo_groups,
    xlen,
    xpending,
    xpending_summary,
)

__all__ = ["BacklogStats", "backlog_commands", "backlog_of"]


@dataclass(frozen=True, slots=True)
class BacklogStats:
    """A group's backlog at one moment, as the server reports it."""

    length: int
    """Entries in the stream, acknowledged ones included: the library does not trim it."""
    pending: int
    """Entries delivered and not acknowledged."""
    pending_by_consumer: Mapping[str, int]
    """The same by consumer name; those with nothing pending are left out."""
    oldest_pending_id: str | None
    """The lowest ID among the pending, or ``None``."""
    oldest_pending_idle_ms: int | None
    """Milliseconds since that entry was last delivered or claimed, or ``None``."""
    last_delivered_id: str
    """The group has delivered every entry up to this ID."""
    lag: int | None
    """Consumer lag: entries not delivered yet; ``None`` where the server does not know it (before Redis 7)."""


def backlog_commands(stream: str, group: str) -> tuple[bytes, ...]:
    """The commands that read it; each costs the same however long the stream and the pending list are."""
    return (
        xlen(stream),
        xpending_summary(stream, group),
        xpending(stream, group, count=1),
        xinfo_groups(stream),
    )


def backlog_of(replies: list[Reply], group: str) -> BacklogStats:
    """The backlog that the replies to :func:`backlog_commands` describe."""
    length, summary_reply, oldest_reply, groups_reply = replies
    summary = pending_summary_of(summary_reply)
    oldest = next(iter(pending_of(oldest_reply)), None)
    known = group_named(groups_reply, group) or {}
    return BacklogStats(
        length=int(length),
        pending=summary.count,
        pending_by_consumer=dict(summary.consumers),
        oldest_pending_id=oldest.id if oldest else None,
        oldest_pending_idle_ms=oldest.idle_ms if oldest else None,
        last_delivered_id=known.get("last-delivered-id", b"0-0").decode(),
        lag=lag_of(known),
    )
