"""Real processes, so all of it is marked ``system``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from conquiet import QueueConfig, RedisStreamsQueue
from tests.contracts.flavours import FLAVOURS, Flavour
from tests.contracts.looking import Look
from tests.system.processes import Crew


@pytest.fixture(params=list(FLAVOURS))
async def flavour(request: pytest.FixtureRequest) -> AsyncIterator[Flavour]:
    flavour = FLAVOURS[request.param]()
    yield flavour
    await flavour.aclose()


@pytest.fixture
async def look(url: str, config: QueueConfig) -> AsyncIterator[Look]:
    look = Look(url, config)
    yield look
    await look.aclose()


@pytest.fixture
def crew(url: str, config: QueueConfig, queue: RedisStreamsQueue, tmp_path: Path) -> Iterator[Crew]:
    """Consumers of the test's stream; none of them outlives the test."""
    with Crew.hired(url, config.stream_key, tmp_path / "log") as crew:
        yield crew
