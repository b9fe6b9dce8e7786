"""How the room of a consumer is shared among its partitions. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from conquiet.topics.consume.partition import Partition
from conquiet.topics.options import SubscribeOptions

__all__ = ["shared_out"]

_SHARE: Final = 32
"""A take is not divided into smaller ones than this: a script call costs as much as many entries."""


def shared_out(
    free: int, owned: Sequence[Partition], hungry: Sequence[Partition], options: SubscribeOptions
) -> tuple[dict[Partition, int], int]:
    """How much room each of the ``hungry`` partitions has, and how much one more of those ``owned`` could have.

    Room for them is made, where it is needed, at partitions that have more than their share.
    """
    limit = options.max_inflight
    if hungry and len(owned) > 1 and any(part.blocked for part in owned):
        free = _reclaimed(free, owned, hungry, limit, options.batch_size)
    room = dict(zip(hungry, _shares(free, len(hungry), options), strict=False))
    return room, max(free, 0) or _reclaimable(owned, limit)


def _shares(free: int, hungry: int, options: SubscribeOptions) -> list[int]:
    """How many deliveries the first of so many partitions may take of ``free`` places; the others have to wait."""
    # The larger a batch is, the less it costs; but some partitions are handled at the same time.
    least = max(_SHARE, options.max_inflight // 4) if options.batch_handler else _SHARE
    asked = max(1, min(hungry, free // min(least, options.batch_size)))
    return [min(options.batch_size, max(free // asked, 0))] * asked


def _reclaimable(owned: Collection[Partition], limit: int) -> int:
    """How many places are taken up by what waits behind keys, and would be given to one more partition."""
    least = _fair(limit, 1 + sum(part.load > 0 for part in owned))
    return sum(min(part.blocked, max(part.load - least, 0)) for part in owned)


def _reclaimed(free: int, owned: Collection[Partition], hungry: Sequence[Partition], limit: int, batch: int) -> int:
    """Make room for partitions that want some and have less than their share; how many places are free now.

    What waits behind a key at partitions that have more than theirs is let go: it stays pending, and is read again.
    """
    least = _fair(limit, sum(part.load > 0 or part in hungry for part in owned))
    missing = sum(min(least - part.load, batch) for part in hungry if part.load < least) - free
    rich = [part for part in owned if part.blocked and part.load > least] if missing > 0 else []
    for part in sorted(rich, key=lambda part: part.blocked, reverse=True):
        if missing <= 0:
            break
        gone = part.shed(min(missing, part.load - least))
        missing -= gone
        free += gone
    return free


def _fair(limit: int, partitions: int) -> int:
    """How many places each of so many partitions can have whatever the others do."""
    return max(1, limit // max(1, partitions))
