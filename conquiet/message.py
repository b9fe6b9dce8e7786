"""The records that the rooms hand to users."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, cast, final

from conquiet.errors import MalformedMessageError
from conquiet.kit import codec, entry_ids

__all__ = ["DATA", "EntryId", "Message", "Outgoing", "QueueMessage"]

DATA: Final = b"data"
"""The one field of a queue's entries."""

_UNREAD: Final = object()


@final
class QueueMessage:
    """One delivery of a stream entry; read-only.

    The payload is decoded when it is first touched. An entry that is not exactly one field ``data`` with a
    JSON object raises :class:`MalformedMessageError` there, each time, and can still be acknowledged.
    """

    # Not a frozen dataclass: that costs four times as much to make, the largest single cost of a batched read.
    __slots__ = ("_delivery_count", "_fields", "_group", "_id", "_payload", "_stream")

    def __init__(
        self, stream: str, group: str, id: str, fields: Sequence[bytes], delivery_count: int | None = None
    ) -> None:
        self._stream = stream
        self._group = group
        self._id = id
        self._fields = fields
        self._delivery_count = delivery_count
        self._payload: Any = _UNREAD

    @property
    def stream(self) -> str:
        """The stream's key."""
        return self._stream

    @property
    def group(self) -> str:
        """The consumer group that the entry was delivered to."""
        return self._group

    @property
    def id(self) -> str:
        """The entry's ID, ``ms-seq``."""
        return self._id

    @property
    def delivery_count(self) -> int | None:
        """How often the group has delivered this entry, this time included; ``None`` where it is not known."""
        return self._delivery_count

    @property
    def fields(self) -> tuple[bytes, ...]:
        """The entry as it is in Redis: names and values in turn."""
        return tuple(self._fields)

    @property
    def raw(self) -> bytes:
        """The undecoded payload; empty if the entry has no field ``data``."""
        fields = self._fields
        return next((fields[at + 1] for at in range(0, len(fields), 2) if fields[at] == DATA), b"")

    @property
    def payload(self) -> dict[str, Any]:
        """What was enqueued."""
        payload = self._payload
        if payload is _UNREAD:
            fields = self._fields
            if len(fields) != 2 or fields[0] != DATA:
                raise self._malformed(f"its fields are {_shown(fields[::2])}, not just 'data'")
            try:
                payload = codec.decode(fields[1])
            except codec.UNREADABLE as error:
                raise self._malformed(f"its data is not JSON ({error})") from error
            if not isinstance(payload, dict):
                raise self._malformed(f"its data is a JSON {type(payload).__name__}, not an object")
            self._payload = payload
        return payload  # type: ignore[no-any-return]

    def _malformed(self, reason: str) -> MalformedMessageError:
        return MalformedMessageError(self._stream, self._id, self._fields, reason)

    def __reduce__(self) -> tuple[type[QueueMessage], tuple[object, ...]]:
        return QueueMessage, (self._stream, self._group, self._id, self._fields, self._delivery_count)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, QueueMessage):
            return NotImplemented
        return (self._stream, self._group, self._id) == (other._stream, other._group, other._id)

    def __hash__(self) -> int:
        return hash((self._stream, self._group, self._id))

    def __repr__(self) -> str:
        return f"QueueMessage(stream={self._stream!r}, group={self._group!r}, id={self._id!r})"


def _shown(names: Sequence[bytes]) -> list[bytes]:
    """The beginnings of the first of them: strangers may have written many, and megabytes in each."""
    return [name[:100] for name in names[:10]]


class EntryId(str):
    """An entry's ID, ``ms-seq``, that also knows its ``partition``."""

    __slots__ = ("partition",)  # pyright: ignore[reportIncompatibleMethodOverride]

    partition: int  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleMethodOverride]

    def __new__(cls, id: str, partition: int) -> Self:
        """``id`` in ``partition``."""
        entry = super().__new__(cls, id)
        entry.partition = partition
        return entry

    def __reduce__(self) -> tuple[type[EntryId], tuple[str, int]]:
        return EntryId, (str(self), self.partition)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to be sent: its payload, and whatever else a single ``send`` takes."""

    payload: Any
    key: str | None = None
    headers: Mapping[str, str] | None = None
    message_id: str | None = None
    max_retries: int | None = None
    partition: int | None = None


class Message:
    """One delivery of a topic's message; read-only.

    ``retry_count`` is 0 at the first delivery. ``original_id`` and ``replayed_from`` name the entry that a
    requeued or replayed message began as, as ``partition/ms-seq``. ``epoch`` is the fencing token of the owner
    that got the message: it only ever grows, so a store that remembers the highest one can refuse a stale owner.
    """

    # Slots and plain attributes: this is made for each message, and a frozen dataclass costs four times as much.
    __slots__ = (
        "_entry",
        "_fields",
        "_headers",
        "epoch",
        "group",
        "id",
        "key",
        "max_retries",
        "partition",
        "payload",
        "replayed_from",
        "retry_count",
        "topic",
    )

    id: str
    topic: str
    partition: int
    group: str
    key: str | None
    payload: Any
    retry_count: int
    max_retries: int | None
    replayed_from: str | None
    epoch: int
    _entry: Sequence[bytes]
    _fields: dict[bytes, bytes] | None
    _headers: dict[str, str] | None

    @property
    def fields(self) -> Mapping[bytes, bytes]:
        """The entry as it is in Redis."""
        fields = self._fields
        if fields is None:
            entry = self._entry
            fields = self._fields = dict(zip(entry[::2], entry[1::2], strict=True))
        return fields

    @property
    def headers(self) -> Mapping[str, str]:
        """What the producer added, and ``partitionId``."""
        headers = self._headers
        if headers is None:
            raw = self.fields.get(b"headers")
            found: Any = codec.decode(raw) if raw else {}
            if not isinstance(found, dict):
                raise ValueError(f"its headers are a JSON {type(found).__name__}, not an object")
            headers = cast("dict[str, str]", found)
            headers["partitionId"] = str(self.partition)
            self._headers = headers
        return headers

    @property
    def timestamp(self) -> dt.datetime:
        """When it was produced, by the producer's clock; by the server's if the entry does not tell."""
        try:
            return dt.datetime.fromtimestamp(self.timestamp_ms / 1000, dt.UTC)
        except (OverflowError, OSError, ValueError):  # no producer's clock
            return dt.datetime.fromtimestamp(entry_ids.order(self.id)[0] / 1000, dt.UTC)

    @property
    def timestamp_ms(self) -> int:
        """The same in milliseconds since 1970."""
        entry = self._entry
        try:
            # Where conquiet's own producers put it, or wherever else.
            return int(entry[3] if len(entry) > 3 and entry[2] == b"timestamp" else self.fields[b"timestamp"])
        except (KeyError, ValueError):
            return entry_ids.order(self.id)[0]

    @property
    def original_id(self) -> str:
        """The entry that this message was at first, ``partition/ms-seq``; itself unless it was requeued."""
        raw = self.fields.get(b"originalMessageId")
        return raw.decode(errors="replace") if raw is not None else f"{self.partition}/{self.id}"

    @property
    def message_id(self) -> str | None:
        """The ID that the producer gave for de-duplication."""
        raw = self.fields.get(b"messageId")
        return None if raw is None else raw.decode(errors="replace")

    @property
    def raw(self) -> bytes:
        """The payload as it is in Redis."""
        return self.fields.get(b"payload", self.fields.get(DATA, b""))

    def __repr__(self) -> str:
        place = f"{self.topic!r}, partition={self.partition}, id={self.id!r}"
        return f"{type(self).__name__}(topic={place}, key={self.key!r}, retry_count={self.retry_count})"
