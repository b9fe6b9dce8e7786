"""Messages on their way: sorted by partition, each packed as the command that appends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from conquiet.errors import ConfigError, QueueError
from conquiet.kit import rules
from conquiet.kit.chunks import spans
from conquiet.message import Outgoing
from conquiet.topics.codec import Codec
from conquiet.topics.format import envelope
from conquiet.topics.format.partitioner import NAMED, Partitioner
from conquiet.topics.server import writes
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Topic
from conquiet.wire.scripts import Call
from conquiet.wire.streams import pack

__all__ = ["CHUNK", "CHUNK_BYTES", "Batch", "Destination", "Run", "named_partitioner"]

CHUNK: Final = 500
"""Messages of one round trip: as rows of one script call, they hold the server for about a millisecond."""
CHUNK_BYTES: Final = 1 << 20


def named_partitioner(topic: Topic) -> Partitioner:
    """A new partitioner of the kind that the topic's settings name."""
    if topic.partitioner not in NAMED:
        raise QueueError(f"this version does not know the partitioner {topic.partitioner!r} of topic {topic.name!r}")
    return NAMED[topic.partitioner]()


@dataclass(frozen=True, slots=True)
class Destination:
    """A partition, and how the commands begin that append a plain message to it."""

    partition: int
    stream: str
    without_key: bytes
    with_key: bytes

    @classmethod
    def to(cls, partition: int, stream: str) -> Destination:
        """A partition."""
        return cls(partition, stream, envelope.command_start(stream, False), envelope.command_start(stream, True))


@dataclass(slots=True)
class Run:
    """What goes to one partition, in order: each message's place among all, and how it is appended."""

    destination: Destination
    places: list[int] = field(default_factory=list[int])
    commands: list[bytes] = field(default_factory=list[bytes])
    calls: list[Call] = field(default_factory=list["Call"])
    """The same as ``commands`` where a script has to decide; else empty."""

    def chunks(self) -> Iterator[Run]:
        """Itself in runs that hold up neither side: by number, and by size."""
        for span in spans(list(map(len, self.commands)), CHUNK, CHUNK_BYTES):
            yield Run(self.destination, self.places[span], self.commands[span], self.calls[span])


class Batch:
    """Takes the messages of one call to ``send`` or ``send_batch``, in order.

    ``route`` tells the partition of a key, ``destination`` what goes with a partition. If it is ``guarded``, or the
    topic is bounded, a script appends each message. All of one call go the same way: script calls that the server
    does not know are sent again, behind what was not refused.
    """

    def __init__(
        self,
        instance: Instance,
        topic: Topic,
        codec: Codec,
        route: Partitioner,
        destination: Callable[[Topic, int], Destination],
        guard: writes.Window | None,
    ) -> None:
        self.runs: dict[int, Run] = {}
        self.topic = topic
        self._codec = codec
        self._encode = codec.encode
        self._route = route
        self._destination = destination
        self._append = None if guard is None else writes.appending(instance, topic, guard)
        self._now = envelope.now_ms()
        self._is_plain = guard is None and not topic.legacy and codec.name == "json"

    def is_plain(self, message: Outgoing) -> bool:
        """Whether its entry has no more than a payload, a timestamp and a key, and a plain ``XADD`` appends it."""
        return self._is_plain and message.headers is None and message.max_retries is None

    def pack(self, message: Outgoing, now: bytes) -> tuple[Destination, bytes]:
        """Where a plain message goes, and the command that appends it; leaves nothing behind here."""
        payload = self._encode(message.payload)
        if len(payload) > envelope.LARGEST:
            raise envelope.too_large(payload)
        text = message.key
        key = None if text is None else envelope.text_of("key", text)
        destination = self.destination_of(message)
        start = destination.without_key if key is None else destination.with_key
        return destination, envelope.command_of(start, payload, now, key)

    def add(self, at: int, message: Outgoing) -> None:
        """Put the message of place ``at`` behind the others that go to its partition."""
        if not self._is_plain or message.headers is not None or message.max_retries is not None:
            self._add_special(at, message)
            return
        destination, command = self.pack(message, self._now)
        run = self.runs.get(destination.partition)
        if run is None:
            run = self.runs[destination.partition] = Run(destination)
        run.places.append(at)
        run.commands.append(command)

    def _add_special(self, at: int, message: Outgoing) -> None:
        fields = envelope.fields_of(message, self._codec, self.topic.legacy)
        destination = self.destination_of(message)
        run = self.runs.get(destination.partition)
        if run is None:
            run = self.runs[destination.partition] = Run(destination)
        run.places.append(at)
        if self._append is None:
            run.commands.append(pack("XADD", destination.stream, "*", *fields))
            return
        call = self._append(destination.stream, message.message_id, fields)
        run.calls.append(call)
        run.commands.append(call.by_hash())

    def destination_of(self, message: Outgoing) -> Destination:
        """Where a message goes."""
        partitions, partition = self.topic.partitions, message.partition
        if partition is None:
            key = message.key if message.key is not None else message.message_id
            partition = 0 if partitions == 1 else self._route(key, partitions)
        elif rules.integer("partition", partition, least=0) >= partitions:
            raise ConfigError(f"partition must be less than {partitions}, not {partition}")
        return self._destination(self.topic, partition)
