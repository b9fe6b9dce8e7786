"""The pure partition under whatever may happen to it: what is handled, in which order, and what is asked for."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from conquiet.kit.entry_ids import order as id_order
from conquiet.topics.consume.key_order import Parked
from conquiet.topics.consume.outcomes import Bury, Park
from conquiet.topics.consume.partition import Partition
from conquiet.topics.options import SubscribeOptions
from conquiet.topics.server.partition import SUSPICIOUS
from tests.topics.partition_model import FOR_EVER, Consumer, Log

pytestmark = pytest.mark.guarantee

PARTITIONS: Final = 2
KEYS: Final = ["a", "b", None]
ENOUGH: Final = 2_000
"""Turns in which whatever can be done is done."""

which = st.integers(0, PARTITIONS - 1)
orders = st.sampled_from(["unordered", "unordered", "block_key", "block_partition"])


class Consuming(RuleBasedStateMachine):
    """Two partitions of one consumer, owned by one after the other."""

    @initialize(order=orders, limit=st.integers(1, 8), batch=st.integers(1, 8), batches=st.booleans())
    def begin(self, order: str, limit: int, batch: int, batches: bool) -> None:
        self.options = SubscribeOptions(
            order=order,  # type: ignore[arg-type]
            max_inflight=limit,
            batch_size=batch,
            batch_handler=batches and order == "unordered",
        )
        self.logs = [Log(index) for index in range(PARTITIONS)]
        self.consumer = Consumer(self.options, self.logs)
        self.paused = False
        self.firsts: dict[tuple[int, str], str] = {}
        self.handled: set[tuple[int, str]] = set()

    # --- what happens ---------------------------------------------------------------------------------------

    @rule(at=which, keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=6))
    def messages_arrive(self, at: int, keys: list[str | None]) -> None:
        for key in keys:
            self.logs[at].add(key)

    @rule(fate=st.sampled_from(["answered", "answered", "answered", "never arrived", "answer lost"]))
    def exchange(self, fate: str) -> None:
        consumer = self.consumer
        wanted = consumer.wanted()
        for part, request in wanted:
            self.check(part, sum(step.asked for step in request.steps), request.listens)
        consumer.exchange(wanted, fate != "never arrived", fate == "answered")
        consumer.listen(wanted)
        self.handle()

    @rule(draw=st.data(), how=st.sampled_from(["done", "done", "park", "bury"]))
    def a_handler_ends(self, draw: st.DataObject, how: str) -> None:
        if self.consumer.running:
            at = draw.draw(st.integers(0, len(self.consumer.running) - 1))
            self.end(at, how)
            self.handle()

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.consumer.now += seconds

    @rule(is_paused=st.booleans())
    def is_paused(self, is_paused: bool) -> None:
        self.paused = is_paused
        for part in self.consumer.parts:
            part.pause(is_paused)

    @rule(at=which, ahead=st.one_of(st.none(), st.integers(0, 3)))
    def a_limit_is_set(self, at: int, ahead: int | None) -> None:
        self.consumer.parts[at].limit_to(None if ahead is None else f"{self.logs[at].given + ahead}-0")

    @rule(at=which)
    def a_drain_begins(self, at: int) -> None:
        self.consumer.parts[at].drain()

    @rule(at=which)
    def a_drain_is_called_off(self, at: int) -> None:
        self.consumer.parts[at].keep()

    @rule(at=which)
    def the_server_is_distrusted(self, at: int) -> None:
        self.consumer.parts[at].distrust()

    @rule(at=which, is_safe=st.booleans())
    def a_renewal_fails_or_not(self, at: int, is_safe: bool) -> None:
        self.consumer.parts[at]._lease.deadline = FOR_EVER if is_safe else 0.0

    @rule(at=which, with_crash=st.booleans())
    def the_owner_changes(self, at: int, with_crash: bool) -> None:
        if not with_crash:
            self.logs[at].owner = ""  # it was released
        self.consumer.replace(at)
        self.consumer.parts[at].pause(self.paused)

    # --- what holds ---------------------------------------------------------------------------------------------

    def check(self, part: Partition, asked: int, listens: str | None) -> None:
        """It never asks for what it may not take, nor waits for it."""
        may_not = self.paused or part.is_draining or part.is_lost or part._lease.deadline == 0.0
        if may_not or part.hand.isolation.is_active:
            assert not asked
            assert listens is None

    def handle(self) -> None:
        for part, delivery in self.consumer.begin():
            place = (part.index, delivery.id)
            assert part._lease.is_safe(self.consumer.now)
            assert not part.is_draining
            key = None if self.options.batch_handler else delivery.key
            if key is not None and place not in self.handled:
                before = self.firsts.get((part.index, key), "0-0")
                assert id_order(before) < id_order(delivery.id), "out of order"
                self.firsts[part.index, key] = delivery.id
            self.handled.add(place)

    def end(self, at: int, how: str) -> None:
        part, delivery = self.consumer.running.pop(at)
        if not part.hand.holds(delivery):
            return
        if how == "done":
            part.hand.handled(delivery)
        else:
            outcome = Park(1.0, delivery.retry_count + 1, "E") if how == "park" else Bury(1, "no")
            part.hand.failed(delivery, outcome)
        self.consumer.ready += [(part, one) for one in part.hand.ready()]

    @invariant()
    def at_most_one_of_a_key_runs(self) -> None:
        if not hasattr(self, "consumer") or self.options.batch_handler:
            return
        keys = [(part.index, delivery.key) for part, delivery in self.consumer.running if delivery.key is not None]
        assert len(keys) == len(set(keys))
        if self.options.order == "block_partition":
            running = [part.index for part, _ in self.consumer.running]
            assert len(running) == len(set(running))

    @invariant()
    def room_and_memory_are_bounded(self) -> None:
        if hasattr(self, "consumer"):
            # What blocks others is let in without room, one a partition.
            more = PARTITIONS if self.options.order != "unordered" else 0
            assert sum(part.load for part in self.consumer.parts) <= self.options.max_inflight + more
            assert all(type(one) is Parked for part in self.consumer.parts for one in part.hand.parked.values())

    @invariant()
    def suspects_run_alone(self) -> None:
        if hasattr(self, "consumer"):
            for part, delivery in self.consumer.running:
                if delivery.crashes >= SUSPICIOUS:
                    assert [one for owner, one in self.consumer.running if owner is part] == [delivery]

    @precondition(lambda self: hasattr(self, "consumer"))
    @rule()
    def in_the_end_all_is_settled(self) -> None:
        """Once nothing stands in the way, whatever can be taken is asked for: it comes to an end."""
        self.is_paused(False)
        for at, part in enumerate(self.consumer.parts):
            self.a_renewal_fails_or_not(at, is_safe=True)
            part.limit_to(None)
            part.keep()
        for _ in range(ENOUGH):
            self.exchange("answered")
            while self.consumer.running:
                self.end(0, "done")
                self.handle()
            if all(len(log.settled) == len(log.entries) for log in self.logs):
                break
            self.consumer.now += 0.5
        for log in self.logs:
            assert len(log.settled) == len(log.entries), log


TestConsuming = Consuming.TestCase
TestConsuming.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@settings(deadline=None, max_examples=100)
@given(
    limit=st.integers(2, 40),
    batch=st.integers(1, 100),
    backlog=st.integers(1, 200),
    others=st.integers(1, 10),
)
def test_a_hot_key_leaves_each_other_partition_its_share(limit: int, batch: int, backlog: int, others: int) -> None:
    """A partition full of one key, whose handler never ends, and then others with messages of many keys."""
    logs = [Log(0), Log(1)]
    for _ in range(backlog):
        logs[0].add("hot")
    options = SubscribeOptions(max_inflight=limit, batch_size=batch)
    consumer = Consumer(options, logs)
    for is_later in (False, True):
        if is_later:
            for number in range(others):
                logs[1].add(f"k{number}")
        for _ in range(60):
            wanted = consumer.wanted()
            consumer.exchange(wanted)
            consumer.listen(wanted)
            consumer.begin()
    running = [delivery.key for part, delivery in consumer.running if part.index == 1]
    assert len(running) >= min(others, limit // 2)
    assert [delivery.key for part, delivery in consumer.running if part.index == 0] == ["hot"]
