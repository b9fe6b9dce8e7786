"""The recordings themselves: that there are some, and that all of each is restored."""

from __future__ import annotations

import pytest

from tests.upgrades.conftest import Home
from tests.upgrades.stored import FIXTURES, VERSIONS, Recording

ROOMS = ["balance", "jobs", "queue", "spark", "topics"]


@pytest.fixture(params=ROOMS)
def room(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_first_version_is_there_and_every_room_of_each() -> None:
    assert "0.1.0" in VERSIONS
    for version in VERSIONS:
        assert sorted(file.stem for file in (FIXTURES / version).glob("*.json")) == sorted([*ROOMS, "jobs-postgres"])


async def test_all_keys_are_restored_with_the_time_they_had_left(home: Home, version: str, room: str) -> None:
    recording = Recording.loaded(version, room)
    found = await Recording.taken(home.url, version, recording.facts)
    assert found.keys.keys() == recording.keys.keys()
    for name, held in recording.keys.items():
        assert found.keys[name]["type"] == held["type"]
        assert (found.keys[name]["pttl"] > 0) == (held["pttl"] > 0)
        assert found.keys[name]["pttl"] <= held["pttl"]
