"""Consumer groups: creating one that may exist."""

from __future__ import annotations

from conquiet.wire import streams
from conquiet.wire.capabilities import has_group_already, is_demoted
from conquiet.wire.connections import Connections

__all__ = ["create_group", "is_group_there"]


async def create_group(link: Connections, stream: str, group: str, start: str) -> Exception | None:
    """Create ``group`` at ``start``, and the stream if need be; what the server says if it is not there then.

    A server whose memory is full, or a user without that right, is refused though the group exists: it is looked for.
    """
    [reply] = await link.call_many(stream, (streams.xgroup_create(stream, group, start),))
    if not isinstance(reply, Exception) or has_group_already(reply):
        return None
    if is_demoted(reply):
        return reply  # a replica: what is there may be so no longer
    return None if await is_group_there(link, stream, group) else reply


async def is_group_there(link: Connections, stream: str, group: str) -> bool:
    """Whether the stream has the group; not if it is no stream."""
    [groups] = await link.call_many(stream, (streams.xinfo_groups(stream),))
    return not isinstance(groups, Exception) and streams.group_named(groups, group) is not None
