"""The records that the rooms hand to users."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

from conquiet.errors import MalformedMessageError
from conquiet.kit import codec

__all__ = ["DATA", "QueueMessage"]

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
                raise self._malformed(f"its fields are {fields[::2]}, not just 'data'")
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
