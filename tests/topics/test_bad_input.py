"""Every bad argument is a ``ConfigError`` that names the value and the rule, and nothing is half done."""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conquiet import (
    Backoff,
    Broker,
    ConfigError,
    DeadLetterPolicy,
    Outgoing,
    Retention,
    RetryPolicy,
    SubscribeOptions,
    TopicDefaults,
)
from conquiet.wire.keys import Keys
from tests.rigs.asking import ask, keys_like

pytestmark = pytest.mark.any_server

ORDERS = "orders"
BAD_NAMES = ["", "a:b", "{a}", "a b", "a\n", "ü", "x" * 201, None, 5, b"orders"]
BAD_COUNTS = [0, -1, 1.5, True, "3", None]
BAD_SECONDS = [0, -1, float("nan"), float("inf"), "1", True, None]


class Unequal:
    """Something that nobody expects, and that cannot be hashed."""

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "<unequal>"


@pytest.fixture
async def broker(url: str, keys: Keys) -> AsyncIterator[Broker]:
    """With a topic that has two partitions; nothing else may be there after a test."""
    async with Broker(url, namespace=keys.namespace) as broker:
        await broker.create_topic(ORDERS, partitions=2)
        before = await keys_like(url, f"{keys.namespace}:*")
        yield broker
        assert await keys_like(url, f"{keys.namespace}:*") == before


async def handle(message: Any) -> None:
    raise AssertionError("nothing is handled here")


def refuses(what: str, value: object) -> Any:
    """Expects a ``ConfigError`` that names the argument, and the value as it is."""

    def fits(error: ConfigError) -> bool:
        return what in str(error) and repr(value) in str(error)

    return pytest.RaisesExc(ConfigError, check=fits)


# --- the broker ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "value"),
    [
        *(("namespace", value) for value in ("a:b", "{a}", "a b", "x" * 201, 5)),
        *(("dedup_window", value) for value in BAD_SECONDS),
        *(("dedup_size", value) for value in BAD_COUNTS),
        ("partitioner", "murmur2"),
        ("partitioner", 5),
        ("codec", "json"),
        ("codec", None),
        ("auto_create", True),
        ("auto_create", {"partitions": 3}),
        ("clock", None),
        ("clock", 5),
    ],
)
def test_a_broker_checks_its_settings(what: str, value: Any) -> None:
    with refuses(what, value):
        Broker("redis://127.0.0.1:1", **{what: value})


@pytest.mark.parametrize("address", [None, 5, "", "http://host", "redis//host"])
def test_a_broker_checks_its_address(address: Any) -> None:
    with pytest.raises(ConfigError):
        Broker(address)


@pytest.mark.parametrize(
    ("what", "value"),
    [
        *(("partitions", value) for value in BAD_COUNTS),
        ("retention", None),
        ("retention", {"max_len": 5}),
        ("partitioner", "crc32"),
        ("partitioner", None),
    ],
)
def test_topic_defaults_are_checked_when_they_are_made(what: str, value: Any) -> None:
    with refuses(what, value):
        TopicDefaults(**{what: value})


# --- topics ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BAD_NAMES)
async def test_topics_have_names(broker: Broker, name: Any) -> None:
    for work in (
        broker.create_topic(name),
        broker.create_topic(name, adopt=True),
        broker.send(name, 1),
        broker.send_batch(name, [Outgoing(1)]),
        broker.send(name, 1, delay=5),
        broker.admin.describe_topic(name),
        broker.admin.grow(name, partitions=3),
        broker.admin.delete_topic(name),
    ):
        with refuses("topic", name):
            await work


@pytest.mark.parametrize("name", [["orders"], {"a": 1}, Unequal()])
async def test_a_topic_is_one_topic(broker: Broker, name: Any) -> None:
    with refuses("topic", name):
        await broker.send(name, 1)
    with refuses("topic", name):
        await broker.send_batch(name, [Outgoing(1)])


@pytest.mark.parametrize(
    ("what", "value"),
    [
        *(("partitions", value) for value in BAD_COUNTS),
        ("retention", {"max_len": 5}),
        ("retention", 5),
        ("partitioner", "crc32"),
        ("partitioner", None),
        ("partitioner", lambda key, partitions: 0),
    ],
)
async def test_a_topic_is_created_by_the_rules(broker: Broker, what: str, value: Any) -> None:
    for adopt in (False, True):
        with refuses(what, value):
            await broker.create_topic("another", adopt=adopt, **{what: value})


@pytest.mark.parametrize("stream", ["", None, 5, "\ud800"])
async def test_a_legacy_stream_has_a_name(broker: Broker, stream: Any) -> None:
    with refuses("stream", stream):
        broker.legacy(stream)


@pytest.mark.parametrize("stream", ["a}b", "{}a"])
async def test_a_legacy_stream_that_nothing_can_be_put_beside_gets_no_group(
    broker: Broker, url: str, keys: Keys, stream: str
) -> None:
    name = f"{keys.namespace}{stream}"
    await ask(url, "XADD", name, "*", "data", "{}")
    with pytest.raises(ConfigError, match="because of its"):
        async with broker.consume(broker.legacy(name), group="g"):
            pass
    assert await ask(url, "XINFO", "GROUPS", name) == []


# --- messages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "value"),
    [
        *(("key", value) for value in (5, b"a", ["a"], True, "\ud800")),
        *(("headers", value) for value in ("a", ["a"], 5, [])),
        ("headers", {"a": 1}),
        ("headers", {"partitionId": "1"}),
        *(("message_id", value) for value in ("", 5, b"m", "\ud800")),
        *(("max_retries", value) for value in (-1, 1.5, True, "3")),
        *(("partition", value) for value in (-1, 2, 1.0, True, "0")),
    ],
)
@pytest.mark.parametrize("delay", [None, 5.0])
async def test_a_message_is_sent_by_the_rules(broker: Broker, what: str, value: Any, delay: float | None) -> None:
    named = "header" if what == "headers" else what
    with pytest.raises(ConfigError, match=named):
        await broker.send(ORDERS, 1, delay=delay, **{what: value})
    with pytest.raises(ConfigError, match=named):
        await broker.send_batch(ORDERS, [Outgoing(1), Outgoing(1, **{what: value})])


@pytest.mark.parametrize("delay", [-1, float("nan"), float("inf"), "1", True])
async def test_a_delay_is_some_time(broker: Broker, delay: Any) -> None:
    with refuses("delay", delay):
        await broker.send(ORDERS, 1, delay=delay)


@pytest.mark.parametrize("payload", [{1: 2}, (1,), b"a", float("nan"), object(), 2**64])
async def test_a_payload_can_be_carried(broker: Broker, payload: Any) -> None:
    for delay in (None, 5.0):
        with pytest.raises(ConfigError, match="payload cannot be carried as JSON"):
            await broker.send(ORDERS, payload, delay=delay)


@pytest.mark.parametrize("messages", [None, 5, Outgoing(1), Unequal()])
async def test_a_batch_is_a_number_of_messages(broker: Broker, messages: Any) -> None:
    with refuses("messages", messages):
        await broker.send_batch(ORDERS, messages)


@pytest.mark.parametrize(
    "messages", ["ab", [1], [Outgoing(1), None], [Outgoing(1), {"payload": 1}], {"a": Outgoing(1)}]
)
async def test_each_of_a_batch_is_a_message(broker: Broker, messages: Any) -> None:
    with pytest.raises(ConfigError, match=r"messages\[\d\] must be an Outgoing"):
        await broker.send_batch(ORDERS, messages)


# --- consumers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", BAD_NAMES)
async def test_a_group_has_a_name(broker: Broker, group: Any) -> None:
    with refuses("group", group):
        broker.subscribe(ORDERS, group=group, handler=handle)
    with refuses("group", group):
        broker.consume(ORDERS, group=group)


@pytest.mark.parametrize("topic", [*BAD_NAMES, [], [ORDERS, ORDERS], ["a:b"], [None], [["a"]], Unequal()])
async def test_a_consumer_has_topics(broker: Broker, topic: Any) -> None:
    with pytest.raises(ConfigError, match="topic"):
        broker.subscribe(topic, group="g", handler=handle)
    with pytest.raises(ConfigError, match="topic"):
        broker.consume(topic, group="g")


@pytest.mark.parametrize("handler", [None, 5, "handle"])
async def test_a_handler_can_be_called(broker: Broker, handler: Any) -> None:
    with refuses("handler", handler):
        broker.subscribe(ORDERS, group="g", handler=handler)


@pytest.mark.parametrize("options", [5, {"batch_size": 1}, RetryPolicy()])
async def test_options_are_options(broker: Broker, options: Any) -> None:
    with refuses("options", options):
        broker.subscribe(ORDERS, group="g", handler=handle, options=options)
    with refuses("options", options):
        broker.consume(ORDERS, group="g", options=options)


async def test_pulling_has_no_batch_handler(broker: Broker) -> None:
    with pytest.raises(ConfigError, match="batch_handler is for subscribe"):
        broker.consume(ORDERS, group="g", options=SubscribeOptions(batch_handler=True))


@pytest.mark.parametrize(
    ("what", "value"),
    [
        *((what, value) for what in ("batch_size", "max_inflight", "max_crashes") for value in BAD_COUNTS),
        *(("max_partitions", value) for value in BAD_COUNTS if value is not None),
        *((what, value) for what in ("poll_timeout", "lease_ttl", "drain_timeout") for value in BAD_SECONDS),
        *(("handler_timeout", value) for value in BAD_SECONDS if value is not None),
        ("order", "sorted"),
        ("order", None),
        ("on_group_lost", "ignore"),
        *(("start", value) for value in ("beginning", None, -1, float("nan"), True, [0])),
        ("start", dt.datetime(2024, 1, 1)),
        ("retry", 3),
        ("retry", None),
        ("dead_letter", None),
        ("dead_letter", {"max_error_chars": 5}),
        *(("consumer", value) for value in BAD_NAMES if value is not None),
        *((what, "no") for what in ("batch_handler", "handle_signals", "order_across_growth")),
    ],
)
def test_each_option_has_its_rule(what: str, value: Any) -> None:
    with refuses(what, value):
        SubscribeOptions(**{what: value})


@pytest.mark.parametrize(
    "pinning",
    [
        {"partition_modulo": 2},
        {"partition_remainder": 1},
        {"partition_modulo": 0, "partition_remainder": 0},
        {"partition_modulo": 2, "partition_remainder": -1},
        {"partition_modulo": 2.0, "partition_remainder": 0},
        {"partition_modulo": 2, "partition_remainder": True},
    ],
)
def test_pinning_takes_two_numbers(pinning: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="partition_"):
        SubscribeOptions(**pinning)


@pytest.mark.parametrize("order", ["block_key", "block_partition"])
def test_batches_know_no_order(order: Any) -> None:
    with refuses("order", order):
        SubscribeOptions(batch_handler=True, order=order)


# --- policies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "value"),
    [
        *((what, value) for what in ("max_len", "dead_letter_max_len") for value in (0, -1, 1.5, True, "3")),
        *((what, value) for what in ("max_age", "group_expiry", "dead_letter_max_age") for value in BAD_SECONDS[:-1]),
        *(("trim_interval", value) for value in BAD_SECONDS),
        ("on_full", "block"),
        ("on_full", None),
        ("on_full", "reject"),
        ("on_full", "drop"),
        ("delete_acked", "no"),
    ],
)
def test_retention_has_its_rules(what: str, value: Any) -> None:
    with refuses(what, value):
        Retention(**{what: value})


@pytest.mark.parametrize(
    ("what", "value"),
    [
        *(("max_retries", value) for value in (-1, 1.5, True, "3", None)),
        ("backoff", 5),
        ("mode", "readd"),
        ("retry_on", "Exception"),
        ("retry_on", (ValueError, 5)),
        ("give_up_on", [ValueError]),
    ],
)
def test_a_retry_policy_has_its_rules(what: str, value: Any) -> None:
    with refuses(what, value):
        RetryPolicy(**{what: value})


@pytest.mark.parametrize(
    ("what", "value"),
    [("base", -1), ("base", float("inf")), ("base", "1"), ("cap", 0.1), ("cap", float("nan")), ("kind", "linear")],
)
def test_a_backoff_has_its_rules(what: str, value: Any) -> None:
    with refuses(what, value):
        Backoff(**{what: value})


@pytest.mark.parametrize(
    ("what", "value"),
    [
        *(("max_error_chars", value) for value in (-1, 1.5, True, "3", None)),
        ("transform", "upper"),
        ("drop_headers", "secret"),
        ("drop_headers", ("a", 5)),
        ("drop_headers", None),
        ("include_traceback", "no"),
    ],
)
def test_a_dead_letter_policy_has_its_rules(what: str, value: Any) -> None:
    with refuses(what, value):
        DeadLetterPolicy(**{what: value})


def test_a_transform_that_cannot_be_called_is_refused() -> None:
    """Each letter would be stored as it is, with what was to be left out."""

    def without(fields: dict[bytes, bytes], name: bytes) -> dict[bytes, bytes]:
        return {key: value for key, value in fields.items() if key != name}

    with pytest.raises(ConfigError, match=r"transform is called with \(fields\), but it is .*without\(fields, name\)"):
        DeadLetterPolicy(transform=without)  # type: ignore[arg-type]


async def test_requeue_is_refused_for_a_legacy_stream(broker: Broker, url: str, keys: Keys) -> None:
    stream = f"{keys.namespace}-legacy"
    await ask(url, "XADD", stream, "*", "data", "{}")
    options = SubscribeOptions(retry=RetryPolicy(mode="requeue"))
    with pytest.raises(ConfigError, match="requeue"):
        async with broker.subscribe(broker.legacy(stream), group="g", handler=handle, options=options):
            pass
    assert await ask(url, "XINFO", "GROUPS", stream) == []
