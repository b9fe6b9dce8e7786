"""Looking at a server past the library, from plain code, and waiting for conditions instead of sleeping."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar, cast
from urllib.parse import urlsplit

from redis import Redis

from conquiet import QueueConfig

__all__ = ["GROUP", "LONG", "Eye", "looking", "named", "until", "whatever"]

LONG: Final = 20.0
"""Seconds after which what should have happened by now is taken for never; not a measure of anything."""

GROUP: Final = "group"

_T = TypeVar("_T")


def until(condition: Callable[[], _T], what: str) -> _T:
    """The first true value of ``condition``; the test fails if none comes."""
    deadline = time.monotonic() + LONG
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {LONG:g} s: {what}"
        time.sleep(0.01)  # between two looks
    return value


def named(url: str) -> tuple[str, str]:
    """A name that nobody else has, and ``url`` with the rule that its connections carry it."""
    name = f"n{secrets.token_hex(6)}"
    return name, f"{url}{'&' if urlsplit(url).query else '?'}client_name={name}"


def whatever(stream: str, consumer: str = "consumer-1") -> QueueConfig:
    """A configuration of ``stream`` for tests that do not care."""
    return QueueConfig(stream, GROUP, consumer, block_ms=2_000)


class Eye:
    """One connection of its own to a server."""

    def __init__(self, client: Redis) -> None:
        self._client = client

    def ask(self, *command: str | int) -> Any:
        """The answer to ``command``, in text."""
        return cast("Any", self._client.execute_command(*command))  # type: ignore[no-untyped-call]

    def clients(self, name: str) -> dict[str, dict[str, str]]:
        """The connections that carry ``name``, by their ID."""
        return {row["id"]: row for row in self.ask("CLIENT LIST") if row["name"] == name}

    def blocked(self, name: str) -> int:
        """How many of them wait in a blocking command."""
        return sum("b" in row["flags"] for row in self.clients(name).values())

    def payloads(self, stream: str) -> dict[str, Any]:
        """All payloads of ``stream`` by their entry's ID."""
        return {id: json.loads(fields["data"]) for id, fields in self.ask("XRANGE", stream, "-", "+")}

    def pending(self, stream: str) -> list[str]:
        """The IDs that are delivered to the group and not acknowledged."""
        rows = cast("Any", self._client.xpending_range(stream, GROUP, "-", "+", 10_000))
        return [row["message_id"] for row in rows]


@contextmanager
def looking(url: str) -> Iterator[Eye]:
    """An eye on the server at ``url``."""
    with Redis.from_url(url, protocol=2, decode_responses=True) as client:
        yield Eye(client)
