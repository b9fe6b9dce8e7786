"""Messages and jobs through Redis Streams: at-least-once, explicit acknowledgment, failures visible.

The names here are the asynchronous API; :mod:`conquiet.sync` has the same ones without ``await``.
"""

from __future__ import annotations

from conquiet.errors import ConfigError, ConquietError, MalformedMessageError, PayloadError, QueueError
from conquiet.message import QueueMessage
from conquiet.queue import BacklogStats, DbFactory, DbTx, QueueConfig, QueueConsumer, RedisStreamsQueue
from conquiet.wire.address import Address
from conquiet.wire.embedded import EmbeddedRedis

__all__ = [
    "Address",
    "BacklogStats",
    "ConfigError",
    "ConquietError",
    "DbFactory",
    "DbTx",
    "EmbeddedRedis",
    "MalformedMessageError",
    "PayloadError",
    "QueueConfig",
    "QueueConsumer",
    "QueueError",
    "QueueMessage",
    "RedisStreamsQueue",
]
