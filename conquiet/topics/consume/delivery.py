"""A message in the hands of a consumer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from conquiet.errors import Reject, Retry
from conquiet.message import Message

if TYPE_CHECKING:
    from conquiet.topics.consume.partition import Partition

__all__ = ["Delivery"]


class Delivery(Message):
    """A message that was pulled: settle it with one of ``ack``, ``retry`` and ``reject``.

    Each returns once Redis has done it and raises ``LeaseLostError`` if the partition went to another owner
    meanwhile; then nothing was changed. Unsettled when the consumer ends, it is delivered again.
    """

    __slots__ = ("alone", "confirmed", "crashes", "owner", "settled", "timed")

    owner: Partition
    alone: bool
    crashes: int
    settled: bool
    timed: bool
    confirmed: asyncio.Future[None] | None

    async def ack(self) -> None:
        """It is done."""
        await self.owner.settle_by_hand(self, None)

    async def retry(self, *, delay: float | None = None, error: str = "") -> None:
        """Deliver it again, after ``delay`` or by the policy's backoff; a dead letter if its retries are used up."""
        await self.owner.settle_by_hand(self, Retry(error, delay=delay))

    async def reject(self, reason: str = "") -> None:
        """Make it a dead letter."""
        await self.owner.settle_by_hand(self, Reject(reason))
