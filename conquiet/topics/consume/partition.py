"""One owned partition: what was taken of it, in which order it may be handled, and what waits to be settled."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from conquiet.errors import ConfigError, LeaseLostError
from conquiet.kit.entry_ids import order as id_order
from conquiet.kit.loopthread import forks
from conquiet.metrics import GroupMetrics
from conquiet.topics.consume.delivery import Delivery
from conquiet.topics.consume.outcomes import Bury, Outcome, Park, Requeue
from conquiet.topics.consume.partition_leases import Acquired
from conquiet.topics.options import Order

__all__ = ["Partition", "Reader", "Settler", "kind_of"]

_ALL: Final = "\0all"
"""Stands for every key where a partition is handled strictly in order."""


class Reader(Protocol):
    """The loop that takes from a partition."""

    event: asyncio.Event
    is_waiting: bool
    is_flushing: bool

    def wake(self) -> None:
        """Look again, also when it waits for news."""
        ...


class Settler(Protocol):
    """Decides and writes what becomes of a delivery."""

    async def settle_by_hand(self, delivery: Delivery, error: Exception | None) -> None:
        """Settle a pulled message; returns when Redis has it."""
        ...


@dataclass(slots=True)
class Doubt:
    """By what it is known that a server has lost its last writes, and what it may have forgotten."""

    newest: tuple[int, int]
    """What the highest ID that was ever taken is compared by."""
    is_open: bool = False
    """Whether the server does not know something that it has confirmed."""
    parked: set[str] = field(default_factory=set[str])
    """Parked deliveries that were not found on the pending list since that was begun again."""


class Partition:
    """The state of one partition while this consumer owns it.

    ``held`` are the deliveries that are not settled, ``parked`` those that wait pending for their next attempt. At
    most one message of a key is ready at a time; under ``block_key`` a parked one keeps its key, under
    ``block_partition`` the whole partition counts as one key.
    """

    def __init__(
        self,
        acquired: Acquired,
        order: Order,
        metrics: GroupMetrics,
        ready: deque[Delivery],
        settler: Settler,
        *,
        keyless: bool = False,
    ) -> None:
        self.topic = acquired.topic
        self.index = acquired.index
        self.stream = acquired.stream
        self.lease = acquired.lease
        self.metrics = metrics
        self.crashed, self.running = acquired.crashed, acquired.running
        self.last_id, self.limit = acquired.last_id, acquired.limit
        """The ID up to which new entries are taken for the time being."""
        self.page: str | None = "-"
        """Where the next page of the pending list begins; ``None`` once all of it was taken over."""
        self.doubt = Doubt(id_order(acquired.last_id))
        self.hot = True
        self.ask_at = self.cold_at = self.trim_at = 0.0
        self.failures = 0
        """Refusals in a row."""
        self.outbox = True
        """Whether dead letters may be waiting to be forwarded."""
        self.is_draining = False
        self.held: dict[str, Delivery] = {}
        self.parked: dict[str, Delivery] = {}
        self.acks: list[Delivery] = []
        self.failed: list[tuple[Delivery, Outcome]] = []
        self.careful: deque[Delivery] = deque()
        self.stalled: list[Delivery] = []
        self.leaving: set[str] = set()
        """Handled, but Redis has not confirmed yet what became of it."""
        self.suspicious = self.is_careful = False
        """Whether what was taken over is handled one at a time, and nothing else."""
        self.sending = self.asking = self.taken = 0
        self.due_at: float | None = None
        """When the next parked or delayed entry falls due, by local time."""
        self.durations: list[float] = []
        """How long handlers took that were not reported yet."""
        self.reader: Reader | None = None
        self._keyless = keyless
        self._order = order
        self._ready = ready
        self._waiting: dict[str, deque[Delivery]] = {}
        self._settler, self._forks = settler, forks()
        self.settled = asyncio.Event()

    # --- order ---------------------------------------------------------------------------------------------

    def admit(self, delivery: Delivery) -> None:
        """Make a delivery ready, or keep it until the one before it with the same key is done."""
        self.held[delivery.id] = delivery
        key = self._key(delivery)
        if key is None:
            self._ready.append(delivery)
            return
        waiting = self._waiting.get(key)
        if waiting is None:
            self._waiting[key] = deque()
            self._ready.append(delivery)
        else:
            waiting.append(delivery)

    def admit_due(self, delivery: Delivery) -> None:
        """A parked delivery is due: under an order that blocks it has its key, or its place behind who has it."""
        had = self.parked.pop(delivery.id, None)
        if had is None or not self.blocks:
            self.admit(delivery)
            return
        self.held[delivery.id] = delivery
        key = self._key(delivery)
        waiting = self._waiting.get(key) if key is not None else None
        if waiting and had in waiting:
            waiting[waiting.index(had)] = delivery
        else:
            self._ready.append(delivery)

    def admit_parked(self, delivery: Delivery) -> None:
        """Taken over while it waits for its next attempt."""
        if delivery.id in self.parked:
            return
        self.parked[delivery.id] = delivery
        key = self._key(delivery)
        if self.blocks and key is not None:
            if key in self._waiting:
                self._waiting[key].append(delivery)
            else:
                self._waiting[key] = deque()

    def admit_careful(self, delivery: Delivery) -> None:
        """Taken over from owners that crashed: to be handled alone."""
        self.held[delivery.id] = delivery
        delivery.alone = self.is_careful = True
        self.careful.append(delivery)

    def may_handle(self, delivery: Delivery, now: float) -> bool:
        """Whether a delivery that is ready may be handled now: only while nobody else can own the partition."""
        if self.lease.lost or delivery.id not in self.held:
            return False
        if self.lease.is_safe(now):
            return True
        self.stalled.append(delivery)
        return False

    def resume(self, now: float) -> bool:
        """Make ready again what was held up by a lease that could not be renewed, if it was; whether anything."""
        if not self.stalled or not self.lease.is_safe(now):
            return False
        self._ready.extend(self.stalled)
        self.stalled.clear()
        return True

    # --- a server that lost its last writes -----------------------------------------------------------------

    def distrust(self) -> None:
        """The server may have forgotten what it confirmed: what is pending there is looked at again, from the first."""
        self.page = "-"
        self.doubt.is_open = False
        self.doubt.parked = set(self.parked)

    def saw_pending(self, ids: Iterable[str]) -> None:
        """These are on the pending list, as the server knows it."""
        if self.doubt.parked:
            self.doubt.parked.difference_update(ids)

    def saw_all(self) -> None:
        """The last of the pending list was seen: what is parked here and is not there will never fall due."""
        forgotten, self.doubt.parked = self.doubt.parked, set()
        for id in forgotten & self.parked.keys():
            self._let_go(self.parked.pop(id))

    def _let_go(self, delivery: Delivery) -> None:
        """Let those behind one go that was parked, if it held them up."""
        key = self._key(delivery)
        waiting = None if key is None else self._waiting.get(key)
        if waiting and delivery in waiting:
            waiting.remove(delivery)
        elif self.blocks:
            self.finish(delivery)

    def in_hand(self, id: str) -> Delivery | None:
        """What is being handled, parked, or about to be settled under an ID."""
        leaving = (*self.acks, *(delivery for delivery, _ in self.failed)) if id in self.leaving else ()
        found = self.held.get(id) or self.parked.get(id)
        return found or next((delivery for delivery in leaving if delivery.id == id), None)

    @property
    def blocks(self) -> bool:
        """Whether a failed message holds up those behind it."""
        return self._order != "unordered"

    def finish(self, delivery: Delivery, *, parked: bool = False) -> None:
        """The delivery is settled, or parked: let the next of its key go, unless order forbids."""
        self.held.pop(delivery.id, None)
        key = self._key(delivery)
        if parked:
            self.parked[delivery.id] = delivery
            if self.blocks:
                if key is not None:
                    self._waiting.setdefault(key, deque())
                return
        if key is None:
            return
        waiting = self._waiting.get(key)
        if not waiting:
            self._waiting.pop(key, None)
        elif (following := waiting.popleft()).id not in self.parked:  # else it goes on waiting, now with the key
            self._ready.append(following)

    def _key(self, delivery: Delivery) -> str | None:
        if self._keyless:
            return None
        return _ALL if self._order == "block_partition" else delivery.key

    def is_due(self, now: float) -> bool:
        """Whether a parked or delayed entry waits to be taken."""
        return self.due_at is not None and now >= self.due_at

    def due_in(self, seconds: float, now: float) -> None:
        """Something was parked for so long."""
        moment = now + seconds
        self.due_at = moment if self.due_at is None else min(self.due_at, moment)

    @property
    def blocked(self) -> int:
        """How many deliveries wait behind another of their key."""
        return sum(map(len, self._waiting.values()))

    @property
    def is_at_limit(self) -> bool:
        """Whether no new entry is to be taken for the time being."""
        return self.limit is not None and id_order(self.last_id) >= id_order(self.limit)

    @property
    def is_blocked(self) -> bool:
        """Whether nothing more can be handled before a parked message is."""
        return self._order == "block_partition" and bool(self.parked)

    # --- settling -----------------------------------------------------------------------------------------

    async def settle_by_hand(self, delivery: Delivery, error: Exception | None) -> None:
        """As :meth:`Settler.settle_by_hand`; refused in a forked child, who does not own the partition."""
        if self._forks != forks():
            raise ConfigError(f"{delivery!r} was pulled before a fork and is the parent's")
        if self.lease.lost:
            raise self.lost_error(delivery)
        if delivery.settled:
            raise ConfigError(f"{delivery!r} is settled already")
        await self._settler.settle_by_hand(delivery, error)

    def lost_error(self, delivery: Delivery) -> LeaseLostError:
        """What a settlement is told after the partition went to another owner."""
        return LeaseLostError(f"{self.stream!r} has another owner now, so message {delivery.id} was left as it is")

    @property
    def is_leaving(self) -> bool:
        """Whether nothing more of it is begun here."""
        return self.is_draining or self.lease.lost

    @property
    def unwritten(self) -> int:
        """How many failures wait to be written that are not held any more: they take up room as long as they do."""
        return 0 if self.blocks else len(self.failed)

    @property
    def has_settlements(self) -> bool:
        """Whether something waits to be written."""
        return bool(self.acks or self.failed)

    def started(self) -> Iterator[Delivery]:
        """Deliveries that a handler, or the user, has."""
        waiting = {delivery.id for queue in self._waiting.values() for delivery in queue}
        waiting.update(delivery.id for delivery in self._ready if delivery.owner is self)
        waiting.update(delivery.id for delivery in self.careful)
        waiting.update(delivery.id for delivery in self.stalled)
        return (delivery for delivery in self.held.values() if delivery.id not in waiting)

    def behind(self, delivery: Delivery) -> Delivery | None:
        """The next one that waits until ``delivery``, which somebody has, is settled."""
        key = self._key(delivery)
        waiting = None if key is None else self._waiting.get(key)
        return waiting[0] if waiting else None

    def forget_unstarted(self) -> int:
        """Let go of what nobody has begun with; it stays pending. How many there were."""
        started = {delivery.id: delivery for delivery in self.started()}
        gone = len(self.held) - len(started)
        keep = [delivery for delivery in self._ready if delivery.owner is not self]
        self._ready.clear()
        self._ready.extend(keep)
        self.held = started
        for queue in self._waiting.values():
            queue.clear()
        self.careful.clear()
        self.stalled.clear()
        return gone

    def has(self, id: str) -> bool:
        """Whether an entry is in hand already, parked ones apart."""
        return id in self.held or id in self.leaving

    def abandon(self) -> Iterable[Delivery]:
        """The lease is gone: whatever is unsettled stays as it is in Redis. The deliveries that were unsettled."""
        self.lease.lost = True
        self.forget_unstarted()
        gone = [*self.held.values(), *self.acks, *(delivery for delivery, _ in self.failed)]
        self.held.clear()
        self.acks.clear()
        self.failed.clear()
        self.parked.clear()
        self.leaving.clear()
        self.settled.set()
        return gone


def kind_of(outcome: Outcome) -> Literal["ack", "retry", "dead_letter"]:
    """The name of an outcome in metrics."""
    if isinstance(outcome, Bury):
        return "dead_letter"
    return "retry" if isinstance(outcome, Park | Requeue) else "ack"
