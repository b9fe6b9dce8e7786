"""The deliveries of one owned partition that are in hand: which may run, which wait, which are parked. Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from conquiet.topics.consume.delivery import Delivery
from conquiet.topics.consume.isolation import Isolation
from conquiet.topics.consume.key_order import KeyOrder, Parked
from conquiet.topics.consume.outcomes import Bury, Outcome, Park
from conquiet.topics.consume.requests import Failed, Settlements
from conquiet.topics.options import SubscribeOptions
from conquiet.wire.lease import Lease

__all__ = ["Hand"]

_log = logging.getLogger("conquiet.topics")


class Hand:
    """Deliveries from being taken to being settled. Of parked ones only the ID is kept.

    Those that may be handled come out of :meth:`ready`, once each; :meth:`begin` says whether one may be begun now,
    and :meth:`handled` or :meth:`failed` hears what became of it.
    """

    def __init__(self, options: SubscribeOptions, lease: Lease) -> None:
        self.order = KeyOrder(options.order, keyless=options.batch_handler)
        self.isolation = Isolation()
        self.settlements = Settlements()
        self.parked: dict[str, Parked] = {}
        self.has_ready = False
        self._lease = lease
        self._held: dict[str, Delivery] = {}
        self._ready: list[Delivery] = []
        self._stalled: list[Delivery] = []
        """What may not begin because the lease could not be renewed."""

    @property
    def inflight(self) -> int:
        """Deliveries that are not settled, parked ones apart."""
        return len(self._held) + len(self.settlements.leaving)

    @property
    def load(self) -> int:
        """How much room they take up: what is held, and what is being written."""
        # Failures take up room as long as they wait to be written, lest they pile up where no server takes them.
        unwritten = 0 if self.order.blocks else len(self.settlements.failed)
        return len(self._held) + unwritten + self.settlements.sending

    @property
    def running(self) -> int:
        """How many are begun, or could be at once."""
        return len(self._held) - self.order.waiting - self.isolation.waiting

    def started(self) -> Iterator[Delivery]:
        """Deliveries that a handler, or the user, has."""
        return (delivery for delivery in self._held.values() if delivery.begun is not None)

    def knows(self, id: str) -> bool:
        """Whether an entry is held or about to be settled."""
        return id in self._held or id in self.settlements.leaving

    def holds(self, delivery: Delivery) -> bool:
        """Whether a delivery is in hand, and not given up."""
        return self._held.get(delivery.id) is delivery

    def content(self, id: str) -> int | None:
        """A hash of the entry that is held, parked or about to be settled under an ID."""
        found = self._held.get(id) or self.settlements.find(id)
        if found is None:
            return self.parked[id].content if id in self.parked else None
        return found.content

    # --- coming -------------------------------------------------------------------------------------------------

    def admit_new(self, deliveries: Sequence[Delivery]) -> None:
        """New ones are in hand: those ready to run whose keys are free."""
        held, admit, ready = self._held, self.order.admit, self._ready
        if self.order.is_keyless and not [delivery for delivery in deliveries if delivery.fate]:
            held.update({delivery.id: delivery for delivery in deliveries})
            ready += deliveries
            deliveries = ()
        for delivery in deliveries:
            if delivery.fate is not None:
                self.settle_at_once(delivery, delivery.fate)
                continue
            held[delivery.id] = delivery
            if admit(delivery):
                ready.append(delivery)
        self.has_ready = bool(ready)

    def admit(self, delivery: Delivery) -> None:
        """One more is in hand, perhaps one that was parked."""
        parked = self.parked.pop(delivery.id, None)
        if delivery.fate is not None:
            self.settle_at_once(delivery, delivery.fate)
            return
        self._held[delivery.id] = delivery
        if self.order.admit_due(delivery, parked):
            self._make_ready(delivery)

    def admit_parked(self, delivery: Delivery) -> None:
        """One was found that waits for its next attempt."""
        if delivery.id not in self.parked:
            parked = self.parked[delivery.id] = Parked.of(delivery)
            self.order.admit_parked(parked)

    def settle_at_once(self, delivery: Delivery, outcome: Outcome) -> None:
        """This becomes of a delivery without its being handled."""
        self.settlements.add(delivery, outcome)
        if isinstance(outcome, Bury):
            place = (delivery.topic, delivery.partition, delivery.group, delivery.id)
            _log.error("topic %r, partition %d, group %r, message %s: %s", *place, outcome.reason)

    # --- handling -----------------------------------------------------------------------------------------------

    def ready(self) -> list[Delivery]:
        """Deliveries that may be handled now; each is told once."""
        ready, self._ready, self.has_ready = self._ready, [], False
        return ready

    def begin(self, delivery: Delivery, now: float) -> bool:
        """Whether a delivery that was ready may begin: only while no other consumer can own the partition."""
        lease = self._lease
        if self._held.get(delivery.id) is not delivery or lease.lost:
            return False
        if now >= lease.deadline:
            self._stalled.append(delivery)
            return False
        delivery.begun = now
        return True

    def begin_all(self, deliveries: Sequence[Delivery], now: float) -> list[Delivery]:
        """Those of many that may begin."""
        if not self._lease.is_safe(now):
            return [delivery for delivery in deliveries if self.begin(delivery, now)]
        held, some = self._held, list[Delivery]()
        for delivery in deliveries:
            if held.get(delivery.id) is delivery:
                delivery.begun = now
                some.append(delivery)
        return some

    def revive(self, now: float) -> None:
        """Make ready again what was held up by a lease that could not be renewed, if it was."""
        if self._stalled and self._lease.is_safe(now):
            self._ready += self._stalled
            self._stalled, self.has_ready = [], True

    def handled(self, delivery: Delivery) -> bool:
        """A delivery was handled; whether that is the first that waits to be written."""
        delivery.settled = True
        settlements, id = self.settlements, delivery.id
        is_first = not settlements.acks and not settlements.failed
        settlements.leaving.add(id)
        settlements.acks.append(delivery)
        if self._held.pop(id, None) is not None:
            self._make_ready(self.order.release(delivery.key))
        if self.isolation.current is not None:
            self.isolation.finished(delivery)
        return is_first

    def failed(self, delivery: Delivery, outcome: Outcome) -> bool:
        """As :meth:`handled`, with this outcome of a failure."""
        delivery.settled = True
        is_first = not self.settlements
        self.settlements.add(delivery, outcome)
        if not self.order.blocks:  # else it holds others up until its failure is written
            self.let_go(delivery, outcome)
        self.isolation.finished(delivery)
        return is_first

    def handled_all(self, deliveries: Sequence[Delivery]) -> bool:
        """As :meth:`handled`, for many without keys that were handled."""
        is_first = not self.settlements
        held = self._held
        for delivery in deliveries:
            delivery.settled = True
            held.pop(delivery.id, None)
        if self.isolation.current is not None:
            for delivery in deliveries:
                self.isolation.finished(delivery)
        self.settlements.add_all(deliveries)
        return is_first

    def let_go(self, delivery: Delivery, outcome: Outcome) -> None:
        """Let the next of its key go, unless order forbids."""
        if self._held.pop(delivery.id, None) is None:
            return
        if isinstance(outcome, Park):
            parked = self.parked[delivery.id] = Parked.of(delivery)
            self._make_ready(self.order.park(parked))
        else:
            self._make_ready(self.order.release(delivery.key))

    def mark_noted(self) -> None:
        """The server has noted a suspect: it may begin."""
        suspect = self.isolation.noted()
        if suspect is not None:
            self._ready.append(suspect)
            self.has_ready = True

    def _make_ready(self, delivery: Delivery | None) -> None:
        if delivery is not None and not self.isolation.admit(delivery):
            self._ready.append(delivery)
            self.has_ready = True

    # --- going --------------------------------------------------------------------------------------------------

    def forget_parked(self, id: str) -> None:
        """One that is parked will never fall due."""
        self._make_ready(self.order.forget_parked(self.parked.pop(id)))

    def shed(self, count: int) -> list[Delivery]:
        """Let go of up to so many that wait behind a key, the newest first. Those."""
        gone = self.order.shed(max(count, 0)) if not self.isolation.is_active else []
        for delivery in gone:
            del self._held[delivery.id]
        return gone

    def give_up(self, before: float) -> list[Delivery]:
        """Wait no longer for deliveries that were given out before a moment: they stay pending. Those."""
        gone = [delivery for delivery in self.started() if delivery.begun is not None and delivery.begun <= before]
        for delivery in gone:
            del self._held[delivery.id]
        return gone

    def forget_unstarted(self) -> None:
        """Forget what was not begun, parked ones too: they are found again on the pending list, in their places."""
        self._held = {delivery.id: delivery for delivery in self.started()}
        self.parked.clear()
        self.order.forget_waiting(self._held.values())
        self.isolation.forget_waiting()
        self._ready, self._stalled, self.has_ready = [], [], False

    def begin_again(self) -> None:
        """After :meth:`forget_unstarted`: keys are those of what is still in hand, and of what was parked since."""
        self.order.forget_waiting(self._held.values())
        for parked in self.parked.values():
            self.order.admit_parked(parked)

    def abandon(self) -> tuple[list[Delivery], list[Delivery], list[Failed]]:
        """Forget all: what was in hand, what was to be acknowledged, and what has failed."""
        self.forget_unstarted()
        held, self._held = list(self._held.values()), {}
        return held, *self.settlements.clear()
