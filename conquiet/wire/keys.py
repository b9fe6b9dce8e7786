"""Every key name of the topics room.

The names are the specification's with the placeholders filled in and without braces, so the partitions of a
topic spread over a Cluster. Whatever must change together with a partition carries that partition's stream key
as its hash tag: a key without braces hashes as a whole, so the tag puts it into the same slot.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from conquiet.errors import ConfigError

__all__ = ["Keys", "name"]

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,200}", re.ASCII)


def name(what: str, value: object) -> str:
    """``value`` if it can be the name of a topic, a group or a consumer."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ConfigError(f"{what} must be 1 to 200 letters, digits, '.', '_' or '-', not {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one instance; ``namespace`` sets it apart from others on the same server."""

    namespace: str = ""

    def __post_init__(self) -> None:
        if self.namespace:
            name("namespace", self.namespace)

    @property
    def registry(self) -> str:
        """SET of all topics."""
        return self._under("streaming:mq:topics:registry")

    def meta(self, topic: str) -> str:
        """HASH that makes a topic: its partition count, times, policies and growth."""
        return self._under(f"streaming:mq:topic:{topic}:meta")

    def partitions(self, topic: str) -> str:
        """SET of the topic's stream keys, for people and tools."""
        return self._under(f"streaming:mq:topic:{topic}:partitions")

    def groups(self, topic: str) -> str:
        """SET of the groups that ever subscribed, so that nothing has to be searched for."""
        return self._under(f"streaming:mq:topic:{topic}:groups")

    def partition(self, topic: str, index: int) -> str:
        """STREAM of one partition."""
        return self._under(f"stream:topic:{topic}:p:{index}")

    def bare(self, topic: str) -> str:
        """The stream that a topic's name alone means, where there is no such topic."""
        return self._under(topic)

    def dead_letters(self, topic: str) -> str:
        """STREAM of the topic's dead letters."""
        return self._under(f"stream:topic:{topic}:dlq")

    def forwarded(self, topic: str) -> str:
        """HASH of dead letters that were just forwarded, in the slot of the dead letters."""
        return self._beside("forwarded", self.dead_letters(topic))

    def members(self, topic: str, group: str) -> str:
        """ZSET of a group's live consumers and when each was last heard of."""
        return self._under(f"streaming:mq:members:{{{topic}:{group}}}")

    def members_info(self, topic: str, group: str) -> str:
        """HASH of what each live consumer can take."""
        return f"{self.members(topic, group)}:info"

    def generation(self, topic: str, group: str) -> str:
        """Counter of everything that asks the group's members to look again."""
        return f"{self.members(topic, group)}:generation"

    def lease(self, stream: str, group: str) -> str:
        """HASH: who owns the partition for the group, in which epoch, until when."""
        return self._beside("lease", stream, group)

    def retry(self, stream: str, group: str) -> str:
        """ZSET of parked entries by due time."""
        return self._beside("retry", stream, group)

    def attempts(self, stream: str, group: str) -> str:
        """HASH of failures and crashes by entry."""
        return self._beside("attempts", stream, group)

    def outbox(self, stream: str, group: str) -> str:
        """STREAM of dead letters on their way to the topic's dead-letter stream."""
        return self._beside("dead", stream, group)

    def delayed(self, stream: str) -> str:
        """ZSET of entries that are not in the stream yet, by due time."""
        return self._beside("delayed", stream)

    def delayed_items(self, stream: str) -> str:
        """HASH of what these entries hold."""
        return f"{self.delayed(stream)}:items"

    def dedup(self, stream: str) -> str:
        """ZSET of recent message IDs by time."""
        return self._beside("dedup", stream)

    def dedup_ids(self, stream: str) -> str:
        """HASH from message ID to entry ID."""
        return f"{self.dedup(stream)}:ids"

    def replayed(self, stream: str) -> str:
        """HASH of dead letters whose replay has begun."""
        return self._beside("replayed", stream)

    def trim(self, stream: str) -> str:
        """HASH: what retention has removed."""
        return self._beside("trim", stream)

    def of_partition(self, stream: str) -> list[str]:
        """Every key of a partition that belongs to no group, the stream first."""
        beside = (self.delayed, self.delayed_items, self.dedup, self.dedup_ids, self.replayed, self.trim)
        return [stream, *(key(stream) for key in beside)]

    def of_group(self, stream: str, group: str) -> list[str]:
        """Every key that a group has beside a partition, the lease first."""
        return [key(stream, group) for key in (self.lease, self.retry, self.attempts, self.outbox)]

    def _under(self, key: str) -> str:
        return f"{self.namespace}:{key}" if self.namespace else key

    def _beside(self, what: str, stream: str, group: str | None = None) -> str:
        tail = "" if group is None else f":{group}"
        return self._under(f"streaming:mq:{what}:{_tagged(stream)}{tail}")


def _tagged(stream: str) -> str:
    """``stream`` with a hash tag that puts it into its own slot, also when it has braces of its own."""
    start = stream.find("{")
    end = stream.find("}", start + 1)
    if start >= 0 and end > start + 1:
        return f"{stream[start : end + 1]}:{stream}"
    if "}" in stream:  # it would end the tag early
        raise ConfigError(f"no other key can be put beside {stream!r} in a Cluster, because of its '}}'")
    return f"{{{stream}}}"
