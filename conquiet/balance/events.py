"""The events of balanced streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

__all__ = ["StreamAdded", "StreamDisowned", "StreamEvent", "StreamExpired", "StreamTerminated"]


@dataclass(frozen=True, slots=True)
class StreamAdded:
    """The consumer owns a stream from now on: a new one, or one that another has left."""

    stream: str
    info: Mapping[str, Any]
    epoch: int
    entry_id: str


@dataclass(frozen=True, slots=True)
class StreamExpired:
    """The owner of a stream did not renew in time, or released it: any consumer may claim it. Told once an epoch."""

    stream: str
    info: Mapping[str, Any]
    epoch: int
    """Of the owner that was lost."""
    owner: str
    """That owner; empty if the stream was released."""


@dataclass(frozen=True, slots=True)
class StreamDisowned:
    """The consumer owns a stream no longer, though it neither finished nor released it."""

    stream: str
    info: Mapping[str, Any]
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class StreamTerminated:
    """The last event, and why the events end."""

    reason: str
    stream: str = ""
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])


StreamEvent: TypeAlias = StreamAdded | StreamExpired | StreamDisowned | StreamTerminated
