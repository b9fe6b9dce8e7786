"""What makes a topic in Redis: its meta, the sets that list it, and what is known of it here."""

from __future__ import annotations

import asyncio
import json
import timeit
from typing import Any

import pytest

from conquiet import (
    Broker,
    ConfigError,
    Outgoing,
    QueueError,
    Retention,
    SubscribeOptions,
    UnknownTopicError,
)
from conquiet.kit.clock import Clock, ManualClock
from conquiet.kit.policy import Backoff, RetryPolicy
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import FRESH, Growth, LegacyTopic, Registry
from conquiet.wire.keys import Keys
from tests.conftest import Rung
from tests.rigs.asking import ask, lasting_keys
from tests.rigs.servers import on_a_port
from tests.rigs.waiting import eventually

pytestmark = pytest.mark.cluster_too

ORDERS = "orders"
PLAIN = Retention()


async def meta(url: str, keys: Keys) -> dict[str, str]:
    found: dict[str, str] = await ask(url, "HGETALL", keys.meta(ORDERS))
    return found


async def server_ms(url: str) -> int:
    seconds, micros = await ask(url, "TIME")
    return int(seconds) * 1000 + int(micros) // 1000


# --- what is written ----------------------------------------------------------------------------------------


async def test_the_meta_says_exactly_this(registry: Registry, url: str, keys: Keys) -> None:
    before = await server_ms(url)
    await registry.create(ORDERS, 3, Retention(max_len=10, on_full="drop"), "consistent")
    found = await meta(url, keys)
    assert set(found) == {"partitionCount", "createdAt", "updatedAt", "version", "partitioner", "policies"}
    assert (found["partitionCount"], found["version"], found["partitioner"]) == ("3", "1", "consistent")
    assert before <= int(found["createdAt"]) == int(found["updatedAt"]) <= await server_ms(url)
    assert json.loads(found["policies"]) == {
        "retention": {
            "max_len": 10,
            "max_age": None,
            "delete_acked": False,
            "on_full": "drop",
            "group_expiry": None,
            "trim_interval": 10.0,
            "dead_letter_max_len": None,
            "dead_letter_max_age": None,
        }
    }


async def test_a_topic_is_listed_with_its_partitions(registry: Registry, url: str, keys: Keys) -> None:
    await registry.create(ORDERS, 3, PLAIN)
    assert set(await ask(url, "SMEMBERS", keys.registry)) == {ORDERS}
    listed = set(await ask(url, "SMEMBERS", keys.partitions(ORDERS)))
    assert listed == {keys.partition(ORDERS, index) for index in range(3)}


async def test_partitions_come_into_being_with_their_first_message(registry: Registry, url: str, keys: Keys) -> None:
    await registry.create(ORDERS, 3, PLAIN)
    assert not any([await ask(url, "EXISTS", keys.partition(ORDERS, index)) for index in range(3)])


async def test_times_are_the_servers_moved_by_the_clock(
    registry: Registry, clock: ManualClock, url: str, keys: Keys
) -> None:
    clock.advance(3600)
    await registry.create(ORDERS, 1, PLAIN)
    assert int((await meta(url, keys))["createdAt"]) >= await server_ms(url) + 3_599_000


async def test_a_crash_between_meta_and_lists_is_made_good_by_whoever_finds_it(
    registry: Registry, url: str, keys: Keys
) -> None:
    await ask(url, "HSET", keys.meta(ORDERS), "partitionCount", 2)
    await registry.fresh(ORDERS)
    assert await registry.names() == [ORDERS]
    assert len(await ask(url, "SMEMBERS", keys.partitions(ORDERS))) == 2


async def test_looking_up_has_no_side_effect(registry: Registry, url: str, keys: Keys) -> None:
    await ask(url, "HSET", keys.meta(ORDERS), "partitionCount", 2)
    assert (await registry.fetch_or_none(ORDERS)) is not None
    assert not any([await ask(url, "EXISTS", key) for key in (keys.registry, keys.partitions(ORDERS))])


# --- what is read -------------------------------------------------------------------------------------------


async def test_a_topic_is_read_as_it_was_made(registry: Registry, url: str, keys: Keys) -> None:
    kept = Retention(max_len=5, max_age=1.5, group_expiry=60, delete_acked=True)
    made = await registry.create(ORDERS, 3, kept, "consistent")
    found = await registry.fetch(ORDERS)
    assert found == made
    assert (found.partitions, found.version, found.partitioner, found.retention) == (3, 1, "consistent", kept)
    assert found.streams(keys) == [keys.partition(ORDERS, index) for index in range(3)]


async def test_the_spec_s_two_fields_make_a_topic(registry: Registry, url: str, keys: Keys) -> None:
    """Another implementation writes no more than these."""
    await ask(url, "HSET", keys.meta(ORDERS), "partitionCount", 4, "createdAt", 1_700_000_000_000)
    found = await registry.fresh(ORDERS)
    assert (found.partitions, found.created_ms, found.partitioner) == (4, 1_700_000_000_000, "murmur2")
    assert found.retention == PLAIN


async def test_policies_of_a_newer_version_are_read_as_far_as_they_are_known(
    registry: Registry, url: str, keys: Keys
) -> None:
    policies = json.dumps({"retention": {"max_len": 5, "colour": "red"}, "quota": {"bytes": 1}})
    await ask(url, "HSET", keys.meta(ORDERS), "partitionCount", 1, "policies", policies, "colour", "red")
    assert (await registry.fresh(ORDERS)).retention == Retention(max_len=5)


async def test_growth_is_read_with_where_the_old_partitions_ended(registry: Registry, url: str, keys: Keys) -> None:
    steps = json.dumps([{"before": 1, "after": 3, "ends": ["5-1"]}])
    await ask(url, "HSET", keys.meta(ORDERS), "partitionCount", 3, "version", 2, "growth", steps)
    found = await registry.fresh(ORDERS)
    assert (found.version, found.growth) == (2, (Growth(1, 3, ("5-1",)),))


async def test_growing_raises_the_version(url: str, keys: Keys) -> None:
    clock = ManualClock()
    async with Broker(url, namespace=keys.namespace, clock=clock) as broker:
        await broker.create_topic(ORDERS)
        created = (await meta(url, keys))["createdAt"]
        growing = asyncio.create_task(broker.admin.grow(ORDERS, partitions=2))
        await eventually(lambda: _is_planned(url, keys), "the growth is announced")
        clock.advance(5)
        await growing
        found = await meta(url, keys)
    assert (found["version"], found["partitionCount"], found["createdAt"]) == ("2", "2", created)
    assert int(found["updatedAt"]) > int(created)
    assert len(await ask(url, "SMEMBERS", keys.partitions(ORDERS))) == 2


async def _is_planned(url: str, keys: Keys) -> bool:
    return "nextCount" in await meta(url, keys)


async def test_what_is_known_is_kept_for_a_moment(registry: Registry, clock: ManualClock, url: str, keys: Keys) -> None:
    await registry.create(ORDERS, 1, PLAIN)
    assert registry.cached(ORDERS) is None
    known = await registry.fresh(ORDERS)
    assert registry.cached(ORDERS) is known
    await ask(url, "HSET", keys.meta(ORDERS), "partitionCount", 2)
    assert await registry.fresh(ORDERS) is known
    clock.advance(FRESH)
    assert registry.cached(ORDERS) is None
    assert (await registry.fresh(ORDERS)).partitions == 2


async def test_what_was_changed_here_is_asked_for_at_once(registry: Registry, url: str, keys: Keys) -> None:
    await registry.create(ORDERS, 1, PLAIN)
    await registry.fresh(ORDERS)
    await ask(url, "HSET", keys.meta(ORDERS), "partitionCount", 2)
    registry.forget(ORDERS)
    assert (await registry.fresh(ORDERS)).partitions == 2


async def test_a_legacy_stream_needs_no_question(registry: Registry) -> None:
    found = await registry.fresh(LegacyTopic("app:{orders}"))
    assert (found.legacy, found.partitions, found.stream(Keys("ns"), 0)) == (True, 1, "app:{orders}")


# --- what is broken -----------------------------------------------------------------------------------------


@pytest.mark.any_server
@pytest.mark.parametrize(
    "broken",
    [
        {"createdAt": "1"},
        {"partitionCount": "many"},
        {"partitionCount": "0"},
        {"partitionCount": "-3"},
        {"partitionCount": ""},
        {"partitionCount": "1", "policies": "{"},
        {"partitionCount": "1", "policies": "[]"},
        {"partitionCount": "1", "policies": "5"},
        {"partitionCount": "1", "policies": '{"retention":[]}'},
        {"partitionCount": "1", "policies": '{"retention":{"max_len":-1}}'},
        {"partitionCount": "1", "createdAt": "yesterday"},
        {"partitionCount": "1", "growth": "5"},
        {"partitionCount": "1", "growth": "[5]"},
        {"partitionCount": "1", "growth": '[{"before":1}]'},
        {"partitionCount": "2", "nextCount": "x", "effectiveAt": "1"},
    ],
    ids=lambda broken: json.dumps(broken),
)
async def test_a_broken_meta_is_a_queue_error_that_names_the_topic(
    url: str, keys: Keys, broken: dict[str, Any]
) -> None:
    await ask(url, "HSET", keys.meta(ORDERS), *(word for pair in broken.items() for word in pair))
    async with Broker(url, namespace=keys.namespace) as broker:
        with pytest.raises(QueueError, match="the meta of topic 'orders' cannot be read"):
            await broker.send(ORDERS, 1)
        with pytest.raises(QueueError):
            await broker.admin.describe_topic(ORDERS)
        assert not any([await ask(url, "EXISTS", key) for key in (keys.partition(ORDERS, 0), keys.registry)])


async def test_something_else_at_the_key_of_the_meta(url: str, keys: Keys) -> None:
    await ask(url, "SET", keys.meta(ORDERS), "hello")
    async with Broker(url, namespace=keys.namespace) as broker:
        with pytest.raises(QueueError, match=keys.meta(ORDERS)):
            await broker.send(ORDERS, 1)
        with pytest.raises(QueueError, match=keys.meta(ORDERS)):
            await broker.create_topic(ORDERS)
        assert await ask(url, "GET", keys.meta(ORDERS)) == "hello"


async def test_something_else_at_the_key_of_the_registry(url: str, keys: Keys) -> None:
    broker = Broker(url, namespace=keys.namespace)
    await ask(url, "SET", keys.registry, "hello")
    with pytest.raises(QueueError, match=keys.registry):
        await broker.open()
    with pytest.raises(QueueError, match=keys.registry):
        await broker.create_topic(ORDERS)
    await ask(url, "DEL", keys.registry)
    await broker.create_topic(ORDERS)
    assert await broker.admin.list_topics() == [ORDERS]
    await broker.aclose()


async def test_something_else_at_the_key_of_a_partition(url: str, keys: Keys) -> None:
    async with Broker(url, namespace=keys.namespace) as broker:
        await broker.create_topic(ORDERS, partitions=2)
        await ask(url, "SET", keys.partition(ORDERS, 0), "hello")
        with pytest.raises(QueueError, match=keys.partition(ORDERS, 0)):
            await broker.send(ORDERS, 1, partition=0)
        with pytest.raises(QueueError, match=keys.partition(ORDERS, 0)):
            await broker.send(ORDERS, 1, partition=0, message_id="m")
        with pytest.raises(QueueError) as caught:
            await broker.send_batch(ORDERS, [Outgoing(1, partition=0), Outgoing(2, partition=1)])
        assert [id is not None for id in caught.value.entry_ids] == [False, True]
        assert await ask(url, "EXISTS", keys.dedup(keys.partition(ORDERS, 0))) == 0


async def test_something_else_under_the_bare_name_is_left_alone(url: str, keys: Keys) -> None:
    name = "x"
    await ask(url, "SET", f"{keys.namespace}:{name}", "hello")
    async with Broker(url, namespace=keys.namespace, clock=_Hurried()) as broker:
        with pytest.raises(UnknownTopicError):
            await broker.send(name, 1)
        await broker.create_topic(name)
        await broker.send(name, 1)
        await broker.admin.delete_topic(name)
    assert await ask(url, "GET", f"{keys.namespace}:{name}") == "hello"


async def test_a_partitioner_of_another_version_cannot_be_written_by_but_looked_at(url: str, keys: Keys) -> None:
    await ask(url, "HSET", keys.meta(ORDERS), "partitionCount", 2, "partitioner", "of-another-version")
    async with Broker(url, namespace=keys.namespace) as broker:
        with pytest.raises(QueueError, match="of-another-version"):
            await broker.send(ORDERS, 1, key="a")
        assert (await broker.admin.describe_topic(ORDERS)).partitioner == "of-another-version"
    async with Broker(url, namespace=keys.namespace, partitioner=lambda key, count: 0) as broker:
        assert (await broker.send(ORDERS, 1, key="a")).partition == 0


@pytest.mark.any_server
async def test_a_closed_site_knows_nothing(instance: Instance) -> None:
    await instance.link.aclose()
    with pytest.raises(QueueError, match="closed"):
        await Registry(instance).fresh(ORDERS)


@pytest.mark.any_server
@pytest.mark.parametrize("name", ["", "a:b", "{a}", None, 5])
async def test_names_are_checked_before_anything_is_asked(registry: Registry, name: Any) -> None:
    with pytest.raises(ConfigError, match=r"^topic must be"):
        await registry.fresh(name)
    with pytest.raises(ConfigError, match=r"^topic must be"):
        await registry.create(name, 1, PLAIN)


# --- how the server is asked ---------------------------------------------------------------------------------


async def test_the_keyspace_is_never_searched(rung: Rung) -> None:
    """A topic's whole life: everything is found by name."""
    clock = ManualClock()
    options = SubscribeOptions(retry=RetryPolicy(max_retries=1, backoff=Backoff(0, 0, "fixed")))
    seen: list[int] = []

    async def fail(message: Any) -> None:
        seen.append(message.retry_count)
        raise RuntimeError("no")

    async with on_a_port(rung.binary) as server, Broker(server.url, clock=clock) as broker:
        await broker.create_topic(ORDERS, partitions=2, retention=Retention(max_len=100))
        await broker.send_batch(ORDERS, [Outgoing(n, message_id=str(n)) for n in range(4)])
        await broker.send(ORDERS, 5, delay=0.001)
        async with broker.subscribe(ORDERS, group="g", handler=fail, options=options):
            await eventually(lambda: len(seen) == 10, "each is tried twice")
            await eventually(lambda: _dead(broker, 5), "the dead letters")
        admin = broker.admin
        await admin.list_topics()
        await admin.list_groups(ORDERS)
        await admin.describe_group(ORDERS, "g")
        await admin.pending(ORDERS, "g")
        assert await admin.replay(ORDERS) == 5
        await admin.trim(ORDERS, max_len=1)
        await admin.reset_group(ORDERS, "g", "latest")
        deleting = asyncio.create_task(_delete(broker))
        await eventually(lambda: _advanced(clock, deleting), "the topic is deleted")
        stats = await ask(server.url, "INFO", "commandstats")
        assert not {"cmdstat_keys", "cmdstat_scan"} & set(stats)
        assert stats["cmdstat_xadd"]["calls"] > 0
        assert await lasting_keys(server.url, "*") == []


async def _delete(broker: Broker) -> None:
    await broker.admin.delete_group(ORDERS, "g")
    await broker.admin.delete_topic(ORDERS)


class _Hurried(Clock):
    """Waits for nothing."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(0)


def _advanced(clock: ManualClock, task: asyncio.Task[None]) -> bool:
    clock.advance(1)
    return task.done()


async def _dead(broker: Broker, count: int) -> bool:
    return len(await broker.admin.dead_letters(ORDERS)) == count


@pytest.mark.any_server
@pytest.mark.one_node
async def test_what_one_topic_costs_does_not_grow_with_the_others(registry: Registry) -> None:
    """Each topic that is made or changed is forgotten first; that was once a walk through all of them."""
    await registry.create(ORDERS, 1, PLAIN)

    def seconds() -> float:
        return min(timeit.repeat(lambda: registry.forget(ORDERS), number=1, repeat=50))

    few = max(seconds(), 1e-6)
    for number in range(200_000):
        registry._registered[f"topic-{number}"] = 1
    assert seconds() < 200 * few
