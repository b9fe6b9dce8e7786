"""A server that loses its last writes, as a plugin that the suites of lost writes name."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator
from typing import Final

import pytest

from conquiet.kit.clock import ManualClock
from tests.conftest import CONTRACT_LADDER, Rung
from tests.rigs.rollback import WAYS, Rollback, rollback_by
from tests.rigs.sizing import IS_FULL

_SERVERS: Final = [rung for rung in CONTRACT_LADDER if rung.binary]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test has both ways to lose writes; on all servers at full size, else on one, always the same."""
    if "rollback" in metafunc.fixturenames:
        chosen = zlib.crc32(metafunc.function.__name__.encode()) % len(_SERVERS)
        cases = [(way, rung) for way in WAYS for rung in (_SERVERS if IS_FULL else _SERVERS[chosen : chosen + 1])]
        names = [f"{way.replace(' ', '_')}-{rung.name}" for way, rung in cases]
        metafunc.parametrize("rollback", cases, ids=names, indirect=True)


@pytest.fixture
async def rollback(request: pytest.FixtureRequest) -> AsyncIterator[Rollback]:
    """A server of the test's own."""
    way, rung = request.param
    assert isinstance(rung, Rung)
    async with rollback_by(way, rung.binary) as rollback:
        yield rollback


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()
