"""A service of the test's own, whose consumers end with the test, and a clock that can be moved."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.balance.crew import Crew
from tests.rigs.clocks import WatchedClock
from tests.rigs.proxy import Proxy


@pytest.fixture
def clock() -> WatchedClock:
    return WatchedClock()


@pytest.fixture
async def crew(url: str, clock: WatchedClock) -> AsyncIterator[Crew]:
    crew = Crew(url, clock)
    yield crew
    await crew.aclose()


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy
