"""The suites' subjects: each test runs on the core and on the sync facade, on each server of the ladder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from conquiet import EmbeddedRedis, QueueConfig
from tests.conftest import Rung
from tests.contracts.flavours import FLAVOURS, Consumer, Flavour, Queue
from tests.contracts.looking import Look
from tests.rigs.lanes import chosen
from tests.rigs.servers import on_a_port


@pytest.fixture(params=chosen(FLAVOURS))
async def flavour(request: pytest.FixtureRequest) -> AsyncIterator[Flavour]:
    flavour = FLAVOURS[request.param]()
    yield flavour
    await flavour.aclose()


@pytest.fixture
async def queue(flavour: Flavour, url: str, config: QueueConfig) -> Queue:
    return await flavour.open(url, config)


@pytest.fixture
async def rival(flavour: Flavour, url: str, config: QueueConfig) -> Queue:
    """Another consumer of the same group."""
    return await flavour.open(url, replace(config, consumer_name="consumer-2"))


@pytest.fixture
def consumer(flavour: Flavour, queue: Queue) -> Consumer:
    return flavour.consumer(queue)


@pytest.fixture
async def look(url: str, config: QueueConfig) -> AsyncIterator[Look]:
    look = Look(url, config)
    yield look
    await look.aclose()


@pytest.fixture
async def mortal(rung: Rung) -> AsyncIterator[EmbeddedRedis]:
    """A server of the test's own, which it may kill."""
    async with on_a_port(rung.binary) as server:
        yield server
