"""What redis-py has and does not promise: each name of it that is not public is known here, and nowhere else.

A version of redis-py that lacks one of them is met with public calls, which are slower or find out less. Where there
are none, the error says to pass a URL instead of a client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, cast

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool

from conquiet.errors import ConfigError
from conquiet.wire.parser import BulkReplies, PlainReplies, Replies

__all__ = ["NAMES", "remap_of", "replies_of", "seeds_of", "sentinels_of", "writer_of"]

NAMES: Final = {
    "connection": ("_parser", "_reader", "_writer"),
    "parser": ("parse_error",),
    "stream": ("_buffer",),
    "cluster": ("nodes_manager", "startup_nodes"),
    "nodes_manager": ("address_remap",),
    "sentinel_pool": ("is_master", "sentinel_manager", "service_name"),
    "sentinel": ("sentinels",),
}
"""All of them, by what has them."""


def replies_of(connection: AbstractConnection) -> Replies:
    """The replies of an open connection."""
    stream = _part(connection, "_reader")
    error_of = _part(_part(connection, "_parser"), "parse_error")
    if stream is None or error_of is None or _part(stream, "_buffer") is None:
        return PlainReplies(connection)
    return BulkReplies(cast("asyncio.StreamReader", stream), cast("Callable[[str], Exception]", error_of))


def writer_of(connection: AbstractConnection) -> asyncio.StreamWriter | None:
    """What an open connection writes to, if that is known."""
    return cast("asyncio.StreamWriter | None", _part(connection, "_writer"))


def seeds_of(client: RedisCluster) -> list[tuple[str, int]]:
    """Where the client begins to look for the Cluster; else where it has found it."""
    nodes: list[Any] = _part(client, "startup_nodes") or client.get_nodes()
    if not nodes:
        raise _unreadable("startup_nodes")
    return [(str(node.host), int(node.port)) for node in nodes]


def remap_of(client: RedisCluster) -> Callable[[tuple[str, int]], tuple[str, int]] | None:
    """How the client finds nodes that announce themselves under other addresses."""
    remap: Callable[[tuple[str, int]], tuple[str, int]] | None
    remap = _part(_part(client, "nodes_manager"), "address_remap")
    return remap


def sentinels_of(pool: SentinelConnectionPool) -> tuple[str, list[Redis]]:
    """The name of the service, and a client for each Sentinel; ``ConfigError`` if it is for replicas."""
    manager = _part(pool, "sentinel_manager") or next((x for x in vars(pool).values() if isinstance(x, Sentinel)), None)
    if _part(pool, "is_master") is False:
        raise ConfigError("a client of Sentinel replicas cannot be written to: pass Sentinel.master_for(...)")
    return _needed(pool, "service_name"), _needed(manager, "sentinels")


def _part(whole: object, name: str) -> Any:
    return getattr(whole, name, None)


def _needed(whole: object, name: str) -> Any:
    part = _part(whole, name)
    if part is None:
        raise _unreadable(name)
    return part


def _unreadable(name: str) -> ConfigError:
    return ConfigError(f"this version of redis-py does not tell a client's {name!r}: pass a URL instead of a client")
