from __future__ import annotations

from collections.abc import Iterator

import pytest

from conquiet.sync import QueueConfig, RedisStreamsQueue
from tests.sync.looking import Eye, looking


@pytest.fixture
def eye(url: str) -> Iterator[Eye]:
    with looking(url) as eye:
        yield eye


@pytest.fixture
def queue(url: str, config: QueueConfig) -> Iterator[RedisStreamsQueue]:
    """The synchronous one, in this directory."""
    with RedisStreamsQueue.connect(url, config) as queue:
        yield queue
