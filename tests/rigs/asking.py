"""Looking at a server past the library: one command on a connection of its own."""

from __future__ import annotations

import json
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from tests.rigs.waiting import eventually

__all__ = ["ask", "blocked", "entries", "pending"]


async def ask(url: str, *command: str | int, **options: Any) -> Any:
    """The answer to ``command``, as redis-py gives it, in text; ``options`` are for redis-py's reader of it."""
    async with Redis.from_url(url, protocol=2, decode_responses=True, retry=Retry(NoBackoff(), 0)) as client:
        return await client.execute_command(*command, **options)  # type: ignore[no-untyped-call]


async def entries(url: str, stream: str) -> dict[str, Any]:
    """All payloads of ``stream`` by their entry's ID."""
    return {id: json.loads(fields["data"]) for id, fields in await ask(url, "XRANGE", stream, "-", "+")}


async def pending(url: str, stream: str, group: str) -> list[str]:
    """The IDs that are delivered to ``group`` and not acknowledged."""
    rows = await ask(url, "XPENDING", stream, group, "-", "+", 10_000, parse_detail=True)
    return [row["message_id"] for row in rows]


async def blocked(url: str, readers: int = 1) -> None:
    """Return once so many clients are blocked on the server."""

    async def are_blocked() -> bool:
        return bool((await ask(url, "INFO", "clients"))["blocked_clients"] == readers)

    await eventually(are_blocked, f"{readers} blocked readers")
