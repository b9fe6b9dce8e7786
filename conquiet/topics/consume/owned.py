"""A partition that the engine serves: its state, its scripts, and what is told of it in metrics and to callers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, cast

from conquiet.errors import ConfigError, LeaseLostError
from conquiet.kit.clock import Clock
from conquiet.kit.loopthread import forks
from conquiet.metrics import GroupMetrics, Operation
from conquiet.topics.consume.delivery import Delivery
from conquiet.topics.consume.outcomes import DONE, Bury, Outcome, Park, Requeue, judge, kind_of, letter_fields
from conquiet.topics.consume.partition import Partition
from conquiet.topics.consume.requests import Step
from conquiet.topics.options import SubscribeOptions
from conquiet.topics.server.partition import Answer, Asked, OwnedPartition, Page, Taken

if TYPE_CHECKING:
    from conquiet.topics.consume.node import Node

__all__ = ["Owned"]

_log = logging.getLogger("conquiet.topics")
_A_WHILE: Final = 1.0
"""Seconds after which a hand-over is told of that waits for something."""
_AGAIN: Final = 60.0
_OPERATIONS: Final[dict[str, Operation]] = {"park": "retry", "requeue": "retry", "bury": "dead_letter"}


class Owned:
    """One partition of a consumer, from being acquired to being dropped."""

    def __init__(
        self,
        partition: Partition,
        scripts: OwnedPartition,
        metrics: GroupMetrics,
        options: SubscribeOptions,
        finished: Callable[[Delivery, None, BaseException | None, float], None],
    ) -> None:
        self.partition = partition
        self.hand = partition.hand
        self.stream = partition.stream
        self.metrics = metrics
        self.node: Node | None = None
        """Where it lives; ``None`` until that is known."""
        self.settled = asyncio.Event()
        """Set when nothing is in hand any more, or will be."""
        self.waits_for: str | None = None
        """What a hand-over has been waiting for, for more than a moment."""
        self.outbox = True
        """Whether dead letters may be waiting to be forwarded."""
        self.trim_at = 0.0
        self.durations: list[float] = []
        """How long handlers took that were not reported yet."""
        self._scripts = scripts
        self._options = options
        self._finished = finished
        self._forks = forks()

    # --- steps and their answers --------------------------------------------------------------------------------

    def asked(self, step: Step) -> Asked[Answer | None]:
        """The call that a step is."""
        scripts, partition = self._scripts, self.partition
        match step.kind:
            case "take":
                ids = [delivery.id for delivery in step.acks]
                if not step.asked:
                    return scripts.acknowledge(step.id, ids)
                return scripts.take(
                    step.fresh, step.due, step.id, partition.limit, ids, step.known[0].decode() if step.known else ""
                )
            case "page":
                return scripts.page(step.id, step.size, *partition.crashed)
            case "park":
                return scripts.park([(delivery.id, cast("Park", outcome)) for delivery, outcome in step.failed])
            case "requeue":
                return scripts.requeue([(one.id, cast("Requeue", how), one.original_id) for one, how in step.failed])
            case "bury":
                letters = self._options.dead_letter
                return scripts.bury(
                    [(one.id, cast("Bury", how), letter_fields(one, letters)) for one, how in step.failed]
                )
            case "mark":
                return scripts.mark(step.id)

    def received(self, step: Step, answer: Answer, seconds: float, now: float) -> None:
        """Take in what the server answered after so many seconds."""
        settled = self.partition.received(step, answer, now)
        self._count(step, answer, seconds)
        for delivery in settled:
            if delivery.confirmed is not None and not delivery.confirmed.done():
                delivery.confirmed.set_result(None)
        if self.durations:
            durations, self.durations = self.durations, []
            self.metrics.handled(self.partition.index, "ack", durations)
        if not self.hand.inflight:
            self.settled.set()

    def _count(self, step: Step, answer: Answer, seconds: float) -> None:
        metrics, index = self.metrics, self.partition.index
        if isinstance(answer, Taken):
            if step.acks:
                now = time.time() * 1000
                metrics.acked(index, answer.acknowledged, seconds)
                metrics.end_to_end([(now - one.timestamp_ms) / 1000 for one in step.acks if one.fate is None])
            if answer.fresh:
                metrics.consumed(index, len(answer.fresh))
        elif isinstance(answer, Page):
            others = sum(entry.was_others for entry in answer.entries)
            if others:
                metrics.claimed(index, others)
        elif step.kind == "bury":
            self.outbox = True
            metrics.dead_lettered(index, len(step.failed))
        elif step.failed:
            metrics.retried(index, len(step.failed))

    # --- outcomes -----------------------------------------------------------------------------------------------

    def finished(self, delivery: Delivery, error: BaseException | None, seconds: float) -> bool:
        """A delivery was handled, or failed with ``error``; whether that is the first that waits to be written."""
        partition = self.partition
        if error is None and not partition.lease.lost:
            self.durations.append(seconds)
            return self.hand.handled(delivery)
        options = self._options
        outcome: Outcome = DONE if error is None else judge(error, delivery, options.retry, options.dead_letter)
        kind = kind_of(outcome)
        self.metrics.handled(partition.index, "fenced" if partition.is_lost else kind, [seconds])
        if partition.is_lost:
            self.metrics.fenced(partition.index, kind, 1)
            return False
        place = (delivery.topic, delivery.partition, delivery.group, delivery.id, delivery.retry_count + 1)
        about = "topic %r, partition %d, group %r, message %s, attempt %d: %s (%s)"
        _log.warning(about, *place, kind, type(error).__name__)
        return self.hand.failed(delivery, outcome)

    def finished_all(self, deliveries: Sequence[Delivery], seconds: float) -> bool:
        """As :meth:`finished`, for many that were handled together, each in so many seconds."""
        if self.partition.is_lost:
            for delivery in deliveries:
                self.finished(delivery, None, seconds)
            return False
        self.durations += [seconds] * len(deliveries)
        return self.hand.handled_all(deliveries)

    # --- its end ------------------------------------------------------------------------------------------------

    def fenced(self, step: Step) -> None:
        """The server says that the lease is another owner's."""
        index = self.partition.index
        if step.acks:
            self.metrics.fenced(index, "ack", len(step.acks))
        if step.failed or not step.acks:
            self.metrics.fenced(index, _OPERATIONS.get(step.kind, "take"), max(len(step.failed), 1))
        self._refuse(self.partition.fenced(step))

    def abandon(self) -> None:
        """It is given up: what is not written yet never will be, which counts as refused if it was lost."""
        kinds: Counter[Operation] = Counter()
        is_lost = self.partition.is_lost
        held, acks, failed = self.partition.abandon()
        kinds["ack"] = len(acks)
        kinds.update(kind_of(outcome) for _, outcome in failed)
        if is_lost:
            for kind, count in kinds.items():
                self.metrics.fenced(self.partition.index, kind, count)
        self._refuse([*held, *acks, *(delivery for delivery, _ in failed)])
        self.settled.set()

    def _refuse(self, deliveries: Iterable[Delivery]) -> None:
        """Tell callers that wait for a settlement that the partition has another owner."""
        for delivery in deliveries:
            delivery.settled = True
            if delivery.confirmed is not None and not delivery.confirmed.done():
                delivery.confirmed.set_exception(self._lost_error(delivery))

    async def drained(self, clock: Clock, limit: float | None, *, is_quiet: bool) -> bool:
        """Return once nothing is in hand; whether that is so, and the drain was not called off.

        What was pulled ``limit`` seconds ago is not waited for. Says what it waits for, unless it is to be quiet.
        """
        partition = self.partition
        say_at = clock.monotonic() + _A_WHILE
        while partition.is_draining and self.hand.inflight:
            self.settled.clear()
            await clock.wait(self.settled, _A_WHILE)
            now = clock.monotonic()
            for delivery in () if limit is None else self.hand.give_up(now - limit):
                _log.warning("%r is not waited for any longer: it was pulled %g s ago", delivery, limit)
            if now >= say_at and not is_quiet and self.hand.inflight:
                say_at = now + _AGAIN
                self.waits_for = self._waiting_for(list(self.hand.started()))
                _log.warning("%s", self.waits_for)
        self.waits_for = None
        return partition.is_draining or partition.is_lost

    def _waiting_for(self, deliveries: Sequence[Delivery]) -> str:
        topic, index = self.partition.topic.name, self.partition.index
        some = ", ".join(delivery.id for delivery in deliveries[:3])
        more = f" and {len(deliveries) - 3} more" if len(deliveries) > 3 else ""
        what = f"message {some}{more}, not settled yet" if deliveries else "the server"
        return f"topic {topic!r}: the hand-over of partition {index} waits for {what}"

    # --- what was pulled ----------------------------------------------------------------------------------------

    async def settle_by_hand(self, delivery: Delivery, error: Exception | None) -> None:
        """Settle a pulled message; returns when Redis has it. Refused in a forked child, which owns nothing."""
        if self._forks != forks():
            raise ConfigError(f"{delivery!r} was pulled before a fork and is the parent's")
        if self.partition.is_lost:
            raise self._lost_error(delivery)
        if delivery.settled:
            raise ConfigError(f"{delivery!r} is settled already")
        if not self.hand.holds(delivery):
            raise self._lost_error(delivery)
        delivery.confirmed = asyncio.get_running_loop().create_future()
        self._finished(delivery, None, error, 0.0)
        await delivery.confirmed

    def _lost_error(self, delivery: Delivery) -> LeaseLostError:
        return LeaseLostError(f"{self.stream!r} has another owner now, so message {delivery.id} was left as it is")
