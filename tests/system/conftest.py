"""Real processes, so all of it is marked ``system``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from conquiet import QueueConfig, RedisStreamsQueue
from tests.contracts.conftest import flavour, look
from tests.system.processes import Crew

__all__ = ["crew", "flavour", "look"]


@pytest.fixture
def crew(url: str, config: QueueConfig, queue: RedisStreamsQueue, tmp_path: Path) -> Iterator[Crew]:
    """Consumers of the test's stream; none of them outlives the test."""
    with Crew.hired(url, config.stream_key, tmp_path / "log") as crew:
        yield crew
