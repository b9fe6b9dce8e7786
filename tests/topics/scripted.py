"""One partition, the scripts that its owner calls, and what there must be after each call."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from conquiet.kit.clock import ManualClock
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Topic
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.keys import Keys
from conquiet.wire.scripts import Script
from conquiet.wire.streams import Entry, entries_of, pack

__all__ = [
    "GROUP",
    "OTHER",
    "SUSPICIOUS",
    "TTL",
    "Forwarder",
    "Model",
    "Scripted",
    "Seen",
    "field_of",
    "flat",
    "number",
    "packed_number",
    "place",
]

GROUP: Final = "billing"
OTHER: Final = "audit"
TTL: Final = 100
"""Seconds of the test's own time, which passes in steps that no delay of a slow machine can be taken for."""
SUSPICIOUS: Final = 3

_T = TypeVar("_T")


def place(id: str) -> tuple[int, int]:
    ms, seq = id.split("-")
    return int(ms), int(seq)


@dataclass(frozen=True)
class Seen:
    """What is on the server, as it answers."""

    lease: Any
    pending: Any
    parked: Any
    groups: Any
    waiting: Any
    delayed: Any
    replayed: Any
    entries: list[Entry]
    outbox: list[Entry]
    letters: list[Entry]


@dataclass
class Forwarder:
    """Somebody on the way from the outbox to the dead letters, who may stop after any step."""

    claim: str
    letters: list[Entry]


@dataclass
class Model:
    """What must be so. Entries are known by ID, messages by a number that their copies keep."""

    owner: str = ""
    epoch: int = 0
    until: float = 0
    previous: list[tuple[str, int]] = field(default_factory=list)
    crashed: str = ""
    number_of: dict[str, int] = field(default_factory=dict)
    pending: dict[str, str] = field(default_factory=dict)
    parked: dict[str, float] = field(default_factory=dict)
    crashes: Counter[str] = field(default_factory=Counter)
    hand: list[str] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    outbox: int = 0
    letters: int = 0
    forwarded: set[bytes] = field(default_factory=set)

    def settle(self, id: str) -> None:
        self.pending.pop(id, None)
        self.parked.pop(id, None)
        self.crashes.pop(id, None)
        if id in self.hand:
            self.hand.remove(id)


class Scripted:
    """A server, a clock and a model, and every call that a test makes; synchronous, on a loop of its own."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = ManualClock()
        self.instance = Instance(Connections(Address.of(self.url)), Keys(f"t{secrets.token_hex(6)}"), self.clock)
        self.topic = Topic("orders", 1)
        keys = self.instance.keys
        self.stream = self.topic.stream(keys, 0)
        self.lease, self.retry, self.attempts, self.outbox = keys.of_group(self.stream, GROUP)
        self.letters, self.forwarded = keys.dead_letters("orders"), keys.forwarded("orders")
        self.keys = [*keys.of_partition(self.stream), *keys.of_group(self.stream, GROUP), self.letters, self.forwarded]
        self.model = Model()
        for group in (GROUP, OTHER):
            self.call("XGROUP", "CREATE", self.stream, group, "0", "MKSTREAM")

    def teardown(self) -> None:
        self.call("DEL", *self.keys)
        self.wait(self.instance.link.aclose())
        self.runner.close()

    # --- talking to the server -------------------------------------------------------------------------

    def wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self.runner.run(work)

    def call(self, *words: str | bytes | int) -> Any:
        return self.wait(self.instance.link.call(self.stream, pack(*words)))

    def run(self, script: str, keys: Sequence[str], *args: str | bytes | int) -> Any:
        return self.wait(self.instance.run(self.stream, Script.named(script)(keys, *args)))

    def dump(self) -> list[Any]:
        return self.wait(self.instance.link.call_many(self.stream, [pack("DUMP", key) for key in self.keys]))

    def ids(self) -> list[str]:
        return [id.decode() for id, _ in entries_of(self.call("XRANGE", self.stream, "-", "+"))]

    @property
    def now(self) -> float:
        return self.clock.offset_ms / 1000

    def fenced(self, what: str, owner: str, epoch: int, ids: Sequence[str] = (), delay: int = 0, most: int = 2) -> Any:
        """Call one of the scripts that only the owner may call."""
        fence, now = (owner, epoch), self.clock.offset_ms
        group = [self.lease, self.stream, self.retry, self.attempts]
        delayed = [self.instance.keys.delayed(self.stream), self.instance.keys.delayed_items(self.stream)]
        match what:
            case "take":
                return self.run("take", [*group, *delayed], *fence, now, GROUP, most, most, "0-0", "", *ids)
            case "takeover":
                start, crashed = (ids or ["-"])[0], self.model.crashed
                return self.run("takeover", group, *fence, GROUP, start, most, crashed, "", SUSPICIOUS)
            case "park":
                return self.run("park", group, *fence, now, GROUP, *flat((id, delay * 1000, 1, "E") for id in ids))
            case "requeue":
                keys = [self.lease, self.stream, self.attempts, *delayed, self.retry]
                words = flat((id, delay * 1000, 1, f"0/{id}") for id in ids)
                return self.run("requeue", keys, *fence, now, GROUP, *words)
            case "bury":
                words = flat((id, 1, "rejected", "E", "no", "", -1) for id in ids)
                return self.run("bury", [*group, self.outbox], *fence, now, GROUP, "orders", 0, *words)
            case "release":
                return self.run("partition_release", [self.lease, self.stream], *fence, GROUP)
            case "renew":
                return self.run("lease_renew", [self.lease], *fence, TTL * 1000, now)
        assert what == "suspect"
        return self.run("lease_suspect", [self.lease], *fence, "1-1")

    # --- looking at it -----------------------------------------------------------------------------------

    def look(self) -> Seen:
        keys = self.instance.keys
        commands = (
            ("HMGET", self.lease, "owner", "epoch"),
            ("XPENDING", self.stream, GROUP, "-", "+", 1000),
            ("ZRANGE", self.retry, 0, -1),
            ("XINFO", "GROUPS", self.stream),
            ("ZRANGE", keys.delayed(self.stream), 0, -1),
            ("HGETALL", keys.delayed_items(self.stream)),
            ("HKEYS", keys.replayed(self.stream)),
            *(("XRANGE", key, "-", "+") for key in (self.stream, self.outbox, self.letters)),
        )
        replies = self.wait(self.instance.link.call_many(self.stream, [pack(*command) for command in commands]))
        return Seen(*replies[:7], *map(entries_of, replies[7:]))

    def live_letters(self) -> dict[bytes, list[bytes]]:
        """The letters that nobody has given back yet."""
        seen = self.look()
        return {id: words for id, words in seen.letters if id not in seen.replayed}


def flat(rows: Any) -> list[Any]:
    return [word for row in rows for word in row]


def field_of(words: Sequence[bytes], name: bytes) -> bytes:
    return words[list(words[::2]).index(name) * 2 + 1]


def number(words: Sequence[bytes]) -> int:
    return int(field_of(words, b"payload"))


def packed_number(packed: bytes) -> int:
    """The payload in a packed list of words, all of them short."""
    digits = packed[packed.index(b"\xa7payload") + 8 :]
    return int(digits[1 : 1 + (digits[0] & 0x1F)])
