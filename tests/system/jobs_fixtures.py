"""What the system tests of jobs run on, as a plugin that they name: each store that outlives its users."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from conquiet import JobQueue
from tests.system.jobs_crew import Crew, Home, PostgresHome, RedisHome

KINDS = ["redis", "postgres"]


@pytest.fixture(scope="session", params=KINDS)
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A server that is left running."""
    with own_home(request.param, tmp_path_factory.mktemp("redis")) as home:
        yield home


def own_home(kind: str, directory: Path) -> RedisHome | PostgresHome:
    """A server that may be restarted; to be entered."""
    return RedisHome(directory) if kind == "redis" else PostgresHome()


@pytest.fixture
def job_crew(home: Home, tmp_path: Path) -> Iterator[Crew]:
    """Workers of a queue that only this test has."""
    with Crew.hired(home, tmp_path) as crew:
        yield crew


@pytest.fixture
async def work(job_crew: Crew) -> AsyncIterator[JobQueue]:
    """That queue."""
    async with job_crew.queue() as queue:
        yield queue
