"""Which partition a message goes to, the same for writers in every language."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conquiet import ConfigError
from conquiet.topics.format import partitioner as module
from conquiet.topics.format.partitioner import (
    NAMED,
    ConsistentHashPartitioner,
    HashPartitioner,
    Partitioner,
    checked,
    murmur2,
)

KEYS = [f"customer-{number}" for number in range(20_000)]
COUNTS = (1, 3, 8, 32)

VECTORS: dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]] = {
    # key: hash, partition by murmur2 and by consistent, for 1, 3, 8 and 32 partitions
    "": (275646681, (0, 0, 1, 25), (0, 1, 3, 3)),
    "a": (584102524, (0, 1, 4, 28), (0, 2, 7, 7)),
    "abc": (479470107, (0, 0, 3, 27), (0, 0, 0, 20)),
    "customer-7": (863653111, (0, 1, 7, 23), (0, 2, 6, 6)),
    "order:42": (1596225104, (0, 2, 0, 16), (0, 0, 0, 19)),
    "Grüße": (1190824359, (0, 0, 7, 7), (0, 1, 1, 11)),
    "日本語": (1431860170, (0, 1, 2, 10), (0, 1, 1, 1)),
    "\U0001f680": (761778625, (0, 1, 1, 1), (0, 0, 0, 19)),
}

both = pytest.mark.parametrize("make", [HashPartitioner, ConsistentHashPartitioner])


def by_the_byte(data: bytes) -> int:
    """murmur2 in the words of Kafka's ``Utils.java``: slow, and close to the original."""

    def int32(value: int) -> int:
        return (value + 2**31) % 2**32 - 2**31

    def shifted(value: int, by: int) -> int:  # Java's >>>
        return value % 2**32 >> by

    m, r = 0x5BD1E995, 24
    h = int32(int32(0x9747B28C) ^ len(data))
    for at in range(0, len(data) // 4 * 4, 4):
        k = int32(data[at] + (data[at + 1] << 8) + (data[at + 2] << 16) + (data[at + 3] << 24))
        k = int32(k * m)
        k ^= shifted(k, r)
        k = int32(k * m)
        h = int32(int32(h * m) ^ k)
    rest = data[len(data) // 4 * 4 :]
    for place in reversed(range(len(rest))):
        h = int32(h ^ rest[place] << 8 * place)
    h = int32(h * m) if rest else h
    h = int32(int32(h ^ shifted(h, 13)) * m)
    return int32(h ^ shifted(h, 15))


# --- the hash ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_the_hash_is_kafkas(data: bytes, value: int) -> None:
    """The vectors of Kafka's own ``UtilsTest``."""
    assert murmur2(data) == by_the_byte(data) == value


@given(st.binary(max_size=300))
def test_the_hash_is_kafkas_for_any_bytes(data: bytes) -> None:
    assert murmur2(data) == by_the_byte(data)


@pytest.mark.parametrize("key", VECTORS, ids=ascii)
def test_partitions_are_as_documented(key: str) -> None:
    value, hashed, consistent = VECTORS[key]
    assert murmur2(key.encode()) & 0x7FFFFFFF == value
    assert tuple(HashPartitioner()(key, count) for count in COUNTS) == hashed
    assert tuple(ConsistentHashPartitioner()(key, count) for count in COUNTS) == consistent


@pytest.mark.parametrize("key", [key for key in VECTORS if key != "\U0001f680"], ids=ascii)
def test_the_documentation_has_the_same_vectors(key: str) -> None:
    value, hashed, consistent = VECTORS[key]
    name = f"``{key}``" if key else "(empty)"
    [row] = [line for line in (module.__doc__ or "").splitlines() if line.startswith(f"{name} ")]
    assert [int(cell.strip(",")) for cell in row.split()[1:]] == [value, *hashed[1:], *consistent[1:]]


# --- by hash -----------------------------------------------------------------------------------------


@given(st.text(), st.integers(1, 2_000))
def test_a_key_goes_to_its_hash_modulo_the_partitions(key: str, partitions: int) -> None:
    assert HashPartitioner()(key, partitions) == (by_the_byte(key.encode()) & 0x7FFFFFFF) % partitions


def test_more_keys_than_are_remembered_still_go_where_they_belong() -> None:
    partitioner = HashPartitioner()
    once = [partitioner(key, 32) for key in KEYS]
    assert [partitioner(key, 32) for key in KEYS] == once


def test_keys_spread_evenly() -> None:
    loads = Counter(HashPartitioner()(key, 16) for key in KEYS)
    assert len(loads) == 16
    assert 0.85 < min(loads.values()) / (len(KEYS) / 16) <= max(loads.values()) / (len(KEYS) / 16) < 1.15


# --- by a ring ---------------------------------------------------------------------------------------


def on_the_ring(key: str, partitions: int, virtual_nodes: int) -> int:
    """As the documentation says it, without a thought for speed."""

    def positive(text: str) -> int:
        return murmur2(text.encode()) & 0x7FFFFFFF

    points = [(positive(f"{p}-{r}"), p) for p in range(partitions) for r in range(virtual_nodes)]
    return min((point for point in points if point[0] >= positive(key)), default=min(points))[1]


@given(st.text(), st.integers(1, 12), st.integers(1, 20))
def test_a_key_goes_to_the_next_point_of_the_ring(key: str, partitions: int, virtual_nodes: int) -> None:
    assert ConsistentHashPartitioner(virtual_nodes)(key, partitions) == on_the_ring(key, partitions, virtual_nodes)


def test_a_point_of_two_partitions_is_the_lower_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "murmur2", lambda data: 7)
    assert module._ring.__wrapped__(3, 1) == ([7, 7, 7], [0, 1, 2, 0])


@pytest.mark.parametrize(("before", "after"), [(1, 2), (3, 4), (8, 9), (8, 16), (31, 32)])
def test_growth_moves_few_keys_and_only_to_new_partitions(before: int, after: int) -> None:
    partitioner = ConsistentHashPartitioner()
    places = [(partitioner(key, before), partitioner(key, after)) for key in KEYS]
    moved = [new for old, new in places if old != new]
    assert all(before <= new < after for new in moved)
    expected = len(KEYS) * (after - before) / after
    assert 0.7 * expected < len(moved) < 1.3 * expected


@given(st.text(), st.integers(1, 40), st.integers(1, 8))
def test_growth_moves_no_key_between_old_partitions(key: str, before: int, more: int) -> None:
    partitioner = ConsistentHashPartitioner(20)
    old, new = partitioner(key, before), partitioner(key, before + more)
    assert new == old or before <= new < before + more


@pytest.mark.parametrize("partitions", [2, 8, 32])
def test_the_ring_is_fairly_even(partitions: int) -> None:
    loads = Counter(ConsistentHashPartitioner()(key, partitions) for key in KEYS)
    mean = len(KEYS) / partitions
    assert len(loads) == partitions
    assert 0.7 < min(loads.values()) / mean <= max(loads.values()) / mean < 1.3


@pytest.mark.parametrize("virtual_nodes", [0, -1, 1.5, True, None, "160"], ids=repr)
def test_virtual_nodes_are_a_positive_number(virtual_nodes: Any) -> None:
    with pytest.raises(ConfigError, match="virtual_nodes must be an integer of at least 1"):
        ConsistentHashPartitioner(virtual_nodes)


# --- both --------------------------------------------------------------------------------------------


@both
def test_without_a_key_each_partition_has_its_turn(make: Callable[[], Partitioner]) -> None:
    partitioner = make()
    drawn = [partitioner(None, 5) for _ in range(50)]
    assert drawn == [(drawn[0] + turn) % 5 for turn in range(50)]


@both
def test_each_partitioner_begins_at_a_place_of_its_own(make: Callable[[], Partitioner]) -> None:
    assert len({make()(None, 1_000_000) for _ in range(20)}) > 10


@both
def test_a_copy_in_another_process_has_the_same_keys_and_its_own_turns(make: Callable[[], Partitioner]) -> None:
    partitioner = make()
    partitioner("a", 8)
    data = pickle.dumps(partitioner)
    copies = [pickle.loads(data) for _ in range(20)]
    assert all([copy(key, 32) for key in VECTORS] == [partitioner(key, 32) for key in VECTORS] for copy in copies)
    assert len({copy(None, 1_000_000) for copy in copies}) > 10


def test_a_copy_of_a_ring_has_as_many_virtual_nodes() -> None:
    partitioner = ConsistentHashPartitioner(3)
    copy = pickle.loads(pickle.dumps(partitioner))
    assert [copy(key, 8) for key in KEYS[:100]] == [partitioner(key, 8) for key in KEYS[:100]]


@both
@pytest.mark.parametrize("key", [b"a", 7, ["a"], True, "\ud800"], ids=ascii)
def test_what_is_no_key_is_named(make: Callable[[], Partitioner], key: Any) -> None:
    with pytest.raises(ConfigError, match="key must be") as caught:
        make()(key, 8)
    assert repr(key) in str(caught.value)


@both
@pytest.mark.parametrize("key", ["a", None])
@pytest.mark.parametrize("partitions", [0, -1])
def test_there_is_at_least_one_partition(make: Callable[[], Partitioner], key: str | None, partitions: int) -> None:
    with pytest.raises(ConfigError, match=f"partitions must be an integer of at least 1, not {partitions}"):
        make()(key, partitions)


# --- the user's own ----------------------------------------------------------------------------------


def returns(value: Any) -> Partitioner:
    def partitioner(key: str | None, partitions: int) -> int:
        return value  # type: ignore[no-any-return]

    return partitioner


@pytest.mark.parametrize("value", [0, 3, 7])
def test_a_partition_of_the_topic_passes(value: int) -> None:
    assert checked(returns(value), "a", 8) == value


def test_the_key_and_the_number_of_partitions_reach_the_partitioner() -> None:
    assert checked(lambda key, partitions: len(key or "") + partitions - 10, "abc", 8) == 1


@pytest.mark.parametrize("value", [-1, 8, 10**30, 1.0, True, False, None, "1"], ids=repr)
def test_what_is_no_partition_of_the_topic_is_named(value: object) -> None:
    with pytest.raises(ConfigError, match="must return an integer from 0 to 7, not ") as caught:
        checked(returns(value), "a", 8)
    assert repr(value) in str(caught.value)


def test_an_error_of_the_partitioner_is_its_own() -> None:
    with pytest.raises(ZeroDivisionError):
        checked(lambda key, partitions: 1 // 0, "a", 8)


def test_partitioners_have_names() -> None:
    assert {name: type(make()) for name, make in NAMED.items()} == {
        "murmur2": HashPartitioner,
        "consistent": ConsistentHashPartitioner,
    }
