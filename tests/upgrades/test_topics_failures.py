"""Failures of an earlier version: retries that wait, delays, and dead letters wherever they were."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from conquiet import Broker, Message
from tests.rigs.waiting import eventually
from tests.topics.consuming import Recorder, buried, finished, impatient
from tests.upgrades.conftest import Home
from tests.upgrades.scenes.topics import LATER, MUCH_LATER

NEW = 99


@pytest.fixture
def room() -> str:
    return "topics"


@pytest.fixture
async def broker(home: Home) -> AsyncIterator[Broker]:
    async with Broker(home.url, clock=home.clock) as broker:
        yield broker


async def _send_new(broker: Broker, topic: str) -> None:
    """Messages that come after all that is there: who has got them was given all that was due before."""
    for partition in (0, 1):
        await broker.send(topic, {"n": NEW}, partition=partition)


def tried(seen: Recorder) -> list[tuple[int, int]]:
    """The messages so far, and which try it was; without the new ones."""
    found = [(message.payload["n"], message.retry_count) for message in seen.messages]
    return sorted(pair for pair in found if pair[0] != NEW)


async def test_parked_messages_are_retried_when_they_are_due(home: Home, broker: Broker) -> None:
    async def fail(message: Message) -> None:
        if message.payload["n"] == 4:
            raise ValueError("for the last time")

    seen = Recorder(fail)
    async with broker.subscribe("retries", group="park", handler=seen, options=impatient()):
        await _send_new(broker, "retries")
        await seen.saw(2)
        assert tried(seen) == []
        home.clock.advance(LATER + 1)
        await seen.saw(6)
        assert tried(seen) == [(0, 1), (1, 2), (4, 1), (6, 0)]
        [letter] = await buried(broker, "retries")  # whose own limit was one retry
        assert (letter.payload, letter.attempts, letter.reason) == ({"n": 4}, 2, "retries exhausted")
        assert letter.first_failed_at < letter.failed_at  # type: ignore[operator]
        home.clock.advance(MUCH_LATER)
        await seen.saw(8)
        assert tried(seen) == [(0, 1), (1, 2), (3, 1), (4, 1), (6, 0), (7, 0)]
        await finished(broker, "retries", "park")
    late = next(message for message in seen.messages if message.payload["n"] == 6)
    assert (late.key, late.headers["h"]) == ("late", "1")


async def test_requeued_messages_come_back_to_their_group_alone(home: Home, broker: Broker) -> None:
    seen, others = Recorder(), Recorder()
    async with broker.subscribe("retries", group="requeue", handler=seen, options=impatient(mode="requeue")):
        await _send_new(broker, "retries")
        await seen.saw(2)
        assert tried(seen) == []
        home.clock.advance(LATER + 1)
        await seen.saw(5)
        assert tried(seen) == [(0, 1), (1, 1), (6, 0)]
        home.clock.advance(MUCH_LATER)
        await seen.saw(6)
        await finished(broker, "retries", "requeue")
        async with broker.subscribe("retries", group="new", handler=others, options=impatient()):
            await others.saw(10)
            await finished(broker, "retries", "new")
    assert tried(others) == [(n, 0) for n in range(8)]
    again = [message for message in seen.messages if message.retry_count]
    firsts = {f"{first.partition}/{first.id}" for first in others.messages if first.payload["n"] in (0, 1)}
    assert {message.original_id for message in again} == firsts


async def test_dead_letters_are_told_as_they_were(home: Home, broker: Broker) -> None:
    """Those that were still on their way too."""
    found = {(one.group, one.payload["n"]): one for one in await buried(broker, "letters", 6)}
    assert found.keys() == {("a", 0), ("a", 1), ("a", 2), ("a", 3), ("b", 0), ("b", 5)}
    broken = found["a", 2]
    assert (broken.reason, broken.error_type, broken.error) == ("retries exhausted", "ValueError", "it is broken: Zoë")
    assert "it is broken" in broken.traceback
    rejected = found["a", 1]
    assert (rejected.reason, rejected.error, rejected.attempts) == ("rejected", "not wanted", 1)
    for (_, n), letter in found.items():
        assert (letter.key, letter.partition) == (f"key-{n}", n % 2)
        if n < 5:
            assert f"{letter.partition}/{letter.original_id}" == home.facts["letters"]["ids"][n]
            assert letter.headers == {"trace": f"t{n}"}


@pytest.mark.any_server
async def test_dead_letters_are_replayed_to_their_groups_once(home: Home, broker: Broker) -> None:
    a, b = Recorder(), Recorder()
    async with (
        broker.subscribe("letters", group="a", handler=a, options=impatient()),
        broker.subscribe("letters", group="b", handler=b, options=impatient()),
    ):
        await a.saw(2)  # what was replayed before, as a copy, and what only b had got
        first = next(message for message in a.messages if message.payload["n"] == 4)
        assert first.replayed_from == home.facts["letters"]["ids"][4]
        assert await broker.admin.replay("letters") == 6
        await a.saw(6)
        await b.saw(2)
        await finished(broker, "letters", "a", "b")
        assert await broker.admin.replay("letters") == 0
    assert sorted(message.payload["n"] for message in a.messages) == [0, 1, 2, 3, 4, 5]
    assert sorted(message.payload["n"] for message in b.messages) == [0, 5]
    assert await broker.admin.dead_letters("letters") == []


@pytest.mark.any_server
async def test_what_was_on_its_way_is_forwarded_by_the_next_owner(home: Home, broker: Broker) -> None:
    async def arrived() -> bool:
        return (await broker.admin.describe_topic("letters")).dead_letters == 6

    assert not await arrived()
    async with broker.subscribe("letters", group="b", handler=Recorder(), options=impatient()):
        await eventually(arrived, "the letter that was on its way")


@pytest.mark.any_server
@pytest.mark.parametrize("pause", [0.0, 3600.0], ids=["at once", "much later"])
async def test_a_replay_that_was_cut_off_is_completed_and_nothing_comes_twice(
    home: Home, broker: Broker, pause: float
) -> None:
    home.clock.advance(pause)
    seen = Recorder()
    async with broker.subscribe("replaying", group="g", handler=seen, options=impatient()):
        await broker.admin.replay("replaying")
        await seen.saw(4)
        await finished(broker, "replaying", "g")
    assert sorted(message.payload["n"] for message in seen.messages) == [0, 1, 2, 3]
    assert await broker.admin.dead_letters("replaying") == []
