"""Looking at a server past the library: one command on a connection of its own.

A URL may be that of a Cluster. A command goes to the node that has its key then, or to any, if it has none.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import MovedError

from tests.rigs.waiting import eventually

__all__ = ["ask", "blocked", "comes_to_rest", "entries", "keys_like", "lasting_keys", "next_millisecond", "nodes_of"]
__all__ += ["pending", "round_trips"]

_DAY: Final = 86_400_000
_CLUSTER: Final = "redis+cluster://"


def nodes_of(url: str) -> list[str]:
    """The URL of each server behind ``url``, as if it stood alone."""
    if not url.startswith(_CLUSTER):
        return [url]
    return [f"redis://{place}" for place in url.removeprefix(_CLUSTER).split(",")]


async def ask(url: str, *command: str | int, **options: Any) -> Any:
    """The answer to ``command``, as redis-py gives it, in text; ``options`` are for redis-py's reader of it."""
    try:
        return await _ask(nodes_of(url)[0], *command, **options)
    except MovedError as elsewhere:
        if not url.startswith(_CLUSTER):
            raise
        return await _ask(f"redis://{elsewhere.host}:{elsewhere.port}", *command, **options)


async def _ask(url: str, *command: str | int, **options: Any) -> Any:
    # Without its name: else redis-py reads its own version from the disk each time, and tells it in two commands.
    how: dict[str, Any] = {"protocol": 2, "decode_responses": True, "driver_info": None}
    async with Redis.from_url(url, retry=Retry(NoBackoff(), 0), **how) as client:
        return await client.execute_command(*command, **options)  # type: ignore[no-untyped-call]


async def round_trips(url: str, count: int = 5) -> None:
    """Return after so many commands, one after another: what was sent before the first is answered by then."""
    for _ in range(count):
        await ask(url, "PING")


async def comes_to_rest(url: str, count: Callable[[], int], what: str) -> None:
    """Return once ``count`` stays what it is for the time of some answers of the server."""

    async def rests() -> bool:
        before = count()
        await round_trips(url, 20)
        return count() == before

    await eventually(rests, f"{what} to come to rest")


async def next_millisecond(url: str) -> None:
    """Return in another millisecond of the server's clock: the IDs of its entries tell no more of the time."""

    async def now() -> int:
        seconds, micros = await ask(url, "TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    began = await now()

    async def is_later() -> bool:
        return await now() > began

    await eventually(is_later, "time to pass")


async def entries(url: str, stream: str) -> dict[str, Any]:
    """All payloads of ``stream`` by their entry's ID."""
    return {id: json.loads(fields["data"]) for id, fields in await ask(url, "XRANGE", stream, "-", "+")}


async def pending(url: str, stream: str, group: str) -> list[str]:
    """The IDs that are delivered to ``group`` and not acknowledged."""
    rows = await ask(url, "XPENDING", stream, group, "-", "+", 10_000, parse_detail=True)
    return [row["message_id"] for row in rows]


async def keys_like(url: str, pattern: str) -> list[str]:
    """The names of all keys that match, sorted."""
    return sorted([key for node in nodes_of(url) for key in await ask(node, "KEYS", pattern)])


async def lasting_keys(url: str, pattern: str) -> list[str]:
    """Those of them that do not run out within a day."""
    return [key for key in await keys_like(url, pattern) if not 0 <= await ask(url, "PTTL", key) <= _DAY]


async def blocked(url: str, readers: int = 1) -> None:
    """Return once so many clients are blocked on the server, or on all nodes together."""

    async def are_blocked() -> bool:
        clients = [await ask(node, "INFO", "clients") for node in nodes_of(url)]
        return bool(sum(about["blocked_clients"] for about in clients) == readers)

    await eventually(are_blocked, f"{readers} blocked readers")
