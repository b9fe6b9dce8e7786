"""Load-balanced streams: every stream has exactly one living owner, and a dead one is replaced."""

from __future__ import annotations

from conquiet.balance.balancer import StreamBalancer
from conquiet.balance.events import StreamAdded, StreamDisowned, StreamEvent, StreamExpired, StreamTerminated
from conquiet.balance.lease import StreamLease

__all__ = [
    "StreamAdded",
    "StreamBalancer",
    "StreamDisowned",
    "StreamEvent",
    "StreamExpired",
    "StreamLease",
    "StreamTerminated",
]
