"""The members of a group: how a consumer becomes one, stays one, and learns that others came or went."""

from __future__ import annotations

from typing import Final

from conquiet.kit import codec
from conquiet.topics.consume.assignment import Seat
from conquiet.topics.options import SubscribeOptions
from conquiet.topics.server.instance import Instance
from conquiet.wire.connections import Connections
from conquiet.wire.scripts import Script, run
from conquiet.wire.streams import pack

__all__ = ["Membership"]

_BEAT: Final = Script.named("member_beat")
_LEAVE: Final = Script.named("member_leave")


class Membership:
    """One consumer's membership of one group. It runs out by itself after the lease's time without a beat."""

    def __init__(self, instance: Instance, group: str, me: str, options: SubscribeOptions) -> None:
        self._instance = instance
        self._group = group
        self._me = me
        self._ttl_ms = round(options.lease_ttl * 1000)
        self._about = codec.encode(
            {
                "most": options.max_partitions,
                "modulo": options.partition_modulo,
                "remainder": options.partition_remainder,
                "ttl_ms": self._ttl_ms,
            }
        )
        self._generation = b""

    async def renew(self, topic: str) -> tuple[int, list[Seat]]:
        """Stay a member, or become one; the server's time in milliseconds, and all members."""
        now, self._generation, seats = await self._beat(self._instance.link, topic)
        return now, seats

    async def beat(self, link: Connections, topic: str) -> None:
        """Stay a member, over ``link``, which may belong to another event loop."""
        await self._beat(link, topic)

    async def has_changed(self, topic: str) -> bool:
        """Whether a member came, went or gave a partition up since the last :meth:`renew`: one GET."""
        key = self._instance.keys.generation(topic, self._group)
        # One that a deletion left behind runs out though there is a group of that name again.
        generation = await self._instance.link.call(key, pack("GET", key)) or b"0"
        return bool(generation != self._generation)

    async def was_deleted(self, topic: str) -> bool:
        """Whether the group was deleted with its topic a moment ago: then its generation has a time to live."""
        key = self._instance.keys.generation(topic, self._group)
        return bool(await self._instance.link.call(key, pack("PTTL", key)) > 0)

    async def end(self, topic: str) -> None:
        """Be a member no more; the others notice at once."""
        keys = self._keys(topic)
        await self._instance.insist(keys[0], _LEAVE(keys, self._me))

    async def _beat(self, link: Connections, topic: str) -> tuple[int, bytes, list[Seat]]:
        keys = self._keys(topic)
        call = _BEAT(keys, self._me, self._about, self._ttl_ms, self._instance.clock.offset_ms)
        now, generation, *members = await run(link, keys[0], call)
        return int(now), generation, [_seat(*pair) for pair in zip(members[::2], members[1::2], strict=True)]

    def _keys(self, topic: str) -> list[str]:
        keys, names = self._instance.keys, (topic, self._group)
        return [keys.members(*names), keys.members_info(*names), keys.generation(*names)]


def _seat(member: bytes, about: bytes) -> Seat:
    info = codec.decode(about)
    return Seat(member.decode(), info.get("most"), info.get("modulo"), info.get("remainder"))
