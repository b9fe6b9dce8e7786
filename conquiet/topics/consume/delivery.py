"""A message in the hands of a consumer, and how it is made of an entry."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from conquiet.errors import MalformedMessageError, Reject, Retry
from conquiet.message import Message
from conquiet.topics.codec import Codec
from conquiet.topics.consume.outcomes import DONE, Outcome, reject
from conquiet.topics.format import envelope
from conquiet.topics.options import DeadLetterPolicy
from conquiet.topics.server.partition import Again

if TYPE_CHECKING:
    from conquiet.topics.consume.owned import Owned

__all__ = ["Deliveries", "Delivery"]


class Delivery(Message):
    """A message that was pulled: settle it with one of ``ack``, ``retry`` and ``reject``.

    Each returns once Redis has done it and raises ``LeaseLostError`` if the partition went to another owner
    meanwhile; then nothing was changed. Unsettled when the consumer ends, it is delivered again.
    """

    __slots__ = ("begun", "confirmed", "crashes", "fate", "owner", "settled")

    owner: Owned
    begun: float | None
    """When a handler, or the caller of ``next``, got it."""
    crashes: int
    settled: bool
    fate: Outcome | None
    """What becomes of it without being handled."""
    confirmed: asyncio.Future[None] | None

    @property
    def content(self) -> int:
        """A hash of the entry."""
        return hash(tuple(self._entry))

    async def ack(self) -> None:
        """It is done."""
        await self.owner.settle_by_hand(self, None)

    async def retry(self, *, delay: float | None = None, error: str = "") -> None:
        """Deliver it again, after ``delay`` or by the policy's backoff; a dead letter if its retries are used up."""
        await self.owner.settle_by_hand(self, Retry(error, delay=delay))

    async def reject(self, reason: str = "") -> None:
        """Make it a dead letter."""
        await self.owner.settle_by_hand(self, Reject(reason))


class Deliveries:
    """Makes the deliveries of one partition while one owner has it."""

    def __init__(
        self, kind: type[Delivery], codec: Codec, letters: DeadLetterPolicy, place: tuple[str, int, str], epoch: int
    ) -> None:
        self._kind = kind
        self._codec = codec
        self._letters = letters
        self._topic, self._index, self._group = place
        self._only = self._group.encode()
        self._epoch = epoch
        self.owner: Owned | None = None
        """Whom they are settled by; set once by the engine."""

    def fresh(self, id: str, fields: list[bytes]) -> Delivery:
        """The message of a new entry. Of one that is for another group, or is none, its fate is decided."""
        delivery = self._kind()
        delivery.topic = self._topic
        delivery.partition = self._index
        delivery.group = self._group
        delivery.epoch = self._epoch
        delivery.owner = self.owner  # type: ignore[assignment]
        delivery.crashes = 0
        delivery.fate = delivery.confirmed = delivery.begun = None
        delivery.settled = False
        try:
            if envelope.fill(delivery, id, fields, self._codec):
                return delivery
        except MalformedMessageError as error:
            envelope.fill_blank(delivery, id, fields)
            delivery.fate = reject("malformed", error, 0, self._letters)
        if envelope.only_group(fields) not in (None, self._only):
            envelope.fill_blank(delivery, id, fields)
            delivery.fate = DONE
        return delivery

    def again(self, entry: Again) -> Delivery:
        """The message of an entry that was delivered before."""
        delivery = self.fresh(entry.id, entry.fields)
        delivery.crashes = entry.crashes
        if entry.failures is not None:
            delivery.retry_count = entry.failures
            if entry.replayed_from:
                delivery.replayed_from = entry.replayed_from
        return delivery
