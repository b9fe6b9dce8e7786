"""What was taken and what becomes of it: every exchange with the server, and what its answers mean."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

from conquiet.kit.entry_ids import order as id_order
from conquiet.kit.policy import Backoff
from conquiet.metrics import Operation
from conquiet.topics.consume.delivery import Delivery
from conquiet.topics.consume.exchange import Exchanges, Kind, Step, Taken
from conquiet.topics.consume.outcomes import Bury, Done, Outcome, Park, judge, reject
from conquiet.topics.consume.partition import Partition, kind_of
from conquiet.topics.options import SubscribeOptions
from conquiet.topics.server.instance import Instance
from conquiet.wire.parser import Reply

__all__ = ["AFTER_ERROR", "Desk", "Hands"]

_log = logging.getLogger("conquiet.topics")

AFTER_ERROR: Final = Backoff(base=0.05, cap=2.0)
"""How long to wait before a server that failed is asked again."""
_SUSPICIOUS: Final = 3
_OPERATIONS: Final[Mapping[Kind, Operation]] = {"park": "retry", "requeue": "retry", "bury": "dead_letter"}


class Hands(Protocol):
    """Whoever handles what is ready."""

    finishes: bool
    """Whether it is worth waiting, at the end, for what is being handled."""

    def wake(self) -> None:
        """There may be something ready."""
        ...

    async def aclose(self) -> None:
        """Stop at once."""
        ...


class Watcher(Protocol):
    """Whoever acts on what the desk learns."""

    def settled(self, partition: Partition) -> None:
        """Something waits to be written."""
        ...

    def suspects(self, partition: Partition) -> None:
        """There are entries to be handled alone, or the last one was."""
        ...

    def lost(self, partition: Partition) -> None:
        """The lease of a partition is somebody else's."""
        ...

    def no_group(self, partition: Partition) -> None:
        """The server does not know the group any more."""
        ...


class Desk:
    """The deliveries of all owned partitions, from being taken to being settled.

    Answers are applied in the order in which they come; a call whose answer never came is sent again, and what it
    may have taken is found on the pending list.
    """

    def __init__(self, instance: Instance, exchanges: Exchanges, options: SubscribeOptions, watcher: Watcher) -> None:
        self.ready: deque[Delivery] = deque()
        self.partitions: dict[str, Partition] = {}
        self.hands: Hands | None = None
        self.letters = asyncio.Event()
        """Set when dead letters wait to be forwarded."""
        self.errors = 0
        """Failures of exchanges since the last that succeeded."""
        self._instance = instance
        self._exchanges = exchanges
        self._options = options
        self._watcher = watcher

    def wake_hands(self) -> None:
        """Let what is ready be handled."""
        if self.ready and self.hands is not None:
            self.hands.wake()

    # --- settling -------------------------------------------------------------------------------------------

    def finished(self, delivery: Delivery, error: BaseException | None, seconds: float) -> None:
        """A handler is done with a delivery."""
        partition = delivery.owner
        if error is not None or partition.lease.lost:
            self._failed(delivery, error, seconds)
            return
        partition.durations.append(seconds)
        delivery.settled = True
        partition.leaving.add(delivery.id)
        acks = partition.acks
        acks.append(delivery)
        partition.finish(delivery)
        if len(acks) == 1 or delivery.alone:  # else somebody was told already
            self._tell(delivery)
        elif self.ready:
            self.wake_hands()

    def _failed(self, delivery: Delivery, error: BaseException | None, seconds: float) -> None:
        partition, options = delivery.owner, self._options
        outcome: Outcome = Done() if error is None else judge(error, delivery, options.retry, options.dead_letter)
        result = kind_of(outcome)
        partition.metrics.handled(partition.index, "fenced" if partition.lease.lost else result, [seconds])
        if partition.lease.lost:
            partition.metrics.fenced(partition.index, result, 1)
            return
        if error is not None:
            self._log_failure(delivery, error, result)
        delivery.settled = True
        partition.leaving.add(delivery.id)
        partition.failed.append((delivery, outcome))
        if not partition.blocks:
            partition.finish(delivery, parked=isinstance(outcome, Park))
        self._tell(delivery)

    def _tell(self, delivery: Delivery) -> None:
        if delivery.alone:
            self._watcher.suspects(delivery.owner)
        self._watcher.settled(delivery.owner)
        self.wake_hands()

    async def settle_by_hand(self, delivery: Delivery, error: Exception | None) -> None:
        """Settle a pulled message; returns when Redis has it."""
        delivery.confirmed = asyncio.get_running_loop().create_future()
        self.finished(delivery, error, 0.0)
        await delivery.confirmed

    def _log_failure(self, delivery: Delivery, error: BaseException, result: str) -> None:
        _log.warning(
            "topic %r, partition %d, group %r, message %s, attempt %d: %s (%s)",
            *(delivery.topic, delivery.partition, delivery.group, delivery.id, delivery.retry_count + 1),
            *(result, type(error).__name__),
        )

    # --- an exchange --------------------------------------------------------------------------------------------

    async def exchange(self, steps: Sequence[Step]) -> None:
        """Send ``steps``, which are for one node, in one write, and act on the answers."""
        started = time.perf_counter()
        try:
            replies = await self._instance.run_many(steps[0].partition.stream, [step.call for step in steps])
        except BaseException:
            for step in steps:
                self._torn(step)
            raise
        seconds = time.perf_counter() - started
        self.errors = 0
        for step, reply in zip(steps, replies, strict=True):
            if isinstance(reply, Exception):
                self._torn(step)
                self._refused(step.partition, reply)
            else:
                self._answered(step, reply, seconds)
        self.wake_hands()

    def _torn(self, step: Step) -> None:
        """No answer: whether it was done is not known, so it is asked again, and the pending list is read again."""
        part = step.partition
        part.sending -= step.carried
        part.asking -= step.asked
        part.acks[:0] = step.acks
        part.failed[:0] = step.failed
        if step.kind in ("take", "takeover") and step.asked and part.page is None:
            part.page = "-"
        if part.lease.lost:
            self.abandon(part)  # nobody asks again, and whoever waits for it has to hear

    def _refused(self, part: Partition, error: Exception) -> None:
        part.ask_at = self._instance.clock.monotonic() + AFTER_ERROR.delay(part.failures)
        part.failures = min(part.failures + 1, 10)
        if "NOGROUP" in str(error):
            self._watcher.no_group(part)
        else:
            _log.error("%r at %s refused: %s", part.stream, self._instance.link.address, error)

    def _answered(self, step: Step, reply: Reply, seconds: float) -> None:
        part = step.partition
        part.sending -= step.carried
        part.asking -= step.asked
        answer: list[Reply] = [reply] if step.kind == "suspect" else reply
        if not answer[0]:
            self._fenced(step)
            return
        if not part.failed:  # else something was refused, and is asked for again more and more rarely
            part.failures = 0
        if step.kind == "take":
            self._acknowledged(step, answer[1], seconds)
            self._took(step, answer)
        elif step.kind == "takeover":
            self._took_over(part, answer)
        elif step.kind != "suspect":
            self._wrote_failures(step, answer[1])
        self._flush_timings(part)
        if not part.held and not part.leaving:
            part.settled.set()

    def _fenced(self, step: Step) -> None:
        part = step.partition
        operation: Operation = _OPERATIONS.get(step.kind, "take")
        if step.acks:
            part.metrics.fenced(part.index, "ack", len(step.acks))
        if step.failed or not step.acks:
            part.metrics.fenced(part.index, operation, max(len(step.failed), 1))
        self.refuse([*step.acks, *(delivery for delivery, _ in step.failed)], part)
        self._lose(part)

    def _lose(self, part: Partition) -> None:
        if not part.lease.lost:
            part.lease.lost = True
            self._watcher.lost(part)

    def abandon(self, part: Partition) -> None:
        """A partition is given up: what is not written yet never will be, which counts as refused if it was lost."""
        if part.lease.lost:
            kinds: Counter[Operation] = Counter(kind_of(outcome) for _, outcome in part.failed)
            kinds["ack"] += len(part.acks)
            for kind, count in kinds.items():
                part.metrics.fenced(part.index, kind, count)
        self.refuse(part.abandon(), part)

    def refuse(self, deliveries: Iterable[Delivery], part: Partition) -> None:
        """Tell whoever waits for a settlement that the partition has another owner."""
        for delivery in deliveries:
            delivery.settled = True
            if delivery.confirmed is not None and not delivery.confirmed.done():
                delivery.confirmed.set_exception(part.lost_error(delivery))

    def _acknowledged(self, step: Step, count: int, seconds: float) -> None:
        part = step.partition
        if not step.acks:
            return
        now = time.time() * 1000
        part.metrics.acked(part.index, count, seconds)
        part.metrics.end_to_end([(now - delivery.timestamp_ms) / 1000 for delivery in step.acks if delivery.timed])
        for delivery in step.acks:
            self._confirm(delivery)

    def _wrote_failures(self, step: Step, count: int) -> None:
        part = step.partition
        if step.kind == "park" and count < len(step.failed):
            part.doubt.is_open = True  # what is not pending is not parked either, and would never fall due
        if step.kind == "bury":
            part.outbox = True
            self.letters.set()
            part.metrics.dead_lettered(part.index, len(step.failed))
        else:
            part.metrics.retried(part.index, len(step.failed))
        for delivery, outcome in step.failed:
            if part.blocks and delivery.id in part.held:
                part.finish(delivery, parked=isinstance(outcome, Park))
            if isinstance(outcome, Park):
                part.due_in(outcome.delay, self._instance.clock.monotonic())
            self._confirm(delivery)
        if part.reader is not None:
            part.reader.wake()  # it may wait for longer than the first of these

    def _confirm(self, delivery: Delivery) -> None:
        delivery.owner.leaving.discard(delivery.id)
        if delivery.confirmed is not None and not delivery.confirmed.done():
            delivery.confirmed.set_result(None)

    # --- what was taken -------------------------------------------------------------------------------------

    def _took(self, step: Step, reply: Sequence[Reply]) -> None:
        part = step.partition
        _, _, fresh, due, next_due, ghosts, more = reply
        now = self._instance.clock.monotonic()
        part.due_at = now + next_due / 1000 if next_due >= 0 else None
        if ghosts:
            self._note_ghosts(part, ghosts)
        if step.fresh:
            part.hot = bool(more) or len(fresh) >= step.fresh  # else there is no more for now
            part.cold_at = now
        if part.is_leaving:
            return  # it stays pending, and the next owner takes it over in order
        for taken in self._exchanges.due(part, due):
            if not part.has(taken.delivery.id):  # else the server has forgotten that it was due before
                self._admit(part, taken, part.admit_due)
        if fresh:
            part.last_id = fresh[-1][0].decode()
            part.taken += len(fresh)
            part.metrics.consumed(part.index, len(fresh))
            newest, part.doubt.newest = part.doubt.newest, max(part.doubt.newest, id_order(part.last_id))
            if id_order(fresh[0][0].decode()) <= newest:
                self._took_again(part, fresh)
                return
            admit = part.admit
            for taken in self._exchanges.fresh(part, fresh):
                if taken.is_plain:
                    admit(taken.delivery)
                else:
                    self._admit(part, taken, admit)

    def _took_again(self, part: Partition, fresh: Sequence[Reply]) -> None:
        """New entries with IDs of before: the server has forgotten that they, or others, were taken already."""
        for taken in self._exchanges.fresh(part, fresh):
            mine = part.in_hand(taken.delivery.id)
            if mine is None:
                self._admit(part, taken, part.admit)
            elif mine._entry != taken.delivery._entry:
                # Its clock went back, too: what becomes of the one that it lost must not be said of this one.
                self._lose(part)
                return
            elif mine.id in part.parked:
                self._admit(part, taken, part.admit_due)

    def _took_over(self, part: Partition, reply: Sequence[Reply]) -> None:
        _, page, entries, ghosts, last = reply
        if ghosts:
            self._note_ghosts(part, ghosts)
        if part.is_leaving:
            return
        part.saw_pending(id.decode() for id, *_ in entries)
        found = [taken for taken in self._exchanges.taken_over(part, entries) if not part.has(taken.delivery.id)]
        others = sum(taken.was_others for taken in found)
        if others:
            part.metrics.claimed(part.index, others)
        part.suspicious |= any(taken.delivery.crashes >= _SUSPICIOUS for taken in found)
        for taken in found:
            self._admit_again(part, taken)
        if part.parked:
            part.due_in(0.0, self._instance.clock.monotonic())  # the next take tells when the first is due
        part.page = page.decode() or None
        if part.page is None:
            part.saw_all()
            part.crashed = part.running = ""
            part.last_id = last.decode()
            part.hot = True
            part.suspicious = False
        if part.careful:
            self._watcher.suspects(part)

    def _admit_again(self, part: Partition, taken: Taken) -> None:
        delivery = taken.delivery
        if delivery.crashes >= self._options.max_crashes:
            self._bury_at_once(delivery, Bury(delivery.crashes, "crash loop"))
        elif taken.parked_until is not None:
            part.admit_parked(delivery)
        elif delivery.id in part.parked:  # it was due, and the answer that brought it was lost
            self._admit(part, taken, part.admit_due)
        else:
            self._admit(part, taken, part.admit_careful if part.suspicious else part.admit)

    def _admit(self, part: Partition, taken: Taken, admit: Callable[[Delivery], None]) -> None:
        if taken.is_foreign:
            taken.delivery.timed = False
            part.leaving.add(taken.delivery.id)
            part.acks.append(taken.delivery)
        elif taken.malformed is not None:
            self._bury_at_once(taken.delivery, reject("malformed", taken.malformed, 0, self._options.dead_letter))
        else:
            admit(taken.delivery)

    def _bury_at_once(self, delivery: Delivery, outcome: Bury) -> None:
        _log.error(
            "topic %r, partition %d, group %r, message %s: %s",
            *(delivery.topic, delivery.partition, delivery.group, delivery.id, outcome.reason),
        )
        delivery.owner.leaving.add(delivery.id)
        delivery.owner.failed.append((delivery, outcome))

    def _note_ghosts(self, part: Partition, count: int) -> None:
        _log.warning("%r: %d pending IDs have no entry any more", part.stream, count)
        part.metrics.ghosts(part.index, count)

    def _flush_timings(self, part: Partition) -> None:
        if part.durations:
            durations, part.durations = part.durations, []
            part.metrics.handled(part.index, "ack", durations)
