"""Which partition a message goes to.

A key's hash is Kafka's, so that writers in other languages find the same partition, by code that they have:

* ``hash(key)`` = murmur2 (32 bits, seed ``0x9747b28c``) of the key in UTF-8, with the sign bit cleared
  (``& 0x7fffffff``);
* ``murmur2`` (the default): the partition is ``hash(key) % P`` for P partitions;
* ``consistent``: partition ``p`` owns the points ``hash("p-r")`` (decimal, as in ``"3-17"``) for each replica
  ``r`` from 0 to ``virtual_nodes - 1``. The partition is the owner of the first point that is not below
  ``hash(key)``, or of the lowest point if there is none; a point of several partitions is the lowest one's.

The empty string is a key. A message without a key goes wherever it is its turn.

``hash(key)`` and partitions of some keys, by ``murmur2`` and by ``consistent`` with 160 virtual nodes:

==============  ==========  =====================  =====================
key             hash(key)   murmur2, P = 3, 8, 32  consistent, likewise
==============  ==========  =====================  =====================
(empty)          275646681  0, 1, 25               1, 3, 3
``a``            584102524  1, 4, 28               2, 7, 7
``abc``          479470107  0, 3, 27               0, 0, 20
``customer-7``   863653111  1, 7, 23               2, 6, 6
``order:42``    1596225104  2, 0, 16               0, 0, 19
``Grüße``       1190824359  0, 7, 7                1, 1, 11
``日本語``      1431860170  1, 2, 10               1, 1, 1
==============  ==========  =====================  =====================
"""

from __future__ import annotations

import random
import struct
from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final, Protocol

from conquiet.errors import ConfigError
from conquiet.kit import rules

__all__ = ["NAMED", "ConsistentHashPartitioner", "HashPartitioner", "Partitioner", "checked", "murmur2"]

_BITS: Final = 0xFFFFFFFF
_FACTOR: Final = 0x5BD1E995
_POSITIVE: Final = 0x7FFFFFFF
_SEED: Final = 0x9747B28C
_REMEMBERED: Final = 4096


class Partitioner(Protocol):
    """Any callable that tells the partition, from 0 to ``partitions - 1``, of a message with ``key``.

    The order of a key's messages holds only if equal keys always give equal partitions.
    """

    def __call__(self, key: str | None, partitions: int) -> int:
        """The partition of a message with ``key``, or of one without."""
        ...


def murmur2(data: bytes) -> int:
    """Kafka's murmur2 of ``data``, as a signed 32-bit integer."""
    length = len(data)
    words = length >> 2
    value = _SEED ^ length
    for word in struct.unpack_from(f"<{words}I", data):
        word = word * _FACTOR & _BITS
        value = (value * _FACTOR ^ (word ^ word >> 24) * _FACTOR) & _BITS
    if length & 3:
        value = (value ^ int.from_bytes(data[words << 2 :], "little")) * _FACTOR & _BITS
    value = (value ^ value >> 13) * _FACTOR & _BITS
    value ^= value >> 15
    return value - (value >> 31 << 32)


# In pure Python the hash is the most expensive step of a send, and keys come back.
@lru_cache(_REMEMBERED)
def _hash(key: str) -> int:
    try:
        return murmur2(key.encode()) & _POSITIVE
    except UnicodeEncodeError:
        raise ConfigError(f"key must be valid Unicode, not {key!r}") from None


class _Turns:
    """Round-robin from a random place, so that many short-lived writers do not all begin with one partition."""

    __slots__ = ("_turn",)

    def __init__(self) -> None:
        self._turn = random.getrandbits(31)

    def next(self, key: None, partitions: int) -> int:
        """Whose turn it is among ``partitions``; refuses what is no key and no lack of one."""
        if key is not None:
            raise ConfigError(f"key must be a string or None, not {key!r}")
        # Two threads may draw one turn: that is harmless, and cheaper than a lock.
        self._turn = turn = self._turn + 1
        return turn % rules.integer("partitions", partitions, least=1)


class HashPartitioner:
    """A key's hash modulo the number of partitions; without a key, each partition in turn."""

    __slots__ = ("_turns",)

    def __init__(self) -> None:
        self._turns = _Turns()

    def __call__(self, key: str | None, partitions: int) -> int:
        """The partition of a message with ``key``."""
        if not isinstance(key, str):
            return self._turns.next(key, partitions)
        if partitions < 1:
            rules.integer("partitions", partitions, least=1)
        return _hash(key) % partitions

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a copy takes its turns from a place of its own


class ConsistentHashPartitioner:
    """The next point after a key's hash on a ring; without a key, each partition in turn.

    Growth from P to P + n partitions moves only about n / (P + n) of the keys, and only to the new ones; in
    exchange partitions are less equal than under ``HashPartitioner``: by some 8 % with 160 ``virtual_nodes``.
    """

    __slots__ = ("_turns", "_virtual_nodes")

    def __init__(self, virtual_nodes: int = 160) -> None:
        self._virtual_nodes = rules.integer("virtual_nodes", virtual_nodes, least=1)
        self._turns = _Turns()

    def __call__(self, key: str | None, partitions: int) -> int:
        """The partition of a message with ``key``."""
        if not isinstance(key, str):
            return self._turns.next(key, partitions)
        points, owners = _ring(partitions, self._virtual_nodes)
        return owners[bisect_left(points, _hash(key))]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._virtual_nodes,)


@lru_cache(16)
def _ring(partitions: int, virtual_nodes: int) -> tuple[list[int], list[int]]:
    """The points in ascending order, and the owner of each; one owner more, for hashes above the last point."""
    rules.integer("partitions", partitions, least=1)
    ring = sorted(
        (murmur2(b"%d-%d" % (partition, replica)) & _POSITIVE, partition)
        for partition in range(partitions)
        for replica in range(virtual_nodes)
    )
    return [point for point, _ in ring], [owner for _, owner in ring] + [ring[0][1]]


def checked(partitioner: Partitioner, key: str | None, partitions: int) -> int:
    """What ``partitioner`` says, which may be the user's own, if that is one of ``partitions``."""
    partition: object = partitioner(key, partitions)
    if isinstance(partition, int) and not isinstance(partition, bool) and 0 <= partition < partitions:
        return partition
    raise ConfigError(
        f"partitioner {partitioner!r} must return an integer from 0 to {partitions - 1}, not {partition!r}"
    )


NAMED: Final[Mapping[str, Callable[[], Partitioner]]] = {
    "consistent": ConsistentHashPartitioner,
    "murmur2": HashPartitioner,
}
"""The partitioners that a topic can name in its settings, for all its writers."""
