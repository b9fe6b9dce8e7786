"""Topics of an earlier version: all that was unfinished reaches a handler, in order, and nothing that was finished."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest

from conquiet import Broker, BytesCodec, Message, TopicFullError
from tests.rigs.waiting import eventually
from tests.topics.consuming import Recorder, buried, finished, impatient
from tests.topics.staging import hurried
from tests.upgrades.conftest import Home
from tests.upgrades.scenes.topics import KEPT, NAMESPACE, overview


@pytest.fixture
def room() -> str:
    return "topics"


@pytest.fixture
async def broker(home: Home) -> AsyncIterator[Broker]:
    async with Broker(home.url, clock=home.clock) as broker:
        yield broker


def numbers(messages: Iterable[Message]) -> list[int]:
    return [message.payload["n"] for message in messages]


def in_order(messages: Iterable[Message]) -> bool:
    """Whether those of each key came in the order in which they were sent."""
    by_key: defaultdict[str | None, list[int]] = defaultdict(list)
    for message in messages:
        by_key[message.key].append(message.payload["n"])
    return all(found == sorted(found) for found in by_key.values())


async def test_everything_is_seen_as_it_was(home: Home, broker: Broker) -> None:
    assert "doomed" in await broker.admin.list_topics()
    found, known = await overview(broker), home.facts["overview"]
    assert found.keys() == known.keys()
    for topic in known:
        assert found[topic] == known[topic], topic
    assert (await broker.admin.describe_topic("orders")).retention == KEPT


@pytest.mark.parametrize("group", ["billing", "audit"])
async def test_a_group_goes_on_over_growth_in_the_order_of_keys(home: Home, broker: Broker, group: str) -> None:
    left = set(range(48)) - set(home.facts["grown"]["finished"][group])
    seen = Recorder()
    async with broker.subscribe("orders", group=group, handler=seen, options=impatient()):
        await seen.saw(len(left))
        await finished(broker, "orders", group)
        for n in range(48, 54):
            await broker.send("orders", {"n": n}, key=f"key-{n % 6}")
        await seen.saw(len(left) + 6)
    assert set(numbers(seen.messages)) == left | set(range(48, 54))
    assert in_order(seen.messages)
    first = min(seen.messages, key=lambda message: message.payload["n"])
    n = first.payload["n"]
    assert (first.key, first.headers["trace"]) == (f"key-{n % 6}", f"t{n}")
    assert abs(first.timestamp_ms - int(first.id.partition("-")[0])) < 60_000
    assert all(message.retry_count == 0 for message in seen.messages)


@pytest.mark.any_server
@pytest.mark.parametrize("by", ["a member", "an operator"])
async def test_a_growth_that_nobody_completed_is_completed(home: Home, broker: Broker, by: str) -> None:
    left = set(range(12)) - set(home.facts["growing"]["finished"]["g"])
    home.clock.advance(60.0)
    seen = Recorder()
    if by == "an operator":
        assert (await broker.admin.grow("growing", 4)).partitions == 4
    async with broker.subscribe("growing", group="g", handler=seen, options=impatient()) as subscription:
        await eventually(lambda: subscription.owned == {"growing": (0, 1, 2, 3)}, "the new partitions")
        for n in range(12, 28):
            await broker.send("growing", {"n": n}, key=f"key-{n % 4}")
        await seen.saw(len(left) + 16)
        await finished(broker, "growing", "g")
    assert set(numbers(seen.messages)) == left | set(range(12, 28))
    assert in_order(seen.messages)
    assert (await broker.admin.describe_topic("growing")).partitions == 4


async def test_what_a_worker_held_stays_its_own_until_its_lease_has_run_out(home: Home, broker: Broker) -> None:
    before = await broker.admin.describe_group("held", "g")
    left = set(range(12)) - set(home.facts["held"]["finished"]["g"])
    assert {part.owner for part in before.partitions} == {"old-worker"}
    seen = Recorder()
    async with broker.subscribe("held", group="g", handler=seen, options=impatient()) as subscription:
        assert subscription.owned == {"held": ()}
        home.clock.advance(16.0)
        await seen.saw(len(left))
        await finished(broker, "held", "g")
        after = await broker.admin.describe_group("held", "g")
    assert set(numbers(seen.messages)) == left
    assert in_order(seen.messages)
    for old, new in zip(before.partitions, after.partitions, strict=True):
        assert new.epoch > old.epoch


@pytest.mark.any_server
async def test_crashes_of_that_version_count(home: Home, broker: Broker) -> None:
    """What has killed a worker before is a dead letter sooner."""
    page = await broker.admin.pending("held", "g")
    crashed = {(entry.partition, str(entry.id)) for entry in page.entries if entry.crashes}
    assert crashed
    home.clock.advance(16.0)
    seen = Recorder()
    async with broker.subscribe("held", group="g", handler=seen, options=impatient(max_crashes=2)):
        letters = await buried(broker, "held", len(crashed))
        await finished(broker, "held", "g")
    assert {(letter.partition, letter.original_id) for letter in letters} == crashed
    assert {(letter.reason, letter.crashes) for letter in letters} == {("crash loop", 2)}
    assert not {(message.partition, str(message.id)) for message in seen.messages} & crashed


@pytest.mark.any_server
async def test_message_ids_are_known_for_as_long_as_they_were_to_be(home: Home, broker: Broker) -> None:
    ids = home.facts["once"]["ids"]
    for n, (partition, id) in enumerate(ids[:6]):
        again = await broker.send("once", {"n": n}, message_id=f"m-{n}")
        assert (again.partition, again) == (partition, id)
    delayed = await broker.send("once", {"n": 6}, message_id="m-6", key="key")
    assert [delayed.partition, delayed] == ids[6]
    home.clock.advance(601.0)
    seen = Recorder()
    async with broker.subscribe("once", group="g", handler=seen, options=impatient()):
        await seen.saw(7)
        assert await broker.send("once", {"n": 0}, message_id="m-0") != ids[0][1]
        await seen.saw(8)
    assert sorted(numbers(seen.messages)) == [0, 0, 1, 2, 3, 4, 5, 6]
    assert {message.message_id for message in seen.messages} == {f"m-{n}" for n in range(7)}


@pytest.mark.any_server
async def test_a_group_that_was_deleted_begins_anew(home: Home, broker: Broker) -> None:
    assert await broker.admin.list_groups("left") == ["stays"]
    gone, stays = Recorder(), Recorder()
    async with (
        broker.subscribe("left", group="gone", handler=gone, options=impatient()),
        broker.subscribe("left", group="stays", handler=stays, options=impatient()),
    ):
        await gone.saw(4)
        await finished(broker, "left", "gone", "stays")
    assert sorted(numbers(gone.messages)) == [0, 1, 2, 3]
    assert set(numbers(stays.messages)) == {0, 1, 2, 3} - set(home.facts["left"]["finished"]["stays"])


@pytest.mark.any_server
async def test_a_topic_whose_deletion_was_cut_off_is_deleted(home: Home, broker: Broker) -> None:
    await hurried(home.clock, broker.admin.delete_topic("doomed"))
    assert "doomed" not in await broker.admin.list_topics()
    await broker.create_topic("doomed", partitions=2)
    seen = Recorder()
    async with broker.subscribe("doomed", group="g", handler=seen, options=impatient()):
        await broker.send("doomed", {"n": 0})
        await seen.saw(1)
        await finished(broker, "doomed", "g")
    assert numbers(seen.messages) == [0]


@pytest.mark.any_server
async def test_plain_streams_are_consumed_on(home: Home, broker: Broker) -> None:
    topic, seen, plain = broker.legacy("app:legacy"), Recorder(), Recorder()
    async with (
        broker.subscribe(topic, group="g", handler=seen, options=impatient()),
        broker.subscribe("plain", group="g", handler=plain, options=impatient()),
    ):
        await seen.saw(1)
        home.clock.advance(61.0)
        await seen.saw(2)
        assert [(message.payload["n"], message.retry_count) for message in seen.messages] == [(6, 0), (1, 1)]
        assert await broker.admin.replay(topic) == 1
        await seen.saw(3)
        await finished(broker, topic, "g")
        await finished(broker, "plain", "g")
    assert numbers(seen.messages) == [6, 1, 2]
    assert set(numbers(plain.messages)) == set(range(6)) - set(home.facts["legacy"]["finished"]["plain"])


@pytest.mark.any_server
async def test_a_namespace_is_a_place_of_its_own(home: Home) -> None:
    left = set(range(100, 106)) - set(home.facts["shop"]["finished"]["billing"])
    seen = Recorder()
    async with Broker(home.url, namespace=NAMESPACE, clock=home.clock) as broker:
        assert await broker.admin.list_topics() == ["orders"]
        async with broker.subscribe("orders", group="billing", handler=seen, options=impatient()):
            await seen.saw(len(left))
            await finished(broker, "orders", "billing")
    assert set(numbers(seen.messages)) == left
    assert in_order(seen.messages)


async def test_what_retention_left_is_there_and_it_goes_on(home: Home, broker: Broker) -> None:
    """Nothing that a group has not finished is removed, and what was dropped stays counted."""
    seen = {topic: Recorder() for topic in ("trimmed", "acked", "dropped", "full")}
    with pytest.raises(TopicFullError):
        await broker.send("full", {"n": 2})
    await broker.send("dropped", {"n": 8})
    for topic, handler in seen.items():
        async with broker.subscribe(topic, group="g", handler=handler, options=impatient()):
            await finished(broker, topic, "g")
    found = {topic: numbers(handler.messages) for topic, handler in seen.items()}
    assert found == {"trimmed": [9, 10, 11], "acked": [4, 5], "dropped": [6, 7, 8], "full": [0, 1]}
    dropped = (await broker.admin.describe_topic("dropped")).by_partition[0].dropped
    assert dropped == home.facts["kept"]["dropped"][1] + 1
    await broker.send("full", {"n": 2})
    await broker.admin.trim("acked")
    assert (await broker.admin.describe_topic("acked")).length == 0


@pytest.mark.any_server
async def test_keys_go_where_they_went(home: Home, broker: Broker) -> None:
    for partitioner, routes in home.facts["routes"].items():
        found: dict[str, Any] = {}
        for key in routes:
            found[key] = (await broker.send(f"by-{partitioner}", {}, key=key)).partition
        assert found == routes


@pytest.mark.any_server
async def test_payloads_that_are_bytes_stay_bytes(home: Home) -> None:
    async with (
        Broker(home.url, codec=BytesCodec(), clock=home.clock) as broker,
        broker.consume("blobs", group="g", options=impatient()) as messages,
    ):
        message = await messages.next(10)
        assert message is not None
        assert (message.key, message.payload) == ("blob", bytes(range(256)))
