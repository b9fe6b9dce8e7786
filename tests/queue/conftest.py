"""A server of the test's own, and a look past the library."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from conquiet import EmbeddedRedis, QueueConfig
from tests.conftest import Rung
from tests.contracts.looking import Look
from tests.rigs.servers import on_a_port


@pytest.fixture
async def mortal(rung: Rung) -> AsyncIterator[EmbeddedRedis]:
    """A server that the test may reconfigure, starve and kill."""
    async with on_a_port(rung.binary) as server:
        yield server


@pytest.fixture
async def look(url: str, config: QueueConfig) -> AsyncIterator[Look]:
    look = Look(url, config)
    yield look
    await look.aclose()
