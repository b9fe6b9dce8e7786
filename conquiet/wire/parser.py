"""The reply parser of every connection: redis-py's hiredis one, with a way to take many replies at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

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

    async def read_replies(self, count: int) -> list[Reply]:
        """The next ``count`` replies, in the order of their commands."""
        gets: Callable[[bool], Reply] = cast("Any", self._reader).gets
        replies: list[Reply] = []
        while len(replies) < count:
            reply = gets(False)
            if reply is NOT_ENOUGH_DATA:
                await self.read_from_socket()  # type: ignore[no-untyped-call]
            else:
                replies.append(reply)
        return replies

    def is_quiet(self) -> bool:
        """Whether the server has neither sent anything unasked nor closed the connection."""
        reader, stream = cast("Any", self._reader), cast("Any", self._stream)
        return not (reader.has_data() or stream.at_eof() or stream.exception())
