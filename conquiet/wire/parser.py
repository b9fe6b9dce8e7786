"""The reply parser of every connection: redis-py's hiredis one, with a way to take many replies at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from redis._parsers.hiredis import NOT_ENOUGH_DATA, _AsyncHiredisParser

__all__ = ["Reply", "ReplyParser"]

Reply: TypeAlias = Any
"""What Redis answered, undecoded; an error answer is an exception *object*, not raised."""


class ReplyParser(_AsyncHiredisParser):
    """Takes replies in bulk, with errors as values.

    redis-py reads one reply a call and arms a timer for each: a third of the cost of a pipeline. Used through
    redis-py's own hook for parsers (``parser_class``); the handshake still goes through ``read_response``.
    """

    __slots__ = ()

    async def read_replies(self, count: int, moved: Callable[[], None] | None = None) -> list[Reply]:
        """The next ``count`` replies, in the order of their commands; ``moved`` is called when a part has come."""
        reader: Any = self._reader
        gets: Callable[[bool], Reply] = reader.gets
        replies: list[Reply] = []
        is_begun = False
        while len(replies) < count:
            reply = gets(False)
            if reply is not NOT_ENOUGH_DATA:
                replies.append(reply)
                continue
            if is_begun and moved is not None:
                moved()
            await self.read_from_socket()  # type: ignore[no-untyped-call]
            is_begun = True
        return replies

    def has_more(self) -> bool:
        """Whether the server has sent more than was taken. An asyncio stream has no public way to ask for that."""
        reader: Any = self._reader
        stream: Any = self._stream
        return bool(stream._buffer or reader.has_data())

    def is_quiet(self) -> bool:
        """Whether the server has neither sent anything unasked nor closed the connection."""
        reader: Any = self._reader
        stream: Any = self._stream
        return not (stream._buffer or reader.has_data() or stream.at_eof() or stream.exception())
