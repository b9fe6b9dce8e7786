"""One owned partition: everything that is known of it, and every decision on it. Pure: no server, no loop, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from conquiet.kit.entry_ids import order as id_order
from conquiet.kit.policy import Backoff
from conquiet.topics.consume.delivery import Deliveries, Delivery
from conquiet.topics.consume.hand import Hand
from conquiet.topics.consume.outcomes import Bury, Park
from conquiet.topics.consume.partition_leases import Acquired
from conquiet.topics.consume.requests import Failed, Request, Step
from conquiet.topics.options import SubscribeOptions
from conquiet.topics.server import partition as server

__all__ = ["Partition"]

_AFTER_REFUSAL: Final = Backoff(base=0.05, cap=2.0)
_MOST_REFUSALS: Final = 10
_NOTHING: Final = Request()
_LARGE: Final = 4096
"""More bytes than this are not worth being sent twice."""


class Partition:
    """The state of one partition while this consumer owns it. Others only read what is public of it.

    The engine asks :meth:`wants`, sends the steps, and says of each what came: :meth:`received`, :meth:`fenced` or
    :meth:`torn`. What was taken is in its ``hand``.
    """

    def __init__(self, acquired: Acquired, options: SubscribeOptions, deliveries: Deliveries) -> None:
        self.topic, self.index, self.stream = acquired.topic, acquired.index, acquired.stream
        self.crashed = (acquired.crashed, acquired.running)
        """The owner before that did not release it, and the suspect that it was handling."""
        self.limit = acquired.limit
        """The ID up to which new entries are taken for the time being."""
        self.failures = 0
        """How often in a row the server has refused something."""
        self.asked_at = 0.0
        """When it was last asked for new entries."""
        self.is_hot = True
        """Whether there may be new entries."""
        self.is_doubtful = False
        """Whether the server does not know something that it has confirmed."""
        self.is_draining = False
        self.lease = acquired.lease
        self._options = options
        self._deliveries = deliveries
        self._last_id = acquired.last_id
        self._newest = id_order(acquired.last_id)
        """What the highest ID that was ever taken is compared by."""
        self._page: str | None = "-"
        """Where the next page of the pending list begins; ``None`` once all of it was taken over."""
        self._doubted: set[str] = set()
        """Parked deliveries that were not found on the pending list since that was begun again."""
        self._is_suspicious = self._is_paused = False
        self._foreseen: server.Row | None = None
        """A new entry that the wait for news has brought."""
        self.hand = Hand(options, acquired.lease)
        self._asking = 0
        self._due_at: float | None = None
        self._ask_at = 0.0

    # --- how it is doing ----------------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        """Whether the lease is another owner's."""
        return self.lease.lost

    @property
    def load(self) -> int:
        """How much room it takes up: what is in hand, being written or on its way."""
        return self.hand.load + self._asking

    @property
    def blocked(self) -> int:
        """How many deliveries wait behind another of their key."""
        return self.hand.order.waiting

    # --- what it wants --------------------------------------------------------------------------------------

    def may_take(self, now: float) -> bool:
        """Whether anything at all may be taken now."""
        is_closed = self._is_paused or self.is_draining or self.hand.isolation.is_active or self._asking > 0
        return not is_closed and now >= self._ask_at and self.lease.is_safe(now)

    def is_hungry(self, now: float) -> bool:
        """Whether it would take something now, if there is room."""
        if not self.may_take(now):
            return False
        return self._page is not None or self._is_due(now) or (self.is_hot and self._may_take_new)

    def wants(self, now: float, room: int, spare: int = 0, *, may_isolate: bool = True) -> Request:
        """What to ask of the server now, with room for so many more deliveries; it is on its way then.

        If it wants nothing now, it waits for what could be taken with ``spare`` room.
        """
        if self.lease.lost:
            return _NOTHING
        if now < self._ask_at:
            return Request(until=self._ask_at)
        hand, settlements = self.hand, self.hand.settlements
        hand.revive(now)
        steps: list[Step] = []
        # What blocks others is let in even when there is no room: else none would ever be made.
        if (room > 0 or hand.order.blocks) and self.is_hungry(now):
            steps += self._takes(now, room)
        if settlements:
            steps += (*settlements.writing(), *settlements.acknowledging(self._last_id))
        if hand.isolation.is_wanting:
            steps += self._marks(may_isolate)
        for step in steps:
            settlements.sending += step.carried
            self._asking += step.asked
        return Request(steps) if steps else self._rest(now, max(room, spare))

    def _takes(self, now: float, room: int) -> Iterable[Step]:
        """A page of the pending list, if that is to be read, or new and due entries."""
        is_due = self._is_due(now)
        if self._page is not None:
            if room > 0 and (self._is_roomy or not self.blocked):
                return [Step("page", id=self._page, size=min(server.MOST_PAGED, room))]
            # More may be pending behind a parked message than there is room for.
            fresh, due = 0, 1 if is_due else 0
        else:
            due = max((room + 1) // 2, 1) if is_due else 0
            fresh = max(room - due, 0) if self._may_take_new else 0
        if not fresh and not due:
            return ()
        if fresh:
            self.asked_at = now
        return self.hand.settlements.acknowledging(self._last_id, fresh, due, self._foreseen if fresh else None)

    def _marks(self, may_isolate: bool) -> Iterator[Step]:
        # Alone is what runs while nothing else of the partition does.
        is_alone = may_isolate and not self.is_draining and self.hand.running <= 0
        id = self.hand.isolation.wants(may_begin=is_alone)
        if id is not None:
            yield Step("mark", id=id)

    def _rest(self, now: float, room: int) -> Request:
        """What it waits for."""
        if not self.may_take(now):
            return _NOTHING
        # What is due is let in without room only where it blocks others.
        until = self._due_at if room > 0 or self.hand.order.blocks else None
        can_hear = room > 0 and self._page is None and self._may_take_new and not self.failures
        return Request(until=until, listens=self._last_id if can_hear else None)

    @property
    def _may_take_new(self) -> bool:
        """Whether order, the growth of the topic and what waits behind keys allow to take new entries."""
        if self.limit is not None and id_order(self._last_id) >= id_order(self.limit):
            return False
        if self.hand.parked and self._options.order == "block_partition":
            return False
        return self._is_roomy

    @property
    def _is_roomy(self) -> bool:
        """Whether not too much waits behind keys already."""
        return self.blocked * 2 < self._options.max_inflight

    def _is_due(self, now: float) -> bool:
        return self._due_at is not None and now >= self._due_at

    def _due_in(self, seconds: float, now: float) -> None:
        moment = now + seconds
        self._due_at = moment if self._due_at is None else min(self._due_at, moment)

    # --- what is said to it -----------------------------------------------------------------------------------

    def news(self, first: server.Row | None = None) -> None:
        """There may be new entries, of which this is the first: if it is large, it need not be sent again."""
        self.is_hot = True
        is_large = first is not None and sum(map(len, first[1])) > _LARGE
        self._foreseen = first if is_large else None

    def pause(self, is_paused: bool) -> None:
        """Take nothing until that is over; what was taken goes on."""
        self._is_paused = is_paused

    def limit_to(self, id: str | None) -> None:
        """Take new entries up to ``id`` only, or all."""
        self.limit, self.is_hot = id, True

    def drain(self) -> None:
        """Begin nothing more; what was not begun stays pending."""
        self.is_draining = True
        self.hand.forget_unstarted()

    def keep(self) -> None:
        """Go on after all: what stayed pending is taken over again, in order."""
        if self.is_draining:
            self.is_draining = False
            self._page = "-"
            self.hand.begin_again()

    def shed(self, count: int) -> int:
        """Let go of up to so many deliveries that wait behind a key: they stay pending, and are read again in time.

        How many.
        """
        gone = [] if self._asking else self.hand.shed(count)
        if gone and self._page != "-":
            first = min((delivery.id for delivery in gone), key=id_order)
            if self._page is None or id_order(first) <= id_order(self._page.lstrip("(")):
                self._page = first
        return len(gone)

    def distrust(self) -> None:
        """The server may have forgotten what it confirmed: what is pending there is looked at again, from the first."""
        self._page = "-"
        self.is_doubtful, self._foreseen = False, None
        self._doubted = set(self.hand.parked)

    def abandon(self) -> tuple[list[Delivery], list[Delivery], list[Failed]]:
        """It is given up: whatever is unsettled stays as it is in Redis.

        What was in hand, what was to be acknowledged, and what has failed.
        """
        self.lease.lost = True
        return self.hand.abandon()

    # --- answers ----------------------------------------------------------------------------------------------

    def torn(self, step: Step) -> None:
        """No answer: whether it was done is not known, so it is asked again, and the pending list is read again."""
        self._ended(step)
        self.hand.settlements.torn(step)
        if step.asked and self._page is None:
            self._page = "-"
        if step.kind == "mark":
            self.hand.isolation.torn()

    def refused(self, now: float) -> None:
        """The server has refused it: ask again, more and more rarely."""
        self._ask_at = now + _AFTER_REFUSAL.delay(self.failures)
        self.failures = min(self.failures + 1, _MOST_REFUSALS)

    def fenced(self, step: Step) -> list[Delivery]:
        """The lease is another owner's: nothing was changed. The deliveries that were not settled."""
        self._ended(step)
        self.lease.lost = True
        return [*step.acks, *(delivery for delivery, _ in step.failed)]

    def received(self, step: Step, answer: server.Answer, now: float) -> Sequence[Delivery]:
        """Take in what the server answered; the deliveries that are settled now."""
        self._ended(step)
        if not self.hand.settlements.failed:  # else something was refused, and is asked for again more and more rarely
            self.failures = 0
        settled = self.hand.settlements.confirmed(step)
        is_over = self.is_draining or self.lease.lost  # what came stays pending, and is taken over in order
        if isinstance(answer, server.Taken):
            self._due_at = None if answer.next_due is None else now + answer.next_due
            if step.fresh:
                self.is_hot = answer.is_more or len(answer.fresh) >= step.fresh  # else there is no more for now
            if not is_over:
                self._took(answer, step.known)
        elif isinstance(answer, server.Page):
            if not is_over:
                self._took_over(answer, now)
        elif step.kind == "mark":
            self.hand.mark_noted()
        else:
            self._wrote(step, answer, now)
        return settled

    def _ended(self, step: Step) -> None:
        self.hand.settlements.sending -= step.carried
        self._asking -= step.asked

    def _wrote(self, step: Step, count: int, now: float) -> None:
        if step.kind == "park" and count < len(step.failed):
            self.is_doubtful = True  # what is not pending is not parked either, and would never fall due
        for delivery, outcome in step.failed:
            self.hand.let_go(delivery, outcome)
            if isinstance(outcome, Park):
                self._due_in(outcome.delay, now)

    # --- what was taken ---------------------------------------------------------------------------------------

    def _took(self, answer: server.Taken, known: server.Row | None) -> None:
        hand = self.hand
        for entry in answer.due:
            if not hand.knows(entry.id):  # else the server has forgotten that it was due before
                hand.admit(self._deliveries.again(entry))
        fresh = answer.fresh
        if fresh:
            if known is not None:
                fresh = [known if row[0] == known[0] else row for row in fresh]
                self._foreseen = None
            newest, self._last_id = self._newest, fresh[-1][0].decode()
            self._newest = max(newest, id_order(self._last_id))
            arrived = [self._deliveries.fresh(id.decode(), fields) for id, fields in fresh]
            if id_order(arrived[0].id) <= newest:
                self._took_again(arrived)
            else:
                hand.admit_new(arrived)

    def _took_again(self, arrived: Iterable[Delivery]) -> None:
        """New entries with IDs of before: the server has forgotten that they, or others, were taken already."""
        for delivery in arrived:
            mine = self.hand.content(delivery.id)
            if mine is not None and mine != delivery.content:
                # Its clock went back, too: what becomes of the one that it lost must not be said of this one.
                self.lease.lost = True
                return
            if not self.hand.knows(delivery.id):
                self.hand.admit(delivery)

    def _took_over(self, answer: server.Page, now: float) -> None:
        if self._doubted:
            self._doubted.difference_update([entry.id for entry in answer.entries])
        found = [entry for entry in answer.entries if not self.hand.knows(entry.id)]
        self._is_suspicious |= any(entry.crashes >= server.SUSPICIOUS for entry in found)
        for entry in found:
            self._take_over(entry)
        if self.hand.parked:
            self._due_in(0.0, now)  # the next take tells when the first is due
        self._page = answer.following
        if self._page is None:
            # What is parked here and is not on the list will never fall due.
            for id in self._doubted & self.hand.parked.keys():
                self.hand.forget_parked(id)
            self._doubted = set()
            self.crashed = ("", "")
            self._last_id = answer.last_id
            self.is_hot, self._is_suspicious = True, False

    def _take_over(self, entry: server.Again) -> None:
        delivery = self._deliveries.again(entry)
        if entry.crashes >= self._options.max_crashes:
            self.hand.settle_at_once(delivery, Bury(entry.crashes, "crash loop"))
        elif entry.is_parked:
            self.hand.admit_parked(delivery)
        else:
            if self._is_suspicious:
                self.hand.isolation.suspect(delivery)
            self.hand.admit(delivery)
