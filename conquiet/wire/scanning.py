"""The names of keys that are there: on the server, or on each node of a Cluster."""

from __future__ import annotations

import re
from itertools import count
from typing import Final

from redis.crc import key_slot

from conquiet.wire.connections import Connections
from conquiet.wire.parser import Reply
from conquiet.wire.streams import pack

__all__ = ["glob_escaped", "key_names"]

_SOME: Final = 1000
"""How many keys one call looks at: the server does nothing else meanwhile."""
_SPECIAL: Final = re.compile(r"([\\*?\[\]^])")


def glob_escaped(text: str) -> str:
    """``text`` as the part of a pattern that stands for itself."""
    return _SPECIAL.sub(r"\\\1", text)


async def key_names(link: Connections, pattern: str, kind: str) -> set[str]:
    """All keys of that type whose names match; what comes or goes meanwhile may be among them or not."""
    found: set[str] = set()
    for anchor in await _anchors(link):
        cursor = b"0"
        while True:
            command = pack("SCAN", cursor, "MATCH", pattern, "COUNT", _SOME, "TYPE", kind)
            cursor, names = await link.call(anchor, command)
            found.update(name.decode() for name in names)
            if cursor == b"0":
                break
    return found


async def _anchors(link: Connections) -> list[str]:
    """For each node that has keys of its own, the name of a key that it would have."""
    [reply] = await link.call_many("0", [pack("CLUSTER", "SLOTS")])
    if isinstance(reply, Exception):  # no Cluster
        return ["0"]
    firsts: dict[bytes, tuple[int, int]] = {}
    for first, last, master, *_ in reply:
        firsts.setdefault(_name_of(master), (first, last))
    return [_key_in(*slots) for slots in firsts.values()]


def _name_of(node: Reply) -> bytes:
    return b"%s:%d" % (node[0] or b"", node[1])


def _key_in(first: int, last: int) -> str:
    return next(str(number) for number in count() if first <= key_slot(str(number).encode()) <= last)
