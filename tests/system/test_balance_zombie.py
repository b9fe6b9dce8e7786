"""An owner that was stopped for longer than its leases comes back, is told what it has lost, and can change nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.asking import ask
from tests.rigs.waiting import eventually
from tests.system.balance_crew import Crew, names
from tests.system.balance_log import two_at_once

pytestmark = [pytest.mark.system, pytest.mark.any_server, pytest.mark.cluster_too]

LEASE = 1.0


@pytest.fixture
def crew(url: str, tmp_path: Path) -> Iterator[Crew]:
    with Crew.hired(url, tmp_path) as crew:
        yield crew


async def test_a_stopped_owner_loses_its_streams_and_its_writes(crew: Crew, tmp_path: Path, scale: float) -> None:
    await stop_an_owner(crew, max(10, int(100 * scale)), tmp_path / "gate")
    assert two_at_once(crew.log.notes) == []


@pytest.mark.one_node
async def test_so_does_one_whose_clock_stood_still_too(crew: Crew, tmp_path: Path) -> None:
    """By its clock its leases are good when it wakes, so it tries everything, and its notes are no evidence."""
    await stop_an_owner(crew, 10, tmp_path / "gate", "--suspended", "--pace", "0")


async def stop_an_owner(crew: Crew, count: int, gate: Path, *how: str) -> None:
    streams = names(count)
    lease = ("--lease-ttl", str(LEASE))
    await crew.start("zombie", options=(*lease, *how, "--gate", str(gate)))
    await crew.add(streams)
    await crew.settled(streams, "zombie")
    await crew.start("heir", options=lease)
    stopped = await crew.freeze("zombie")
    await eventually(lambda: len(crew.log.held("heir")) == len(streams), "the heir has all of them")
    heirs = crew.log.held("heir")

    async def is_long_ago() -> bool:
        return await crew.now() > stopped + 3 * LEASE * 1e6

    await eventually(is_long_ago, "three leases have passed")
    assert not crew.log.noted("disowned")
    gate.touch()
    crew.signal("zombie", signal.SIGCONT)
    await eventually(lambda: len(crew.log.noted("disowned", "zombie")) >= len(streams), "it is told of each loss")
    await eventually(lambda: len(crew.log.noted("refused")) >= 2 * len(streams), "it has tried to write")
    await crew.dismiss("zombie")
    assert await crew.owners() == dict.fromkeys(streams, "heir")
    assert await ask(crew.url, "HKEYS", crew.keys.positions) == [""]
    assert await ask(crew.url, "XLEN", crew.keys.input) == len(streams)
    await crew.dismiss("heir")

    told = crew.log.noted("disowned")
    assert sorted((note.name, note.stream) for note in told) == sorted(("zombie", stream) for stream in streams)
    assert not crew.log.noted("accepted")
    tried = {(note.stream, note.detail) for note in crew.log.noted("refused", "zombie")}
    assert tried == {(stream, verb) for stream in streams for verb in ("commit", "done")}
    assert crew.log.held("heir") == heirs
    assert all(heirs[note.stream] > note.epoch for note in told)


@pytest.mark.one_node
async def test_a_consumer_that_stops_hands_over_at_once(crew: Crew) -> None:
    streams = names(20)
    lease = 60.0
    await crew.start("leaver", options=("--lease-ttl", str(lease)))
    await crew.add(streams)
    await crew.settled(streams, "leaver")
    await crew.start("stayer", options=("--lease-ttl", str(lease)))
    at = await crew.dismiss("leaver")
    await crew.settled(streams, "stayer")
    taken = crew.log.noted("added", "stayer")
    assert max(note.at for note in taken) - at < lease / 2 * 1e6
    summary = await ask(crew.url, "XPENDING", crew.keys.input, crew.keys.group)
    rows = summary["consumers"] if isinstance(summary, dict) else summary[3]
    assert len(rows) == 1
    await crew.dismiss("stayer")
    assert not crew.log.noted("disowned")
    assert two_at_once(crew.log.notes) == []
    assert set((await crew.owners()).values()) == {""}
