"""The server is restarted while streams are owned: everybody goes on, and no stream has two owners at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from conquiet import EmbeddedRedis
from tests.conftest import CLUSTERS, Rung
from tests.rigs.cluster import LocalCluster
from tests.rigs.servers import on_a_port
from tests.rigs.waiting import eventually
from tests.system.balance_crew import Crew, names
from tests.system.balance_log import two_at_once

pytestmark = [pytest.mark.system, pytest.mark.any_server, pytest.mark.timeout(120)]

CREW = ("one", "two")


@asynccontextmanager
async def server(rung: Rung, directory: Path, port: int | None = None) -> AsyncIterator[EmbeddedRedis]:
    async with on_a_port(rung.binary, appendonly=True, directory=directory, port=port) as embedded:
        yield embedded


async def goes_on(crew: Crew) -> None:
    """Return once each has noted again what it owns."""
    now = await crew.now()

    def have_noted() -> bool:
        return all(any(note.at > now for note in crew.log.noted("acts", name)) for name in CREW)

    await eventually(have_noted, "all go on")


async def test_a_restart_within_the_lease_costs_nothing(rung: Rung, url: str, tmp_path: Path, scale: float) -> None:
    streams = names(max(30, int(300 * scale)))
    async with server(rung, tmp_path / "data") as first:
        port = urlsplit(first.url).port
        with Crew.hired(first.url, tmp_path, clock_url=url) as crew:
            await crew.start(*CREW, options=("--lease-ttl", "30"))
            await crew.add(streams)
            await crew.settled(streams, *CREW)
            before = {name: crew.log.held(name) for name in CREW}
            os.kill(first.pid, signal.SIGKILL)
            await first.aclose()
            async with server(rung, tmp_path / "data", port):
                more = [f"more:{number}" for number in range(9)]
                await crew.add(more)
                await crew.settled(streams + more, *CREW)
                await goes_on(crew)
                for name in CREW:
                    held = crew.log.held(name)
                    assert {stream: held[stream] for stream in before[name]} == before[name]
                await crew.dismiss(*CREW)
    assert not crew.log.noted("disowned")
    assert two_at_once(crew.log.notes) == []


async def test_after_an_outage_that_outlasts_all_leases_each_stream_has_one_owner(
    rung: Rung, url: str, tmp_path: Path, scale: float
) -> None:
    streams = names(max(30, int(300 * scale)))
    async with server(rung, tmp_path / "data") as first:
        port = urlsplit(first.url).port
        with Crew.hired(first.url, tmp_path, clock_url=url) as crew:
            await crew.start(*CREW, options=("--lease-ttl", "1"))
            await crew.add(streams)
            await crew.settled(streams, *CREW)
            before = {stream: epoch for name in CREW for stream, epoch in crew.log.held(name).items()}
            await first.aclose()
            await eventually(lambda: not any(crew.log.held(name) for name in CREW), "all know that they own nothing")
            async with server(rung, tmp_path / "data", port):
                await crew.settled(streams, *CREW)
                after = {stream: epoch for name in CREW for stream, epoch in crew.log.held(name).items()}
                assert all(after[stream] > epoch for stream, epoch in before.items())
                await goes_on(crew)
                await crew.dismiss(*CREW)
    assert two_at_once(crew.log.notes) == []


async def test_a_consumer_that_is_alone_gets_its_streams_back_after_an_outage(rung: Rung, tmp_path: Path) -> None:
    streams = names(10)
    async with server(rung, tmp_path / "data") as only:
        with Crew.hired(only.url, tmp_path) as crew:
            await crew.start("alone", options=("--lease-ttl", "1", "--pace", "0"))
            await crew.add(streams)
            await crew.settled(streams, "alone")
            before = crew.log.held("alone")
            os.kill(only.pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(2)  # the outage itself: its notes are by the time of this server
            finally:
                os.kill(only.pid, signal.SIGCONT)
            await eventually(lambda: len(crew.log.noted("disowned")) == len(streams), "it is told of each loss")
            await crew.settled(streams, "alone")
            after = crew.log.held("alone")
            await crew.dismiss("alone")
    assert all(after[stream] > epoch for stream, epoch in before.items())


async def test_a_cluster_node_that_restarts_costs_nothing(url: str, tmp_path: Path) -> None:
    if not CLUSTERS:
        pytest.skip("no server can be started here")
    streams = names(30)
    async with LocalCluster(CLUSTERS[0].binary, directory=tmp_path / "data") as cluster:
        with Crew.hired(cluster.url, tmp_path, clock_url=url) as crew:
            await crew.start(*CREW, options=("--lease-ttl", "30"))
            await crew.add(streams)
            await crew.settled(streams, *CREW)
            node = await cluster.owner_of(crew.keys.input)
            await cluster.shut_down(node, kill=True)
            await cluster.start_again(node)
            await cluster.agree()
            await crew.add(["more"])
            await crew.settled([*streams, "more"], *CREW)
            await goes_on(crew)
            await crew.dismiss(*CREW)
    assert not crew.log.noted("disowned")
    assert two_at_once(crew.log.notes) == []
