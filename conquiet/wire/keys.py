"""Every key name of the topics and jobs rooms.

In the topics room they are the specification's with the placeholders filled in and without braces, so the partitions
of a topic spread over a Cluster. Whatever must change together with a partition carries that partition's stream key
as its hash tag: a key without braces hashes as a whole, so the tag puts it into the same slot. In the jobs room a
queue lies in one slot as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self, overload

from conquiet.errors import ConfigError
from conquiet.kit.rules import name

__all__ = ["BalanceKeys", "JobKeys", "Keys", "name"]


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

    def replayed_gone(self, stream: str) -> str:
        """ZSET of replayed dead letters that are removed, and that another replay may have at hand; runs out."""
        return f"{self.replayed(stream)}:gone"

    def trim(self, stream: str) -> str:
        """HASH: what retention has removed."""
        return self._beside("trim", stream)

    def written(self, stream: str, write: str, batch: int) -> str:
        """HASH or SET of what a repeatable write has put into a partition; runs out by itself."""
        return self._beside("written", stream, f"{write}:{batch}")

    def write(self, topic: str, write: str) -> str:
        """HASH: how far a repeatable write to a topic has come."""
        return self._under(f"streaming:mq:topic:{topic}:write:{write}")

    def of_partition(self, stream: str) -> list[str]:
        """Every key of a partition that belongs to no group, the stream first."""
        beside = (self.delayed, self.delayed_items, self.dedup, self.dedup_ids, self.replayed, self.replayed_gone)
        return [stream, *(key(stream) for key in (*beside, self.trim))]

    def of_group(self, stream: str, group: str) -> list[str]:
        """Every key that a group has beside a partition, the lease first."""
        return [key(stream, group) for key in (self.lease, self.retry, self.attempts, self.outbox)]

    def _under(self, key: str) -> str:
        return f"{self.namespace}:{key}" if self.namespace else key

    def _beside(self, what: str, stream: str, group: str | None = None) -> str:
        tail = "" if group is None else f":{group}"
        return self._under(f"streaming:mq:{what}:{_tagged(stream)}{tail}")


class _Key(property):
    """The full name of one key, which is documented by what it ``holds``."""

    def __init__(self, what: str, holds: str) -> None:
        super().__init__(lambda keys: keys._key(what))
        self.__doc__ = holds  # which ``property`` would take from this class

    @overload
    def __get__(self, keys: None, owner: type, /) -> Self: ...

    @overload
    def __get__(self, keys: Any, owner: type | None = None, /) -> str: ...

    def __get__(self, keys: Any, owner: type | None = None, /) -> Any:
        return super().__get__(keys, owner)


@dataclass(frozen=True, slots=True)
class JobKeys:
    """The keys of one queue of jobs, all in one slot. What they hold is written down in the scripts' fragments."""

    queue: str
    namespace: str = ""

    jobs = _Key("jobs", "HASH from a job's ID to what was enqueued; written once.")
    records = _Key("records", "HASH from a job's ID to what has become of it; nothing while it was never claimed.")
    errors = _Key("errors", "HASH from a job's ID to its last error and its failed attempts.")
    ready = _Key(
        "ready", "ZSET of all that can be claimed now, in claim order: one score, so the members' order counts."
    )
    retries = _Key("retries", "ZSET of those of them that were tried before, likewise.")
    delayed = _Key("delayed", "ZSET of jobs whose time has not come, by that time.")
    put_off = _Key("put_off", "ZSET of the same jobs, in claim order.")
    leases = _Key("leases", "ZSET of jobs in flight by the end of their leases.")
    held = _Key("held", "ZSET of the same jobs by their sequence, which no renewal changes.")
    succeeded = _Key("succeeded", "ZSET of succeeded jobs, in the order in which they did: one score.")
    failed = _Key("failed", "ZSET of failed jobs, likewise.")
    sequence = _Key("sequence", "Counter of all jobs that were ever added.")
    highest = _Key("highest", "The highest token of any claim.")
    waits = _Key(
        "waits",
        "ZSET of the priorities in ``ready``, each by a moment no later than that since which its first job waits.",
    )
    news = _Key(
        "news", "STREAM of one entry: its ID changes when there is something to claim that no store was told of."
    )
    idle = _Key("idle", "ZSET of the stores at which a worker waits for jobs, by the time until which they count.")
    alarm = _Key("alarm", "The next moment at which something falls due, and the store that looks then; expires.")
    ended = _Key("ended", "STREAM of the IDs of jobs that ended, as long as a caller waits for one.")
    watched = _Key("watched", "Is there, for a while, if a caller waits for a job to end.")

    def __post_init__(self) -> None:
        name("queue", self.queue)
        if self.namespace:
            name("namespace", self.namespace)

    def news_of(self, store: str) -> str:
        """STREAM of a few entries, each of which tells one store that there are jobs for it; expires."""
        return f"{self.news}:{store}"

    def all(self) -> list[str]:
        """Every key of the queue, in the order in which each script of the room takes them."""
        jobs = [self.jobs, self.records, self.errors]
        lines = [self.ready, self.retries, self.delayed, self.put_off, self.leases, self.held]
        counters = [self.sequence, self.highest]
        words = [self.news, self.ended, self.watched]
        return [*jobs, *lines, self.succeeded, self.failed, *counters, *words, self.waits, self.idle, self.alarm]

    def _key(self, what: str) -> str:
        key = f"conquiet:jobs:{{{self.queue}}}:{what}"
        return f"{self.namespace}:{key}" if self.namespace else key


def _tagged(stream: str) -> str:
    """``stream`` with a hash tag that puts it into its own slot, also when it has braces of its own."""
    start = stream.find("{")
    end = stream.find("}", start + 1)
    if start >= 0 and end > start + 1:
        return f"{stream[start : end + 1]}:{stream}"
    if "}" in stream:  # it would end the tag early
        raise ConfigError(f"no other key can be put beside {stream!r} in a Cluster, because of its '}}'")
    return f"{{{stream}}}"


@dataclass(frozen=True, slots=True)
class BalanceKeys:
    """The keys of one service whose streams are balanced; all of them in the slot of its input stream."""

    service: str

    owners = _Key("owner", "HASH from stream to its entry ID, epoch and owner.")
    leases = _Key("lease", "ZSET of streams by the deadline of their lease.")
    epochs = _Key("epoch", "Counter of epochs; never removed.")
    positions = _Key("pos", "HASH from stream to the ID up to which it was read.")
    bad = _Key("bad", "STREAM of entries that were set aside.")
    members = _Key("members", "ZSET of consumers by the time of their last sign of life.")
    rooms = _Key("room", "HASH from consumer to how many more streams it would take over.")
    news = _Key("news", "STREAM of one entry, which wakes those who wait for released streams.")

    def __post_init__(self) -> None:
        name("service", self.service)

    @property
    def input(self) -> str:
        """STREAM of the streams that were handed in, one entry each until it is finished."""
        return f"{self.service}-input"

    @property
    def group(self) -> str:
        """The consumer group on the input stream; no key."""
        return f"{self.service}-group"

    @property
    def mutex(self) -> str:
        """How the STRINGs begin that show, for each stream, who owns it."""
        return f"{self._key('mutex')}:"

    def _key(self, what: str) -> str:
        return f"{what}:{{{self.input}}}"
