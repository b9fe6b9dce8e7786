"""Every key of the topics room under its name, and beside a partition whatever must change with it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from conquiet import ConfigError
from conquiet.wire.keys import Keys, name

KEYS = Keys()
STREAM = KEYS.partition("orders", 3)


def slot(key: str) -> int:
    return int(key_slot(key.encode()))


def beside(keys: Keys, stream: str) -> list[str]:
    """All keys that must be in the slot of ``stream``."""
    return [*keys.of_partition(stream), *keys.of_group(stream, "billing")]


@pytest.mark.parametrize(
    ("key", "written"),
    [
        (KEYS.registry, "streaming:mq:topics:registry"),
        (KEYS.meta("orders"), "streaming:mq:topic:orders:meta"),
        (KEYS.partitions("orders"), "streaming:mq:topic:orders:partitions"),
        (KEYS.groups("orders"), "streaming:mq:topic:orders:groups"),
        (KEYS.partition("orders", 0), "stream:topic:orders:p:0"),
        (KEYS.dead_letters("orders"), "stream:topic:orders:dlq"),
        (KEYS.forwarded("orders"), "streaming:mq:forwarded:{stream:topic:orders:dlq}"),
        (KEYS.members("orders", "billing"), "streaming:mq:members:{orders:billing}"),
        (KEYS.members_info("orders", "billing"), "streaming:mq:members:{orders:billing}:info"),
        (KEYS.generation("orders", "billing"), "streaming:mq:members:{orders:billing}:generation"),
        (KEYS.lease(STREAM, "billing"), "streaming:mq:lease:{stream:topic:orders:p:3}:billing"),
        (KEYS.retry(STREAM, "billing"), "streaming:mq:retry:{stream:topic:orders:p:3}:billing"),
        (KEYS.attempts(STREAM, "billing"), "streaming:mq:attempts:{stream:topic:orders:p:3}:billing"),
        (KEYS.outbox(STREAM, "billing"), "streaming:mq:dead:{stream:topic:orders:p:3}:billing"),
        (KEYS.delayed(STREAM), "streaming:mq:delayed:{stream:topic:orders:p:3}"),
        (KEYS.delayed_items(STREAM), "streaming:mq:delayed:{stream:topic:orders:p:3}:items"),
        (KEYS.dedup(STREAM), "streaming:mq:dedup:{stream:topic:orders:p:3}"),
        (KEYS.dedup_ids(STREAM), "streaming:mq:dedup:{stream:topic:orders:p:3}:ids"),
        (KEYS.replayed(STREAM), "streaming:mq:replayed:{stream:topic:orders:p:3}"),
        (KEYS.replayed_gone(STREAM), "streaming:mq:replayed:{stream:topic:orders:p:3}:gone"),
        (KEYS.trim(STREAM), "streaming:mq:trim:{stream:topic:orders:p:3}"),
    ],
)
def test_each_key_has_the_name_of_the_specification(key: str, written: str) -> None:
    assert key == written


def test_with_a_namespace_every_key_is_below_it() -> None:
    keys = Keys("staging")
    stream = keys.partition("orders", 0)
    names = [keys.registry, keys.meta("t"), keys.partitions("t"), keys.groups("t"), keys.dead_letters("t")]
    names += [keys.forwarded("t"), keys.members("t", "g"), keys.members_info("t", "g"), keys.generation("t", "g")]
    assert all(key.startswith("staging:str") for key in (*names, *beside(keys, stream)))
    assert stream == "staging:stream:topic:orders:p:0"


@pytest.mark.parametrize("namespace", ["", "staging"])
def test_what_changes_with_a_partition_is_in_its_slot(namespace: str) -> None:
    keys = Keys(namespace)
    for index in range(20):
        stream = keys.partition("orders", index)
        assert {slot(key) for key in beside(keys, stream)} == {slot(stream)}
    assert slot(keys.forwarded("orders")) == slot(keys.dead_letters("orders"))


def test_what_the_members_of_a_group_share_is_in_one_slot() -> None:
    about = ("orders", "billing")
    assert len({slot(key) for key in (KEYS.members(*about), KEYS.members_info(*about), KEYS.generation(*about))}) == 1


def test_the_partitions_of_a_topic_spread_over_the_slots() -> None:
    assert len({slot(KEYS.partition("orders", index)) for index in range(16)}) == 16


@pytest.mark.parametrize(
    "stream", ["app:orders", "app:{orders}", "{orders}", "{a}{b}", "a{b", "{{a}", "x{{a}}", "ü{Grüße}", "a b\nc"]
)
def test_what_belongs_to_a_legacy_stream_is_in_its_slot_too(stream: str) -> None:
    assert {slot(key) for key in beside(KEYS, stream)} == {slot(stream)}


@pytest.mark.parametrize("stream", ["a}b", "{}", "{}a", "a{}{b}", "}{"])
def test_a_stream_that_nothing_can_be_put_beside_is_refused(stream: str) -> None:
    with pytest.raises(ConfigError, match="because of its"):
        KEYS.lease(stream, "billing")


@given(st.text("a{}", min_size=1, max_size=8))
def test_any_stream_is_either_refused_or_shares_its_slot(stream: str) -> None:
    try:
        keys = beside(KEYS, stream)
    except ConfigError:
        return
    assert {slot(key) for key in keys} == {slot(stream)}


@given(st.tuples(*[st.sampled_from(["a", "{a}", "a{a}", "{a}:{a}", "a:b", "{a}:b", "b"])] * 2))
def test_two_streams_never_share_a_key(streams: tuple[str, str]) -> None:
    one, other = streams
    if one != other:
        assert not set(beside(KEYS, one)) & set(beside(KEYS, other))


@pytest.mark.parametrize("value", ["a", "A.b_c-9", "x" * 200])
def test_names_are_letters_digits_and_a_few_signs(value: str) -> None:
    assert name("topic", value) == value


@pytest.mark.parametrize("value", ["", "a:b", "{a}", "a b", "a\n", "ü", "x" * 201, "a\x00", "٣", None, 5, b"a"])
def test_other_names_are_refused_with_the_rule(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        name("group", value)
    assert str(caught.value) == f"group must be 1 to 200 letters, digits, '.', '_' or '-', not {value!r}"


@pytest.mark.parametrize("namespace", ["a:b", "{a}", "a b", "x" * 201, 5])
def test_a_namespace_is_such_a_name_or_nothing(namespace: str) -> None:
    with pytest.raises(ConfigError, match="namespace must be"):
        Keys(namespace)
