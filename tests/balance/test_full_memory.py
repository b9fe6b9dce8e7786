"""The server's memory is full, and it may remove nothing: who owns streams keeps them, and ends are possible."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from conquiet.errors import QueueError
from conquiet.kit.clock import ManualClock
from tests.balance.crew import Crew, Handler, entry
from tests.conftest import Rung
from tests.rigs.servers import on_a_port
from tests.rigs.waiting import eventually

pytestmark = pytest.mark.guarantee


@pytest.fixture
async def crew(rung: Rung, clock: ManualClock) -> AsyncIterator[Crew]:
    """Of a server that no other test has."""
    if not rung.binary:
        pytest.skip("needs a server's binary")
    async with on_a_port(rung.binary) as server:
        crew = Crew(server.url, clock)
        yield crew
        await crew.aclose()


async def fill(crew: Crew) -> None:
    """From now on nothing may be written that takes memory."""
    await crew.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    await crew.ask("CONFIG", "SET", "maxmemory", 1)
    with pytest.raises(QueueError, match="maxmemory"):
        await crew.add("one more")


async def test_nothing_is_lost_or_moved_because_the_memory_is_full(crew: Crew) -> None:
    handlers = [Handler(), Handler()]
    members = [await crew.running(f"m{number}", handler) for number, handler in enumerate(handlers)]
    for number in range(4):
        await members[0].balancer.add_stream(f"s{number}")
    await eventually(lambda: [len(one.owned) for one in members] == [2, 2], "two each")
    await eventually(lambda: sum(len(one.calls) for one in handlers) == 4, "all to run")
    before = [one.balancer.owned for one in members]
    await fill(crew)
    await crew.lag_behind(20)
    assert [one.balancer.owned for one in members] == before
    assert all(lease.owned for owned in before for lease in owned.values())
    assert [one.ended for one in handlers] == [[], []]
    assert sum(len(one.calls) for one in handlers) == 4


async def test_streams_are_released_committed_and_finished_while_the_memory_is_full(crew: Crew) -> None:
    member = await crew.join("member")
    for name in ("s1", "s2", "s3"):
        await member.balancer.add_stream(name)
    await member.owns("s1", "s2", "s3")
    await fill(crew)
    await member.balancer.release_stream("s1")
    await member.balancer.owned["s2"].commit("5-5")
    await member.balancer.done_stream("s2")
    await member.balancer.owned["s3"].commit("6-6")
    assert await crew.size() == 2
    await member.balancer.aclose()
    second = await crew.join("second")
    await second.owns("s1", "s3")
    assert await second.balancer._ledger.position("s3") == "6-6"
    assert member.lost == []


async def test_what_a_dead_consumer_had_goes_to_one_who_keeps_it_while_the_memory_is_full(crew: Crew) -> None:
    first = await crew.join("first")
    for name in ("s1", "s2"):
        await first.balancer.add_stream(name)
    await first.owns("s1", "s2")
    heir = await crew.join("heir", auto_claim=True)
    await fill(crew)
    await first.vanish()
    await crew.lag_behind(20)
    await heir.owns("s1", "s2")
    epochs = {stream: lease.epoch for stream, lease in heir.balancer.owned.items()}
    await crew.lag_behind(20)
    assert heir.lost == []
    assert {stream: lease.epoch for stream, lease in heir.balancer.owned.items()} == epochs


async def test_what_was_given_and_not_heard_of_is_given_anew_while_the_memory_is_full(crew: Crew) -> None:
    member = await crew.join("member")
    await member.balancer.add_stream("s")
    await member.owns("s")
    await fill(crew)
    [given] = await member.balancer._ledger.regrant([member.balancer.owned["s"].entry_id])
    assert given.stream == "s"


async def test_what_another_client_left_is_found_while_the_memory_is_full(crew: Crew) -> None:
    keys = crew.keys
    await crew.ask("XGROUP", "CREATE", keys.input, keys.group, "0", "MKSTREAM")
    await crew.put("lbs-input", entry("s"))
    await crew.put("lbs-input", "rubbish")
    await crew.ask("XREADGROUP", "GROUP", keys.group, "foreign", "STREAMS", keys.input, ">")
    member = await crew.join("member", lease_ttl=1.0, auto_claim=True)
    await fill(crew)
    await member.owns("s")
