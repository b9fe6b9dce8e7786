"""Growth, retention, groups and queries, in any order, with deaths in between: nothing that was confirmed is lost."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from conquiet.topics.operate.removal import delete_group, reset_group
from conquiet.topics.options import Retention
from conquiet.topics.server import retention
from conquiet.topics.server.external_groups import adopt_group
from conquiet.topics.server.group import found_group
from tests.topics.growing import Group, World

pytestmark = [pytest.mark.guarantee, pytest.mark.slow]

KEPT: Final = {
    "everything": Retention(),
    "unfinished": Retention(delete_acked=True),
    "few": Retention(max_len=2),
    "few or none": Retention(max_len=3, on_full="reject"),
    "few at any price": Retention(max_len=3, on_full="drop"),
}
KEYS: Final = ["a", "b", "c", "d"]
ALL: Final = 1000

kept = st.sampled_from([*KEPT.values()])
steps = st.sampled_from([0, 1, 2, 3, 5, 8, ALL, ALL, ALL])
"""Calls to the server before others come in between; mostly all that it takes."""
members = st.sampled_from(["billing", "audit"])
few = st.integers(1, 3)


class Growing(World, RuleBasedStateMachine):
    """One topic, two groups of members, a query and another program."""

    @initialize(kept=kept, early=st.sampled_from([True, True, False]))
    def begin(self, kept: Retention, early: bool) -> None:
        self.wait(self.create(kept))
        if early:
            self.make("billing", "earliest", ALL)
        self.messages_are_sent(0, KEYS)

    # --- the topic -------------------------------------------------------------------------------------------

    @rule(producer=st.integers(0, 1), keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=5))
    def messages_are_sent(self, producer: int, keys: list[str]) -> None:
        for key in keys:
            self.wait(self.send(producer, key))

    @rule(more=st.integers(1, 2))
    def growth_is_announced(self, more: int) -> None:
        self.wait(self.announce(more))

    @rule(steps=steps)
    def growth_is_completed(self, steps: int) -> None:
        self.wait(self.complete(steps))

    @rule(more=st.integers(1, 2))
    def it_grows(self, more: int) -> None:
        self.wait(self.announce(more))
        self.wait(self.complete(ALL))
        self.messages_are_sent(1, KEYS)

    @rule(producer=st.integers(0, 1))
    def a_producer_completes_it(self, producer: int) -> None:
        """Nobody was heard of for too long."""
        topic = self.wait(self.take_effect())
        if topic.next_count is not None:
            self.clock.advance(5)
            self.wait(self.send(producer, "a", overdue=True))

    @rule(kept=kept)
    def it_is_trimmed(self, kept: Retention) -> None:
        topic = self.wait(self.topic())
        for index in range(topic.partitions):
            self.wait(retention.trim(self.instance, topic, index, kept))

    @rule(seconds=st.sampled_from([1, 200]))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds)

    # --- the groups ------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.groups["billing"].is_live or not self.groups["audit"].is_live)
    @rule(name=members, start=st.sampled_from(["earliest", "latest"]), steps=steps)
    def make(self, name: str, start: str, steps: int) -> None:
        group = self.groups[name]
        if self.is_busy(group) or group.is_live:
            return
        is_new, topic = not group.is_there, self.wait(self.topic())
        place = "0-0" if start == "earliest" else "$"
        group.is_there = True

        async def done() -> None:
            group.begin(await self.there() if is_new and start == "earliest" else (), is_orderly=is_new)

        work = self.act(
            group,
            lambda instance, registry: found_group(instance, registry, topic, name, place),
            done,
            group.end,
            steps,
        )
        self.wait(work)

    @precondition(lambda self: not self.groups["query"].is_live)
    @rule(steps=steps)
    def a_query_begins(self, steps: int) -> None:
        group = self.groups["query"]
        if self.is_busy(group) or group.is_live:
            return
        is_new, topic = not group.is_there, self.wait(self.topic())
        group.is_there = True

        async def done() -> None:
            group.begin(await self.there() if is_new else ())

        work = self.act(
            group,
            lambda instance, registry: adopt_group(instance, registry, topic, "query", {}),
            done,
            group.end,
            steps,
        )
        self.wait(work)

    @precondition(lambda self: not self.groups["other"].is_live)
    @rule()
    def another_program_comes(self) -> None:
        group, topic = self.groups["other"], self.wait(self.topic())
        if group.is_live or self.is_busy(group) or group.is_there or topic.next_count is not None:
            return
        for index in range(topic.partitions):
            self.wait(self.stage.create_group(topic, "other", partition=index))
        group.begin(self.wait(self.there()))

    @rule(name=st.sampled_from(["billing", "audit", "query", "other"]), steps=steps)
    def delete(self, name: str, steps: int) -> None:
        group = self.groups[name]
        if self.is_busy(group) or not group.is_live:
            return
        topic = self.wait(self.topic())
        group.end()

        async def done() -> None:
            group.is_there = False

        work = self.act(
            group,
            lambda instance, registry: delete_group(instance, registry, topic, name, True),
            done,
            group.end,
            steps,
        )
        self.wait(work)

    @rule(name=members, to=st.sampled_from(["earliest", "latest"]), steps=steps)
    def reset(self, name: str, to: str, steps: int) -> None:
        group = self.groups[name]
        if self.is_busy(group) or not group.is_live:
            return
        topic = self.wait(self.topic())
        group.end()

        async def done() -> None:
            group.begin(await self.there() if to == "earliest" else ())

        def dead() -> None:
            group.begin((), is_orderly=False)

        work = self.act(
            group,
            lambda instance, registry: reset_group(instance, registry, topic, name, to, True),  # type: ignore[arg-type]
            done,
            dead,
            steps,
        )
        self.wait(work)

    @rule(name=members, most=few, parks=st.sampled_from([0, 2, 3]), kept=kept)
    def a_consumer_comes_by(self, name: str, most: int, parks: int, kept: Retention) -> None:
        """It finishes what it takes, or has some of it wait for a retry, and trims."""
        if self._is_served(group := self.groups[name]):
            self.wait(self.serve(group, most, lambda what: "park" if parks and what % parks == 0 else "ack"))
            self.it_is_trimmed(kept)

    @rule(name=members)
    def a_consumer_catches_up(self, name: str) -> None:
        if self._is_served(group := self.groups[name]):
            self.time_passes(200)
            while self.wait(self.serve(group, 100, lambda what: "ack")):
                self.time_passes(200)

    @rule(name=members, most=few)
    def a_consumer_begins_again(self, name: str, most: int) -> None:
        self.a_consumer_catches_up(name)
        self.reset(name, "earliest", ALL)
        self.a_consumer_comes_by(name, most, 0, Retention())

    @precondition(lambda self: self.groups["query"].is_live)
    @rule(most=few)
    def the_query_reads_on(self, most: int) -> None:
        if self._is_served(group := self.groups["query"]):
            self.wait(self.publish(group, most))

    @precondition(lambda self: self.groups["other"].is_live)
    @rule(most=few)
    def the_other_program_reads_on(self, most: int) -> None:
        if self._is_served(group := self.groups["other"]):
            self.wait(self.read(group, most))

    def _is_served(self, group: Group) -> bool:
        return group.is_live and not self.is_busy(group)

    # --- those in the middle of something ----------------------------------------------------------------------

    @precondition(lambda self: self.actors)
    @rule(steps=steps, data=st.data())
    def somebody_goes_on(self, steps: int, data: st.DataObject) -> None:
        self.wait(self.go_on(data.draw(st.sampled_from(self.actors)), steps))

    @precondition(lambda self: self.actors)
    @rule(data=st.data())
    def somebody_dies(self, data: st.DataObject) -> None:
        self.wait(self.die(data.draw(st.sampled_from(self.actors))))

    @invariant()
    def nothing_is_lost(self) -> None:
        self.wait(self.check())


@pytest.mark.any_server
@pytest.mark.timeout(300)
def test_whatever_was_confirmed_reaches_every_group_that_was_there(url: str, scale: float) -> None:
    machine = type("Machine", (Growing,), {"url": url})
    # What it finds is made shorter where there is time for that.
    phases = (Phase.generate, Phase.shrink) if scale >= 1 else (Phase.generate,)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max(10, int(500 * scale)),
            stateful_step_count=30,
            deadline=None,
            database=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )
