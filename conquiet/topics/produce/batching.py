"""Messages on their way: sorted by partition, each packed as the command that appends it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from conquiet.errors import ConfigError
from conquiet.kit import rules
from conquiet.message import Outgoing
from conquiet.topics.codec import Codec
from conquiet.topics.format import envelope
from conquiet.topics.server.topics import Topic
from conquiet.wire import streams
from conquiet.wire.scripts import Call
from conquiet.wire.streams import pack

__all__ = ["Destination", "Packing", "Run", "now_ms"]

_CHUNK: Final = 500
_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Destination:
    """A partition, and what is the same for all messages that go there."""

    partition: int
    stream: str
    without_key: bytes
    with_key: bytes

    @classmethod
    def to(cls, partition: int, stream: str) -> Destination:
        """A partition."""
        heads = (streams.xadd_message_head(stream, 2), streams.xadd_message_head(stream, 3))
        return cls(partition, stream, *heads)


@dataclass(slots=True)
class Run:
    """What goes to one partition, in order: each message's place among all, and how it is appended."""

    destination: Destination
    places: list[int] = field(default_factory=list[int])
    commands: list[bytes] = field(default_factory=list[bytes])
    calls: list[Call] = field(default_factory=list["Call"])
    """The same as ``commands`` where a script has to decide; else empty."""

    @property
    def partition(self) -> int:
        """Where it goes."""
        return self.destination.partition

    @property
    def stream(self) -> str:
        """The key of that partition."""
        return self.destination.stream

    def chunks(self) -> Iterator[Run]:
        """Itself in runs that hold neither side up: by number, and by size."""
        if len(self.commands) <= _CHUNK and sum(map(len, self.commands)) <= _CHUNK_BYTES:
            yield self
            return
        start = size = 0
        for at, command in enumerate(self.commands):
            if at > start and (at - start >= _CHUNK or size + len(command) > _CHUNK_BYTES):
                yield self._part(start, at)
                start, size = at, 0
            size += len(command)
        yield self._part(start, len(self.commands))

    def _part(self, start: int, end: int) -> Run:
        parts = self.places[start:end], self.commands[start:end], self.calls[start:end]
        return Run(self.destination, *parts)


class Packing:
    """Takes the messages of one call to ``send`` or ``send_batch``, in order.

    ``route`` tells the partition of a key, ``destination`` what goes with a partition, ``guard`` makes the script
    call for a message that a plain ``XADD`` is not enough for. All of one call go the same way: calls of a script that
    the server forgot are sent again, behind what was not refused.
    """

    def __init__(
        self,
        topic: Topic,
        codec: Codec,
        route: Callable[[str | None, int], int],
        destination: Callable[[Topic, int], Destination],
        guard: Callable[[Topic, str, str, Sequence[bytes | str | int]], Call],
        guarded: bool,
    ) -> None:
        self.runs: dict[int, Run] = {}
        self.topic = topic
        self._codec = codec
        self._encode = codec.encode
        self._route = route
        self._destination = destination
        self._guard = guard
        self._is_guarded = guarded or topic.retention.on_full != "grow"
        self._now = now_ms()
        self._is_plain = not self._is_guarded and not topic.legacy and codec.name == "json"

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
        destination = self._destination(self.topic, self._partition(message))
        head = destination.without_key if key is None else destination.with_key
        return destination, streams.xadd_message(head, payload, now, key)

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
        partition = self._partition(message)
        run = self.runs.get(partition)
        if run is None:
            run = self.runs[partition] = Run(self._destination(self.topic, partition))
        run.places.append(at)
        if self._is_guarded:
            call = self._guard(self.topic, run.stream, message.message_id or "", fields)
            run.calls.append(call)
            run.commands.append(call.by_hash())
        else:
            run.commands.append(pack("XADD", run.stream, "*", *fields))

    def _partition(self, message: Outgoing) -> int:
        partitions = self.topic.partitions
        if message.partition is not None:
            return _within(message.partition, partitions)
        if partitions == 1:
            return 0
        return self._route(message.key if message.key is not None else message.message_id, partitions)


def now_ms() -> bytes:
    """The time of sending, as entries hold it."""
    return b"%d" % (time.time() * 1000)


def _within(partition: object, partitions: int) -> int:
    index = rules.integer("partition", partition, least=0)
    if index >= partitions:
        raise ConfigError(f"partition must be less than {partitions}, not {index}")
    return index
