"""What a version left behind: the keys of a Redis, a database of PostgreSQL, and the facts that tests hold against it.

A recording is taken while its users are at work, as if the power of all of them had failed at that moment.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import psycopg
from redis.asyncio import Redis

from conquiet.kit.clock import ManualClock

__all__ = ["FIXTURES", "VERSIONS", "Recording", "Resumed", "load_sql"]

FIXTURES: Final = Path(__file__).parent / "fixtures"
VERSIONS: Final = sorted(place.name for place in FIXTURES.iterdir() if place.is_dir()) if FIXTURES.exists() else []


@dataclass(frozen=True)
class Recording:
    """The keys of one room as they were at one moment of the server's time."""

    version: str
    server: str
    recorded_ms: int
    facts: Mapping[str, Any]
    keys: Mapping[str, Mapping[str, Any]]
    """By name: the type, the milliseconds left or -1, and what ``DUMP`` gave, in Base64."""

    @classmethod
    async def taken(cls, url: str, version: str, facts: Mapping[str, Any]) -> Self:
        """All that the server holds, as of one moment."""
        async with Redis.from_url(url, protocol=2) as client:
            names = sorted([name async for name in client.scan_iter(count=1000)])
            pipe = client.pipeline(transaction=True)
            pipe.time()
            for name in names:
                for command in ("TYPE", "PTTL", "DUMP"):
                    pipe.execute_command(command, name)
            (seconds, micros), *found = await pipe.execute()
            server = (await client.info("server"))["redis_version"]
        rows = zip(names, found[::3], found[1::3], found[2::3], strict=True)
        keys = {
            name.decode(): {"type": kind.decode(), "pttl": left, "dump": base64.b64encode(dump).decode()}
            for name, kind, left, dump in rows
            if dump is not None  # it has run out since it was found
        }
        return cls(version, server, seconds * 1000 + micros // 1000, facts, keys)

    @classmethod
    def loaded(cls, version: str, room: str) -> Self:
        """One that was stored."""
        return cls(**json.loads((FIXTURES / version / f"{room}.json").read_text()))

    def store(self, file: Path) -> None:
        """Write it down, a key a line, so that a difference can be read."""
        file.write_text(json.dumps(vars(self), indent=1, sort_keys=True) + "\n")

    async def restore(self, url: str) -> None:
        """Put all keys into a server that has none of them, each with the time that it had left."""
        async with Redis.from_url(url, protocol=2) as client:
            pipe = client.pipeline(transaction=False)
            for name, held in self.keys.items():
                pipe.restore(name, max(held["pttl"], 0), base64.b64decode(held["dump"]))
            await pipe.execute()


class Resumed(ManualClock):
    """Time that goes on where a recording was taken, whenever that was; to be moved from there."""

    def __init__(self, since_ms: int) -> None:
        super().__init__()
        self._shift = since_ms - round(time.time() * 1000)

    @property
    def offset_ms(self) -> int:
        """How far the clock is from the server's: behind it by the age of the recording."""
        return super().offset_ms + self._shift


def load_sql(dsn: str, version: str) -> None:
    """Run what was dumped of a PostgreSQL."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute((FIXTURES / version / "jobs.sql").read_bytes())
