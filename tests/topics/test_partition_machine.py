"""The pure partition under whatever may happen to it: what is handled, in which order, and what is asked for."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

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
ENOUGH: Final = 300
"""Turns in which whatever can be done is done."""

TROUBLES: Final = (
    *("time passes", "pause", "resume", "limit", "no limit", "drain", "keep", "distrust", "unsafe", "safe"),
    *("crash", "release"),
)

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

    @rule(fates=st.lists(st.sampled_from(["answered", "answered", "never arrived", "answer lost"]), max_size=5))
    def turns(self, fates: list[str]) -> None:
        for fate in fates:
            self.turn(fate)

    def turn(self, fate: str) -> None:
        consumer = self.consumer
        wanted = consumer.wanted()
        for part, request in wanted:
            self.check(part, sum(step.asked for step in request.steps), request.listens)
            for step in request.steps:
                self.check_new(part, step.fresh)
        consumer.exchange(wanted, fate != "never arrived", fate == "answered")
        consumer.listen(wanted)
        consumer.now += 0.01
        self.handle()

    @rule(hows=st.lists(st.tuples(st.integers(0, 7), st.sampled_from(["done", "done", "park", "bury"])), max_size=4))
    def handlers_end(self, hows: list[tuple[int, str]]) -> None:
        for at, how in hows:
            if at < len(self.consumer.running):
                self.end(at, how)
                self.handle()

    @rule(at=which, what=st.sampled_from(TROUBLES), count=st.integers(0, 3))
    def trouble(self, at: int, what: str, count: int) -> None:
        part = self.consumer.parts[at]
        match what:
            case "time passes":
                self.consumer.now += count
            case "pause" | "resume":
                self.pause(what == "pause")
            case "limit":
                part.limit_to(f"{self.logs[at].given + count}-0")
            case "no limit":
                part.limit_to(None)
            case "drain":
                part.drain()
            case "keep":
                part.keep()
            case "distrust":
                part.distrust()
            case "unsafe" | "safe":
                part.lease.deadline = FOR_EVER if what == "safe" else 0.0
            case _:
                for _ in range(count + 1 if what == "crash" else 1):
                    self.change_owner(at, what == "crash")

    def pause(self, is_paused: bool) -> None:
        self.paused = is_paused
        for part in self.consumer.parts:
            part.pause(is_paused)

    def change_owner(self, at: int, is_crash: bool) -> None:
        if not is_crash:
            self.logs[at].owner = ""
        self.consumer.replace(at)
        self.consumer.parts[at].pause(self.paused)
        for _ in range(2 if is_crash else 0):
            self.turn("answered")

    # --- what holds ---------------------------------------------------------------------------------------------

    def check(self, part: Partition, asked: int, listens: str | None) -> None:
        """It never asks for what it may not take, nor waits for it."""
        may_not = self.paused or part.is_draining or part.is_lost or part.lease.deadline == 0.0
        if may_not or part.hand.isolation.is_active:
            assert not asked
            assert listens is None

    def check_new(self, part: Partition, fresh: int) -> None:
        """Nothing new is taken behind the limit, nor while a parked one blocks the partition."""
        if fresh:
            assert part.limit is None or id_order(self.logs[part.index].last_id) < id_order(part.limit)
            assert not (self.options.order == "block_partition" and part.hand.parked)

    def handle(self) -> None:
        for part, delivery in self.consumer.begin():
            place = (part.index, delivery.id)
            assert part.lease.is_safe(self.consumer.now)
            assert not part.is_draining
            key = None if self.options.batch_handler else delivery.key
            if key is not None and place not in self.handled:
                before = self.firsts.get((part.index, key), "0-0")
                assert id_order(before) < id_order(delivery.id), "out of order"
                self.firsts[part.index, key] = delivery.id
            self.handled.add(place)
            blocks = self.options.order != "unordered" and not self.options.batch_handler
            if blocks and (key is not None or self.options.order == "block_partition"):
                same = [one for one in part.hand.parked.values() if self.options.order != "block_key" or one.key == key]
                assert all(id_order(one.id) > id_order(delivery.id) for one in same), "overtook a parked one"

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

    def teardown(self) -> None:
        """Once nothing stands in the way, whatever can be taken is asked for: it comes to an end."""
        if not hasattr(self, "consumer"):
            return
        self.pause(False)
        for part in self.consumer.parts:
            part.lease.deadline = FOR_EVER
            part.limit_to(None)
            part.keep()
        for _ in range(ENOUGH):
            self.turn("answered")
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
    max_examples=300, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
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


def consumer_of(*keys: str | None, **changes: int) -> Consumer:
    """One that owns a partition with such messages, and has taken them."""
    log = Log(0)
    for key in keys:
        log.add(key)
    consumer = Consumer(SubscribeOptions(**changes), [log])  # type: ignore[arg-type]
    for _ in range(3):
        consumer.exchange(consumer.wanted())
    return consumer


def test_nothing_begins_once_the_lease_may_have_run_out() -> None:
    consumer = consumer_of("a", "b")
    [part] = consumer.parts
    part.lease.deadline = 0.0
    assert not consumer.begin()
    part.lease.deadline = FOR_EVER
    consumer.exchange(consumer.wanted())
    assert len(consumer.begin()) == 2


def test_an_acknowledgment_whose_answer_was_lost_is_sent_again() -> None:
    consumer = consumer_of("a")
    [(part, delivery)] = consumer.begin()
    part.hand.handled(delivery)
    consumer.exchange(consumer.wanted(), is_done=False)
    assert part.hand.inflight == 1
    consumer.exchange(consumer.wanted())
    assert (part.hand.inflight, consumer.logs[0].settled) == (0, {delivery.id})


def test_a_suspect_begins_when_all_others_of_its_partition_have_ended() -> None:
    """The first page has none, so what is on it runs as usual; the second has one."""
    consumer = consumer_of("a", "b", max_inflight=1)
    for _ in range(SUSPICIOUS):
        consumer.replace(0)
        consumer.exchange(consumer.wanted())
    log = consumer.logs[0]
    log.pending["1-0"].crashes, log.owner = 0, ""
    log.given, log.pending["2-0"] = 2, type(log.pending["1-0"])("dead", crashes=SUSPICIOUS)
    consumer.options = SubscribeOptions(max_inflight=2, batch_size=1)
    consumer.replace(0)
    for _ in range(4):
        consumer.exchange(consumer.wanted())
        consumer.begin()
    assert [delivery.id for _, delivery in consumer.running] == ["1-0"]
    [(part, first)] = consumer.running
    part.hand.handled(first)
    consumer.running.clear()
    for _ in range(2):
        consumer.exchange(consumer.wanted())
    assert [delivery.id for _, delivery in consumer.begin()] == ["2-0"]
