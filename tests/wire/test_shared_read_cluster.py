"""Reads that share connections in a Cluster: how many a node has, and what moving slots do to them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from tests.conftest import Rung
from tests.rigs.asking import ask, blocked
from tests.rigs.cluster import LocalCluster, Node
from tests.rigs.waiting import eventually, held
from tests.wire.reading import add, ended, link, names, proxy, reading, stream, told

__all__ = ["link", "proxy", "stream"]

pytestmark = [pytest.mark.any_server, pytest.mark.slow]

BUDGET = 20
"""How many commands an idle reader may send in a second."""


@pytest.fixture(scope="module")
def cluster(rung: Rung) -> Iterator[LocalCluster]:
    if not rung.binary:
        pytest.skip("needs a server's binary")
    with held(LocalCluster(rung.binary)) as cluster:
        yield cluster


async def reads(cluster: LocalCluster) -> int:
    """How many XREADs all nodes together have had."""
    about = [await ask(node.url, "INFO", "commandstats") for node in cluster.nodes]
    return sum(stats.get("cmdstat_xread", {}).get("calls", 0) for stats in about)


async def waiting_at(node: Node) -> int:
    return int((await ask(node.url, "INFO", "clients"))["blocked_clients"])


@pytest.mark.parametrize("each", [4, 30])
async def test_a_cluster_has_few_waiting_connections_a_node(cluster: LocalCluster, stream: str, each: int) -> None:
    streams: dict[Node, list[str]] = {node: [] for node in cluster.nodes}
    for name in names(stream, each * 6):
        mine = streams[await cluster.owner_of(name)]
        if len(mine) < each:
            mine.append(name)
    everything = [name for mine in streams.values() for name in mine]
    assert len(everything) == 3 * each
    link = Connections(Address.of(cluster.url))
    readings = {name: reading(link, name) for name in everything}
    most = min(each, 8)
    for node in cluster.nodes:
        await blocked(node.url, most)
    loop = asyncio.get_running_loop()
    began, before, worst = loop.time(), await reads(cluster), 0
    while loop.time() < began + 4:
        worst = max(worst, *[await waiting_at(node) for node in cluster.nodes])
    rate = (await reads(cluster) - before) / (loop.time() - began)
    assert worst <= 8
    assert rate <= (3 * BUDGET if each > 8 else 3) * 1.1
    ids = {name: (await add(cluster.url, name))[0] for name in everything}
    outcomes = await ended(list(readings.values()))
    assert [told(reply) for reply in outcomes] == [{name: [ids[name]]} for name in everything]
    await link.aclose()


async def test_a_newcomer_has_its_turn_soon(cluster: LocalCluster, stream: str) -> None:
    node = cluster.nodes[0]
    streams = [name for name in names(stream, 60) if await cluster.owner_of(name) == node][:12]
    link = Connections(Address.of(cluster.url))
    readings = [reading(link, name) for name in streams[:8]]
    await blocked(node.url, 8)
    before = await reads(cluster)
    readings += [reading(link, name) for name in streams[8:]]

    async def are_read() -> bool:
        return await reads(cluster) >= before + 8  # each looks at first, and then has a turn

    await eventually(are_read, "each newcomer has had its turn", seconds=3)
    for name in streams:
        await add(cluster.url, name)
    assert [len(told(reply)) for reply in await ended(readings)] == [1] * 12
    await link.aclose()


async def test_streams_of_one_slot_are_read_together_while_it_moves(cluster: LocalCluster, stream: str) -> None:
    streams = names(f"{{{stream}}}", 20)
    await add(cluster.url, streams[0])  # something that moves
    link = Connections(Address.of(cluster.url))
    readings = [reading(link, name, seconds=60) for name in streams[1:]]
    source = await cluster.owner_of(streams[0])
    await blocked(source.url)
    migration = await cluster.migration_of(streams[0])
    await migration.announce()
    late = reading(link, f"{{{stream}}}:late", seconds=60)
    await migration.move()
    await migration.finish()
    ids = await add(cluster.url, *streams[1:], f"{{{stream}}}:late")
    assert [list(told(reply).values()) for reply in await ended([*readings, late])] == [[[id]] for id in ids]
    await link.aclose()
