"""The slot of a service moves to another node of a Cluster: its streams are owned, renewed and finished meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from conquiet.errors import QueueError
from conquiet.kit.clock import ManualClock
from tests.balance.crew import Crew, Member
from tests.conftest import CLUSTERS
from tests.rigs.asking import round_trips
from tests.rigs.cluster import LocalCluster, Migration
from tests.rigs.waiting import eventually, held

pytestmark = [
    pytest.mark.skipif(not CLUSTERS, reason="no server can be started here"),
    pytest.mark.timeout(120),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with held(LocalCluster(CLUSTERS[0].binary)) as cluster:
        yield cluster


@pytest.fixture
async def crew(cluster: LocalCluster, clock: ManualClock) -> AsyncIterator[Crew]:
    crew = Crew(cluster.url, clock)
    yield crew
    await crew.aclose()


@pytest.fixture
async def migration(cluster: LocalCluster, crew: Crew) -> AsyncIterator[Migration]:
    """Of the slot of the service; it is over when the test is."""
    migration = await cluster.migration_of(crew.keys.input)
    yield migration
    await migration.move()
    await migration.finish()


async def renewed(crew: Crew, member: Member, times: int) -> None:
    """Return once it has renewed so often; time passes as it does then."""
    holding = member.balancer._consumer.streams
    for _ in range(times):
        before = holding.renewals
        crew.clock.advance(4)

        def has_renewed(before: int = before) -> bool:
            crew.clock.advance(0.01)
            return holding.renewals > before

        await eventually(has_renewed, "a renewal")


async def full_life(crew: Crew, member: Member) -> None:
    """Everything that an owner does."""
    await renewed(crew, member, 5)
    assert (member.lost, member.owned) == ([], {"old", "older"})
    await crew.add("new")
    await member.owns("old", "older", "new")
    await member.balancer.owned["new"].commit("5-5")
    await member.balancer.release_stream("new")
    await eventually(lambda: member.expired == ["new"], "what was released to be found")
    lease = await member.balancer.claim("new")
    assert await lease._ledger.position("new") == "5-5"
    for name in ("new", "older"):
        await member.balancer.done_stream(name)
    await member.owns("old")


@pytest.mark.parametrize("moved", ["nothing", "everything"])
async def test_streams_live_on_while_their_slot_moves(crew: Crew, migration: Migration, moved: str) -> None:
    """Nobody has committed, released or set aside anything before: those keys are not there when the move begins."""
    member = await crew.join("member")
    for name in ("old", "older"):
        await member.balancer.add_stream(name)
    await member.owns("old", "older")
    await migration.announce()
    if moved == "everything":
        await migration.move()
    await full_life(crew, member)
    await migration.move()
    await migration.finish()
    await renewed(crew, member, 2)
    await member.balancer.done_stream("old")
    assert member.lost == []


async def test_what_comes_while_keys_are_at_both_nodes_is_asked_again(crew: Crew, migration: Migration) -> None:
    """A script can run at neither: it waits for the rest to move, and for a second at most."""
    member = await crew.join("member")
    await member.balancer.add_stream("s")
    await member.owns("s")
    await migration.announce()
    await migration.move(crew.keys.owners)
    with pytest.raises(QueueError, match="rehashing"):
        await member.balancer.done_stream("s")
    assert member.balancer.owned["s"].owned, "the refusal is no loss"
    ending = asyncio.ensure_future(member.balancer.done_stream("s"))
    await round_trips(crew.url)  # it is refused by then
    await migration.move()
    await migration.finish()
    await asyncio.wait_for(ending, 20)
    assert (await crew.size(), member.lost) == (0, [])


async def test_an_entry_that_is_no_stream_holds_nothing_up_while_the_slot_moves(
    crew: Crew, migration: Migration
) -> None:
    member = await crew.join("member", lease_ttl=1.0)
    await member.balancer.add_stream("old")
    await member.owns("old")
    await migration.announce()
    await crew.put("lbs-input", "rubbish")
    await crew.add("new")
    await member.owns("old", "new")
    await migration.move()
    await migration.finish()
    await eventually(lambda: crew.counted("set_aside_total", consumer="member") == 1, "it to be set aside")
    assert len(await crew.aside()) == 1
