"""One stream and one consumer group, with the semantics of Redis Streams and nothing hidden."""

from __future__ import annotations

from conquiet.queue.backlog import BacklogStats
from conquiet.queue.config import QueueConfig
from conquiet.queue.consumer import QueueConsumer
from conquiet.queue.queue import RedisStreamsQueue
from conquiet.queue.transaction import DbFactory, DbTx

__all__ = ["BacklogStats", "DbFactory", "DbTx", "QueueConfig", "QueueConsumer", "RedisStreamsQueue"]
