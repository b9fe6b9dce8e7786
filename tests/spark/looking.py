"""Looking into a topic past Spark and past the library."""

from __future__ import annotations

import json
from typing import Any, cast

from redis import Redis

from conquiet.wire.keys import Keys
from tests.spark.conftest import Home

__all__ = ["asked", "entries", "payloads", "stream"]


def stream(home: Home, topic: str, partition: int = 0) -> str:
    return Keys(home.namespace).partition(topic, partition)


def asked(home: Home, *command: str | int) -> Any:
    """The answer to one command."""
    with Redis.from_url(home.url, decode_responses=True) as client:
        return client.execute_command(*command)


def entries(home: Home, topic: str, partition: int = 0) -> list[dict[str, str]]:
    """What a partition holds, in order."""
    return [
        cast("dict[str, str]", fields) for _, fields in asked(home, "XRANGE", stream(home, topic, partition), "-", "+")
    ]


def payloads(home: Home, topic: str, partitions: int = 1) -> list[Any]:
    """All payloads, one partition after the other."""
    return [
        json.loads(entry["payload"]) for partition in range(partitions) for entry in entries(home, topic, partition)
    ]
