"""Consumers are killed: all of their streams have one living owner again in time, whatever else is in the database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.conftest import Rung
from tests.rigs.asking import ask
from tests.rigs.servers import on_a_port
from tests.system.balance_crew import Crew, names
from tests.system.balance_log import two_at_once

pytestmark = [pytest.mark.system, pytest.mark.any_server, pytest.mark.timeout(240)]

LEASE = 2.0
SWEEP = 0.7
NOISE = 100_000
"""Keys of others that expire, and that keep the server from telling in time of those that matter."""
FILL = """
math.randomseed(7)
for number = 1, tonumber(ARGV[1]) do
  redis.call('SET', 'noise:' .. number, '', 'PX', 1000 + math.random(600000))
end
"""


@pytest.fixture
async def private_url(rung: Rung) -> AsyncIterator[str]:
    """A server whose keys are counted."""
    async with on_a_port(rung.binary) as server:
        yield server.url


async def test_the_streams_of_killed_consumers_have_owners_again_in_time(
    private_url: str, tmp_path: Path, scale: float
) -> None:
    is_full = scale >= 1
    crowd = [f"c{number}" for number in range(10 if is_full else 5)]
    doomed, survivors = (crowd[:3], crowd[3:]) if is_full else (crowd[:2], crowd[2:])
    streams = names(max(200, int(2_000 * scale)))
    await ask(private_url, "EVAL", FILL, 0, NOISE)
    assert (await ask(private_url, "CONFIG", "GET", "notify-keyspace-events"))[1] == ""
    with Crew.hired(private_url, tmp_path) as crew:
        options = ("--lease-ttl", str(LEASE), "--sweep-interval", str(SWEEP), "--pace", "0.5")
        await crew.start(*crowd, options=options)
        await crew.add(streams)
        await crew.settled(streams, *crowd, seconds=60)
        lost = {stream: epoch for name in doomed for stream, epoch in crew.log.held(name).items()}
        assert all(crew.log.held(name) for name in doomed)
        # More than its share nobody has; those who joined first may have been given some before the others came.
        assert max(len(crew.log.held(name)) for name in crowd) < len(streams)

        before = await crew.now()
        await crew.kill(*doomed)
        limit = 2 * (LEASE + 2 * SWEEP)
        await crew.settled(streams, *survivors, seconds=4 * limit)
        assert await ask(private_url, "DBSIZE") > NOISE / 2
        await crew.dismiss(*survivors)

    found = {note.stream: note for note in crew.log.noted("added", *survivors) if note.at > before}
    assert found.keys() == lost.keys()
    assert all(found[stream].epoch > epoch for stream, epoch in lost.items())
    took = [(note.at - before) / 1e6 for note in found.values()]
    assert max(took) <= limit
    assert not crew.log.noted("disowned")
    assert two_at_once(crew.log.notes) == []
