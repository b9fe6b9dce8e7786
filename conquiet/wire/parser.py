"""Taking the replies of a connection, many at once where that can be done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias

import hiredis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, RedisError, ResponseError

__all__ = ["BulkReplies", "PlainReplies", "Replies", "Reply"]

Reply: TypeAlias = Any
"""What Redis answered, undecoded; an error answer is an exception *object*, not raised."""

_READ_SIZE: Final = 1 << 17
_NOT_ENOUGH: Final = object()


class Replies(Protocol):
    """The replies of one connection, with errors as values."""

    async def read_replies(self, count: int, moved: Callable[[], None] | None = None) -> list[Reply]:
        """The next ``count`` replies, in the order of their commands; ``moved`` is called when a part has come."""
        ...

    def has_more(self) -> bool:
        """Whether the server has sent more than was taken, as far as is known."""
        ...

    def is_quiet(self) -> bool:
        """Whether the server has neither sent anything unasked nor closed the connection, as far as is known."""
        ...


class BulkReplies:
    """Takes replies in bulk from a connection's stream.

    redis-py reads one reply a call and arms a timer for each: a third of the cost of a pipeline. ``error_of`` makes an
    exception of the text of an error reply.
    """

    __slots__ = ("_buffer", "_gets", "_reader", "_stream")

    def __init__(self, stream: asyncio.StreamReader, error_of: Callable[[str], Exception]) -> None:
        self._stream = stream
        self._buffer: bytearray = stream._buffer  # type: ignore[attr-defined]  # there is no public way to ask
        self._reader: Any = hiredis.Reader(
            protocolError=InvalidResponse,
            replyError=error_of,
            notEnoughData=_NOT_ENOUGH,
        )
        self._gets: Callable[[bool], Reply] = self._reader.gets

    async def read_replies(self, count: int, moved: Callable[[], None] | None = None) -> list[Reply]:
        """As :meth:`Replies.read_replies`."""
        gets = self._gets
        replies: list[Reply] = []
        is_begun = False
        while len(replies) < count:
            reply = gets(False)
            if reply is not _NOT_ENOUGH:
                replies.append(reply)
                continue
            if is_begun and moved is not None:
                moved()
            data = await self._stream.read(_READ_SIZE)
            if not data:
                raise RedisConnectionError("Connection closed by server.")
            self._reader.feed(data)
            is_begun = True
        return replies

    def has_more(self) -> bool:
        """As :meth:`Replies.has_more`."""
        return bool(self._buffer or self._reader.has_data())

    def is_quiet(self) -> bool:
        """As :meth:`Replies.is_quiet`."""
        stream = self._stream
        return not (self._buffer or self._reader.has_data() or stream.at_eof() or stream.exception())


class PlainReplies:
    """Takes replies one by one, as redis-py's users do: for a version of it whose inner parts are not known."""

    def __init__(self, connection: AbstractConnection) -> None:
        self._connection = connection

    async def read_replies(self, count: int, moved: Callable[[], None] | None = None) -> list[Reply]:
        """As :meth:`Replies.read_replies`; a server that is still loading is raised."""
        replies: list[Reply] = []
        while len(replies) < count:
            try:
                replies.append(await self._connection.read_response(disable_decoding=True, disconnect_on_error=False))
            except ResponseError as error:
                replies.append(error)
            if moved is not None:
                moved()
        return replies

    def has_more(self) -> bool:
        """As :meth:`Replies.has_more`."""
        asking = self._connection.can_read()
        try:
            asking.send(None)  # it looks at what is here, and waits for nothing
        except StopIteration as answer:
            return bool(answer.value)
        except (RedisError, OSError):
            return True
        asking.close()
        return False

    def is_quiet(self) -> bool:
        """As :meth:`Replies.is_quiet`."""
        return self._connection.is_connected and not self.has_more()
