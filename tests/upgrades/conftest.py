"""A server that holds what an earlier version left, for each test one of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.conftest import Rung
from tests.rigs.servers import on_a_port
from tests.upgrades.stored import VERSIONS, Recording, Resumed


@dataclass(frozen=True)
class Home:
    """A server with a recording, the time that goes on from there, and what is known of it."""

    url: str
    clock: Resumed
    facts: dict[str, Any]


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    """Each version that there is a recording of."""
    return str(request.param)


@pytest.fixture
async def home(rung: Rung, version: str, room: str) -> AsyncIterator[Home]:
    """What ``room`` of that version left, on a server that nobody else has."""
    recording = Recording.loaded(version, room)
    async with on_a_port(rung.binary) as server:
        await recording.restore(server.url)
        yield Home(server.url, Resumed(recording.recorded_ms), dict(recording.facts))
