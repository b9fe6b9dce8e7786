"""Looking at private servers, their processes and what they leave."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import psutil
from redis.asyncio import Redis

from conquiet import EmbeddedRedis

__all__ = ["ask", "left", "over", "until"]

LONG: Final = 15.0


def until(condition: Callable[[], bool], what: str) -> None:
    """The one place that waits: until the condition holds, or the test has failed."""
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline, f"not within {LONG} s: {what}"
        time.sleep(0.01)


def over(process: psutil.Process) -> bool:
    """Ended; perhaps a zombie, where nobody reaps orphans."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def ask(server: EmbeddedRedis, *command: str) -> Any:
    async with Redis.from_url(server.url, decode_responses=True) as client:
        return await client.execute_command(*command)  # type: ignore[no-untyped-call]


def left(scratch: Path) -> list[Path]:
    return list(scratch.glob("conquiet-*"))
