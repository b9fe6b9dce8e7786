"""Groups and the partitions that a topic gets: whatever is written there reaches every group that was there before."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from conquiet.errors import QueueError, TopicFullError
from conquiet.kit.clock import ManualClock
from conquiet.kit.policy import Backoff
from conquiet.message import Message, Outgoing
from conquiet.topics import Broker, Retention
from conquiet.topics.operate.admin import Admin
from conquiet.topics.operate.removal import delete_group, reset_group
from conquiet.topics.server.external_groups import Position, adopt_group
from conquiet.topics.server.group import found_group
from conquiet.topics.server.growth import finish_growth, grow
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.retention import trim
from conquiet.topics.server.topics import Registry, Topic
from conquiet.wire.keys import Keys
from tests.rigs.asking import ask
from tests.rigs.waiting import eventually
from tests.topics.adopting import GROUP, adopt, places, publish
from tests.topics.consuming import Recorder, finished, impatient
from tests.topics.staging import Stage, hurried
from tests.topics.stepping import Stepped

pytestmark = pytest.mark.cluster_too

_HOUR = Backoff(base=3600.0, cap=3600.0, kind="fixed")
OFFLINE = "offline"
"""A group that nobody serves while the topic grows."""


@pytest.fixture
async def broker(url: str, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(url, namespace=keys.namespace, clock=clock) as broker:
        yield broker


async def _found(stage: Stage, name: str = "orders") -> Topic:
    found = await stage.registry.fetch_or_none(name)
    assert found is not None
    return found


async def _subscribed(broker: Broker, group: str, topic: str = "orders", **options: Any) -> None:
    """A group that was served once and is not any more."""
    async with broker.subscribe(topic, group=group, handler=Recorder(), options=impatient(**options)):
        pass


async def _planned(stage: Stage, clock: ManualClock, topic: Topic, partitions: int = 4) -> Topic:
    """A growth that has taken effect, and that nobody has completed."""
    work = Stepped(stage.instance, lambda instance, registry: grow(instance, registry, topic.name, partitions))
    while (found := await _found(stage, topic.name)).next_count is None:
        assert await work.step()
    await work.die()
    clock.advance(2.5)
    return found


async def _grow(stage: Stage, clock: ManualClock, topic: Topic) -> Topic:
    """From 2 to 4 partitions, at once."""
    await finish_growth(stage.instance, stage.registry, await _planned(stage, clock, topic))
    return await _found(stage, topic.name)


def _finishing(stage: Stage, planned: Topic) -> Stepped:
    return Stepped(stage.instance, lambda instance, registry: finish_growth(instance, registry, planned))


# --- nothing is lost --------------------------------------------------------------------------------------


async def test_a_group_that_is_offline_while_the_topic_grows_misses_nothing(broker: Broker, clock: ManualClock) -> None:
    await broker.create_topic("orders", partitions=1, retention=Retention(delete_acked=True, trim_interval=0.05))
    await _subscribed(broker, OFFLINE)
    await hurried(clock, broker.admin.grow("orders", 3))
    async with broker.subscribe("orders", group="live", handler=(seen := Recorder()), options=impatient()):
        await broker.send_batch("orders", [Outgoing(number, partition=number % 3) for number in range(12)])
        await seen.saw(12)
        await finished(broker, "orders", "live")
        clock.advance(1)
        await broker.admin.trim("orders")
    assert (await broker.admin.describe_group("orders", OFFLINE)).lag == 12
    async with broker.subscribe("orders", group=OFFLINE, handler=(seen := Recorder()), options=impatient()):
        await seen.saw(12)


async def test_a_group_of_a_topic_that_was_wider_in_a_former_life_misses_nothing(
    broker: Broker, stage: Stage, clock: ManualClock
) -> None:
    """What is left of a deleted topic tells of groups that were deleted with it."""
    await broker.create_topic("orders", partitions=4)
    await _subscribed(broker, OFFLINE)
    await hurried(clock, broker.admin.delete_topic("orders"))
    clock.advance(2)
    await broker.create_topic("orders", partitions=2, retention=Retention(delete_acked=True))
    await _subscribed(broker, OFFLINE)
    await hurried(clock, broker.admin.grow("orders", 4))
    async with broker.subscribe("orders", group="live", handler=(seen := Recorder()), options=impatient()):
        await broker.send_batch("orders", [Outgoing(number, partition=number) for number in range(4)])
        await seen.saw(4)
        await finished(broker, "orders", "live")
    await broker.admin.trim("orders")
    async with broker.subscribe("orders", group=OFFLINE, handler=(seen := Recorder()), options=impatient()):
        await seen.saw(4)


async def test_a_group_that_an_old_message_holds_back_misses_nothing(broker: Broker, clock: ManualClock) -> None:
    """It may not read the new partitions before the message that waits for its retry is done."""
    await broker.create_topic("orders", partitions=1, retention=Retention(max_len=5))
    fails = True

    async def handle(message: Message) -> None:
        if message.payload == "first" and fails:
            raise ValueError("later")

    seen = Recorder(handle)
    options = impatient(backoff=_HOUR, max_retries=1, order="block_key")
    async with broker.subscribe("orders", group="billing", handler=seen, options=options):
        await broker.send("orders", "first")
        await eventually(lambda: _parked(broker), "the first is parked")
        await hurried(clock, broker.admin.grow("orders", 2))
        await broker.send_batch("orders", [Outgoing(number, partition=1) for number in range(50)])
        assert await broker.admin.trim("orders") == 0
        info = await broker.admin.describe_group("orders", "billing")
        assert (info.lag, info.partitions[1].owner) == (50, None)
        fails = False
        clock.advance(3700)
        await eventually(lambda: len(seen.messages) == 52, "all the others")
        await finished(broker, "orders", "billing")
    assert sorted(payload for payload in seen.payloads if payload != "first") == list(range(50))


async def _parked(broker: Broker) -> bool:
    return (await broker.admin.describe_group("orders", "billing")).partitions[0].retry_depth == 1


@pytest.mark.any_server
@pytest.mark.one_node
async def test_a_full_new_partition_refuses_what_a_group_has_not_read(broker: Broker, clock: ManualClock) -> None:
    await broker.create_topic("orders", partitions=1, retention=Retention(max_len=5, on_full="reject"))
    await _subscribed(broker, OFFLINE)
    await hurried(clock, broker.admin.grow("orders", 2))
    await broker.send_batch("orders", [Outgoing(number, partition=1) for number in range(5)])
    with pytest.raises(TopicFullError):
        await broker.send("orders", "one more", partition=1)


@pytest.mark.any_server
@pytest.mark.one_node
async def test_what_is_dropped_from_a_new_partition_is_counted(broker: Broker, clock: ManualClock) -> None:
    await broker.create_topic("orders", partitions=1, retention=Retention(max_len=5, on_full="drop"))
    await _subscribed(broker, OFFLINE)
    await hurried(clock, broker.admin.grow("orders", 2))
    await broker.send_batch("orders", [Outgoing(number, partition=1) for number in range(8)])
    assert (await broker.admin.describe_topic("orders")).by_partition[1].dropped == 3


# --- which groups -----------------------------------------------------------------------------------------


async def test_every_group_is_at_the_beginning_of_every_new_partition(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic(partitions=2)
    for partition in range(2):
        ids = await stage.add(topic, 3, partition)
        await stage.acquire(topic, "billing", partition)
        await stage.create_group(topic, "audit", "$", partition)
        await stage.create_group(topic, "foreign", ids[1], partition)
    for group in ("billing", "audit"):
        await stage.join(topic, group)
    await adopt(stage, topic)
    await hurried(clock, grow(stage.instance, stage.registry, "orders", 4))
    await hurried(clock, grow(stage.instance, stage.registry, "orders", 5))
    grown = await _found(stage)
    for group in ("billing", "audit", "foreign", GROUP):
        assert (await places(stage, grown, group))[2:] == ["0-0"] * 3


async def test_another_programs_group_that_reads_one_partition_is_left_alone(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic(partitions=3)
    for partition in (0, 1):
        await stage.add(topic, 1, partition)
    await stage.create_group(topic, "one", partition=0)
    await stage.create_group(topic, "all", partition=0)  # but for the one that holds nothing
    await stage.create_group(topic, "all", partition=1)
    await hurried(clock, grow(stage.instance, stage.registry, "orders", 4))
    grown = await _found(stage)
    assert (await places(stage, grown, "one"))[3] is None
    assert (await places(stage, grown, "all"))[3] == "0-0"


@pytest.mark.any_server
@pytest.mark.one_node
async def test_a_name_that_is_no_text_stays_the_same(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic()
    stream = stage.stream(topic)
    await stage.call(stream, "XGROUP", "CREATE", stream, b"\xff\xfe", "0", "MKSTREAM")
    await hurried(clock, grow(stage.instance, stage.registry, "orders", 2))
    new = stage.stream(topic, 1)
    assert [row[1] for row in await stage.call(new, "XINFO", "GROUPS", new)] == [b"\xff\xfe"]


async def test_a_name_that_was_noted_and_never_came_to_be_is_no_group(stage: Stage, clock: ManualClock) -> None:
    """Its consumer died before it was anywhere: where a new one begins is not decided yet."""
    topic = await stage.topic()
    await stage.join(topic, "billing")
    await hurried(clock, grow(stage.instance, stage.registry, "orders", 2))
    assert await places(stage, await _found(stage), "billing") == [None, None]


@pytest.mark.any_server
@pytest.mark.one_node
async def test_a_new_partition_that_is_no_stream_does_not_stop_the_others(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic()
    await stage.acquire(topic, "billing")
    await stage.join(topic, "billing")
    bad = stage.stream(topic, 1)
    await stage.call(bad, "SET", bad, "foreign")
    await hurried(clock, grow(stage.instance, stage.registry, "orders", 3))
    assert (await _found(stage)).partitions == 3
    assert await stage.pending(topic, "billing", 2) == []


@pytest.mark.any_server
@pytest.mark.one_node
async def test_a_group_that_cannot_be_put_on_a_partition_does_not_begin(
    broker: Broker, url: str, keys: Keys, stage: Stage
) -> None:
    """It would miss what is trimmed there, and nobody would know."""
    topic = await stage.topic(partitions=2)
    user, stream = f"user-{keys.namespace}", stage.stream(topic, 0)
    allowed = [f"~{keys.namespace}:streaming:mq:{what}:*" for what in ("topic", "topics", "members", "lease")]
    await ask(url, "ACL", "SETUSER", user, "on", ">secret", "+@all", *allowed, f"~{stream}")
    try:
        limited = url.replace("redis://", f"redis://{user}:secret@")
        async with Broker(limited, namespace=keys.namespace) as other:
            with pytest.raises(QueueError, match=f"{stage.stream(topic, 1)}.*(permission|ACL)"):
                async with other.subscribe("orders", group="late", handler=Recorder(), options=impatient()):
                    pass
        # It is new still, and begins where the next one wants it to.
        assert await places(stage, topic, "late") == [None, None]
    finally:
        await ask(url, "ACL", "DELUSER", user)


# --- whatever comes in between ----------------------------------------------------------------------------

Try = Callable[[Topic, int], Awaitable[bool]]
"""Something that is tried with a topic of two partitions, with an interruption after so many calls to the server;
whether that came after the last of them."""

MAKING: dict[str, Callable[[Stage, Broker, Topic], Awaitable[Any]]] = {
    "earliest": lambda stage, broker, topic: _subscribed(broker, "late", topic.name),
    "latest": lambda stage, broker, topic: _subscribed(broker, "late", topic.name, start="latest"),
    "spark": lambda stage, broker, topic: adopt(stage, topic, group="late"),
}


async def _at_every_moment(stage: Stage, attempt: Try) -> None:
    """Try it with an interruption at each moment that there is."""
    at = 1
    while not await attempt(await stage.topic(f"orders-{at}", 2), at):
        at += 1
    assert at > 4


async def _steps(work: Stepped, count: int) -> bool:
    """Let it make so many calls; whether it needs fewer."""
    for _ in range(count):
        if not await work.step():
            return True
    return False


@pytest.mark.slow
@pytest.mark.any_server
@pytest.mark.one_node
@pytest.mark.parametrize("what", MAKING)
async def test_a_group_that_is_made_at_any_moment_of_a_growth_is_everywhere(
    stage: Stage, broker: Broker, clock: ManualClock, what: str
) -> None:
    async def attempt(topic: Topic, at: int) -> bool:
        work = _finishing(stage, await _planned(stage, clock, topic))
        is_over = await _steps(work, at)
        await MAKING[what](stage, broker, topic)
        await work.finish()
        grown = await _found(stage, topic.name)
        assert grown.partitions == 4
        assert await places(stage, grown, "late") == ["0-0"] * 4, at
        return is_over

    await _at_every_moment(stage, attempt)


@pytest.mark.any_server
@pytest.mark.one_node
@pytest.mark.parametrize("start", ["0-0", "$", "spark"])
async def test_a_group_is_everywhere_at_whatever_moment_of_its_making_the_topic_grows(
    stage: Stage, clock: ManualClock, start: str
) -> None:
    """What is written to a new partition before the group is there has come after it was asked for."""

    async def attempt(topic: Topic, at: int) -> bool:
        spark = start == "spark"
        work = Stepped(
            stage.instance, lambda instance, registry: _make(instance, registry, topic, spark=spark, start=start)
        )
        is_over = await _steps(work, at)
        grown = await _grow(stage, clock, topic)
        await stage.add(grown, 1, 3)
        await work.finish()
        assert await places(stage, grown) == ["0-0"] * 4, at
        return is_over

    await _at_every_moment(stage, attempt)


async def _make(instance: Instance, registry: Registry, topic: Topic, *, spark: bool, start: str = "0-0") -> None:
    if spark:
        await adopt_group(instance, registry, topic, GROUP, {})
    else:
        await found_group(instance, registry, topic, GROUP, start)


@pytest.mark.any_server
@pytest.mark.one_node
@pytest.mark.parametrize("spark", [False, True])
async def test_a_group_that_is_deleted_at_any_moment_of_a_growth_stays_away(
    stage: Stage, clock: ManualClock, spark: bool
) -> None:
    async def attempt(topic: Topic, at: int) -> bool:
        await _make(stage.instance, stage.registry, topic, spark=spark)
        work = _finishing(stage, await _planned(stage, clock, topic))
        is_over = await _steps(work, at)
        await delete_group(stage.instance, stage.registry, topic, GROUP)
        await work.finish()
        assert await places(stage, await _found(stage, topic.name)) == [None] * 4, at
        return is_over

    await _at_every_moment(stage, attempt)


@pytest.mark.any_server
@pytest.mark.one_node
@pytest.mark.parametrize("spark", [False, True])
async def test_a_group_stays_away_at_whatever_moment_of_its_deletion_the_topic_grows(
    stage: Stage, clock: ManualClock, spark: bool
) -> None:
    async def attempt(topic: Topic, at: int) -> bool:
        await _make(stage.instance, stage.registry, topic, spark=spark)
        found = await _found(stage, topic.name)
        work = Stepped(stage.instance, lambda instance, registry: delete_group(instance, registry, found, GROUP))
        is_over = await _steps(work, at)
        grown = await _grow(stage, clock, topic)
        await work.finish()
        assert await places(stage, grown) == [None] * 4, at
        return is_over

    await _at_every_moment(stage, attempt)


@pytest.mark.any_server
@pytest.mark.one_node
@pytest.mark.parametrize("to", ["earliest", "latest"])
async def test_a_reset_at_whatever_moment_of_a_growth_reaches_every_partition(
    stage: Stage, clock: ManualClock, to: Any
) -> None:
    """What was written before a reset to the end is behind it, also in a partition that was added during it."""

    async def attempt(topic: Topic, at: int) -> bool:
        await _make(stage.instance, stage.registry, topic, spark=False)
        work = Stepped(stage.instance, lambda instance, registry: reset_group(instance, registry, topic, GROUP, to))
        is_over = await _steps(work, at)
        grown = await _grow(stage, clock, topic)
        last = (await stage.add(grown, 2, 3))[-1]
        await stage.read(grown, GROUP, 1, 3)
        if await work.finish() > 1:  # else it only had to tell the members
            assert (await places(stage, grown))[3] == {"earliest": "0-0", "latest": last}[to], at
            assert await stage.pending(grown, GROUP, 3) == []
        return is_over

    await _at_every_moment(stage, attempt)


@pytest.mark.any_server
@pytest.mark.one_node
async def test_a_growth_that_dies_at_whatever_moment_is_completed_with_all_groups(
    stage: Stage, broker: Broker, clock: ManualClock
) -> None:
    async def attempt(topic: Topic, at: int) -> bool:
        await found_group(stage.instance, stage.registry, topic, OFFLINE, "0-0")
        await adopt(stage, topic)
        work = _finishing(stage, await _planned(stage, clock, topic))
        is_over = await _steps(work, at)
        await work.die()
        # A producer does, whose send has waited.
        clock.advance(5)
        await broker.send(topic.name, at, partition=0)
        grown = await _found(stage, topic.name)
        assert (grown.partitions, grown.next_count) == (4, None)
        for group in (OFFLINE, GROUP):
            assert await places(stage, grown, group) == ["0-0"] * 4, at
        return is_over

    await _at_every_moment(stage, attempt)


@pytest.mark.any_server
@pytest.mark.one_node
async def test_a_topic_that_was_deleted_during_its_growth_gets_no_streams(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic(partitions=2)
    await _make(stage.instance, stage.registry, topic, spark=False)
    planned = await _planned(stage, clock, topic)
    await hurried(clock, Admin(stage.instance, stage.registry).delete_topic("orders", force=True))
    await finish_growth(stage.instance, stage.registry, planned)
    made = [stage.stream(topic, partition) for partition in range(4)]
    assert [await stage.call(key, "EXISTS", key) for key in made] == [0] * 4


# --- queries ----------------------------------------------------------------------------------------------


async def test_a_query_that_was_away_during_growth_misses_nothing(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic(delete_acked=True)
    await adopt(stage, topic)
    await hurried(clock, grow(stage.instance, stage.registry, "orders", 2))
    grown = await _found(stage)
    ids = await stage.add(grown, 10, 1)
    await stage.create_group(grown, "live", partition=1)
    await stage.ack(grown, "live", *await stage.read(grown, "live", 10, 1), partition=1)
    assert (await trim(stage.instance, grown, 1)).removed == 0
    await publish(stage, grown, {1: Position(ids[4], 5)})
    assert (await trim(stage.instance, grown, 1)).removed == 5
