"""Every key name of the topics and jobs rooms.

In the topics room they are the specification's with the placeholders filled in and without braces, so the partitions
of a topic spread over a Cluster. Whatever must change together with a partition carries that partition's stream key
as its hash tag: a key without braces hashes as a whole, so the tag puts it into the same slot. In the jobs room a
queue lies in one slot as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class JobKeys:
    """The keys of one queue of jobs, all in one slot. What they hold is written down in the scripts' fragments."""

    queue: str
    namespace: str = ""

    def __post_init__(self) -> None:
        name("queue", self.queue)
        if self.namespace:
            name("namespace", self.namespace)

    @property
    def jobs(self) -> str:
        """HASH from a job's ID to what was enqueued; written once."""
        return self._key("jobs")

    @property
    def records(self) -> str:
        """HASH from a job's ID to what has become of it; nothing while it was never claimed."""
        return self._key("records")

    @property
    def errors(self) -> str:
        """HASH from a job's ID to its last error and its failed attempts."""
        return self._key("errors")

    @property
    def ready(self) -> str:
        """ZSET of all that can be claimed now, in claim order: one score, so the members' order counts."""
        return self._key("ready")

    @property
    def retries(self) -> str:
        """ZSET of those of them that were tried before, likewise."""
        return self._key("retries")

    @property
    def delayed(self) -> str:
        """ZSET of jobs whose time has not come, by that time."""
        return self._key("delayed")

    @property
    def put_off(self) -> str:
        """ZSET of the same jobs, in claim order."""
        return self._key("put_off")

    @property
    def leases(self) -> str:
        """ZSET of jobs in flight by the end of their leases."""
        return self._key("leases")

    @property
    def held(self) -> str:
        """ZSET of the same jobs by their sequence, which no renewal changes."""
        return self._key("held")

    @property
    def succeeded(self) -> str:
        """ZSET of succeeded jobs, in the order in which they did: one score."""
        return self._key("succeeded")

    @property
    def failed(self) -> str:
        """ZSET of failed jobs, likewise."""
        return self._key("failed")

    @property
    def sequence(self) -> str:
        """Counter of all jobs that were ever added."""
        return self._key("sequence")

    @property
    def highest(self) -> str:
        """The highest token of any claim."""
        return self._key("highest")

    @property
    def waits(self) -> str:
        """ZSET of the priorities in ``ready``, each by a moment no later than that since which its first job waits."""
        return self._key("waits")

    @property
    def news(self) -> str:
        """STREAM of one entry: its ID changes when there is something to claim where nothing was."""
        return self._key("news")

    @property
    def ended(self) -> str:
        """STREAM of the IDs of jobs that ended, as long as somebody waits for one."""
        return self._key("ended")

    @property
    def watched(self) -> str:
        """Is there, for a while, if somebody waits for a job to end."""
        return self._key("watched")

    def all(self) -> list[str]:
        """Every key of the queue, in the order in which each script of the room takes them."""
        jobs = [self.jobs, self.records, self.errors]
        lines = [self.ready, self.retries, self.delayed, self.put_off, self.leases, self.held]
        counters = [self.sequence, self.highest]
        return [*jobs, *lines, self.succeeded, self.failed, *counters, self.news, self.ended, self.watched, self.waits]

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
    def owners(self) -> str:
        """HASH from stream to its entry ID, epoch and owner."""
        return self._beside("owner")

    @property
    def leases(self) -> str:
        """ZSET of streams by the deadline of their lease."""
        return self._beside("lease")

    @property
    def epochs(self) -> str:
        """Counter of epochs; never removed."""
        return self._beside("epoch")

    @property
    def positions(self) -> str:
        """HASH from stream to the ID up to which it was read."""
        return self._beside("pos")

    @property
    def bad(self) -> str:
        """STREAM of entries that were set aside."""
        return self._beside("bad")

    @property
    def members(self) -> str:
        """ZSET of consumers by the time of their last sign of life."""
        return self._beside("members")

    @property
    def rooms(self) -> str:
        """HASH from consumer to how many more streams it would take over."""
        return self._beside("room")

    @property
    def news(self) -> str:
        """STREAM of one entry, which wakes those who wait for released streams."""
        return self._beside("news")

    @property
    def mutex(self) -> str:
        """How the STRINGs begin that show, for each stream, who owns it."""
        return f"{self._beside('mutex')}:"

    def _beside(self, what: str) -> str:
        return f"{what}:{{{self.input}}}"
