"""Members of a group: typed calls of the scripts by which a consumer becomes one, stays one, and hears of others."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from conquiet.kit import codec
from conquiet.topics.options import SubscribeOptions
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Registry
from conquiet.wire.scripts import Call, Script
from conquiet.wire.streams import pack

__all__ = ["Gathering", "Identity", "Members"]

_BEAT: Final = Script.named("member_beat")
_LEAVE: Final = Script.named("member_leave")


@dataclass(frozen=True, slots=True)
class Gathering:
    """The members of a group at one moment of the server's time, in milliseconds, and what each says of itself."""

    now: int
    generation: bytes
    members: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Identity:
    """A consumer: where it is, in which group, under which name in Redis, and what it wants."""

    instance: Instance
    registry: Registry
    group: str
    me: str
    options: SubscribeOptions


class Members:
    """The members of one group, as one of them sees and calls them. It is one for the lease's time after a beat."""

    def __init__(self, who: Identity) -> None:
        self._instance = who.instance
        self._group = who.group
        self._me = who.me
        options = who.options
        self._ttl_ms = round(options.lease_ttl * 1000)
        pin = {"modulo": options.partition_modulo, "remainder": options.partition_remainder}
        self._about = codec.encode({"most": options.max_partitions, **pin, "ttl_ms": self._ttl_ms})

    def beat(self, topic: str, how: str = "alone") -> tuple[str, Call]:
        """The call that makes or keeps it a member, with its first key."""
        keys = self._keys(topic)
        return keys[0], _BEAT(keys, self._me, self._about, self._ttl_ms, self._instance.clock.offset_ms, how)

    async def renew(self, topic: str) -> Gathering:
        """Become or stay a member, and see the others."""
        now, generation, *rest = await self._instance.run(*self.beat(topic, "together"))
        members = {name.decode(): codec.decode(about) for name, about in zip(rest[::2], rest[1::2], strict=True)}
        return Gathering(int(now), generation, members)

    async def generations(self, topics: Sequence[str]) -> list[bytes]:
        """By topic, what changes when a member comes, goes or gives a partition up; in one write a node."""
        link, keys = self._instance.link, [self._instance.keys.generation(topic, self._group) for topic in topics]
        if len(keys) > 1 and link.address.kind != "cluster":
            found = await link.call(keys[0], pack("MGET", *keys))
        else:
            found = await asyncio.gather(*(link.call(key, pack("GET", key)) for key in keys))
        # One that a deletion left behind runs out though there is a group of that name again.
        return [generation or b"0" for generation in found]

    async def was_deleted(self, topic: str) -> bool:
        """Whether the group was deleted with its topic a moment ago: then its generation has a time to live."""
        key = self._instance.keys.generation(topic, self._group)
        return bool(await self._instance.link.call(key, pack("PTTL", key)) > 0)

    async def end(self, topics: Sequence[str]) -> None:
        """Be a member no more; the others notice at once."""
        keys = [self._keys(topic) for topic in topics]
        await self._instance.insist([(some[0], _LEAVE(some, self._me)) for some in keys])

    def _keys(self, topic: str) -> list[str]:
        keys, names = self._instance.keys, (topic, self._group)
        return [keys.members(*names), keys.members_info(*names), keys.generation(*names)]
