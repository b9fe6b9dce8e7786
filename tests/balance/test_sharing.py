"""Fair shares: who gets new streams, what a newcomer gets, and that politeness leaves nothing lying."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable

import pytest

from conquiet.balance import watch
from tests.balance.crew import Crew, Handler, Member
from tests.rigs.waiting import eventually

pytestmark = [pytest.mark.cluster_too, pytest.mark.slow]


def sizes(members: Iterable[Member]) -> list[int]:
    return sorted(len(member.owned) for member in members)


def all_owned(members: Iterable[Member]) -> list[str]:
    """Every stream once for each that owns it."""
    return sorted(stream for member in members for stream in member.owned)


@pytest.mark.parametrize(("consumers", "streams"), [(2, 2), (3, 3), (3, 7), (4, 2)])
async def test_idle_consumers_share_what_comes_in(crew: Crew, consumers: int, streams: int) -> None:
    members = [await crew.join(f"m{number}") for number in range(consumers)]
    for number in range(streams):
        await members[0].balancer.add_stream(f"s{number}")
    await eventually(lambda: sum(sizes(members)) == streams, "all to be owned")
    assert all_owned(members) == sorted(f"s{number}" for number in range(streams))
    assert max(sizes(members)) <= math.ceil(streams / consumers), "nobody has more than its share"


async def test_a_backlog_is_shared_by_those_who_are_there(crew: Crew) -> None:
    members = [await crew.join(f"m{number}", max_streams=1) for number in range(3)]
    for number in range(30):
        await members[0].balancer.add_stream(f"s{number}")
    await eventually(lambda: sum(sizes(members)) == 3, "each to be full")
    for member in members:
        await member.balancer.aclose()
    members = [await crew.join(f"n{number}") for number in range(3)]
    await eventually(lambda: sum(sizes(members)) == 30, "all to be owned")
    assert len(set(all_owned(members))) == 30


async def test_what_the_other_has_no_room_for_is_taken_after_a_moment(crew: Crew) -> None:
    small, large = await crew.join("small", max_streams=1), await crew.join("large")
    for number in range(6):
        await large.balancer.add_stream(f"s{number}")
    await eventually(lambda: sizes([small, large]) == [1, 5], "all to be owned")


async def test_a_listener_that_does_not_listen_holds_nothing_up(crew: Crew) -> None:
    deaf, keen = await crew.join("deaf", listen=False, event_buffer=1), await crew.join("keen")
    for number in range(6):
        await keen.balancer.add_stream(f"s{number}")
    await eventually(lambda: sizes([deaf, keen]) == [1, 5], "all to be owned")


async def test_politeness_does_not_starve_while_more_and_more_comes_in(crew: Crew) -> None:
    small, large = await crew.join("small", max_streams=1), await crew.join("large")
    added: list[str] = []

    async def add() -> None:
        while True:
            added.append(f"s{len(added)}")
            await large.balancer.add_stream(added[-1])
            await crew.tick(0.2)

    adding = asyncio.ensure_future(add())
    try:
        await eventually(lambda: len(added) >= 50, "a steady stream of streams")
        old = set(added[:-20])  # those that came seconds ago
        assert old <= small.owned | large.owned, f"{sorted(old - small.owned - large.owned)} wait for seconds"
    finally:
        adding.cancel()
        await asyncio.wait([adding])


async def test_lost_streams_that_the_other_has_no_room_for_are_taken_after_a_moment(crew: Crew) -> None:
    first = await crew.join("first")
    for number in range(6):
        await first.balancer.add_stream(f"s{number}")
    await eventually(lambda: len(first.owned) == 6, "all")
    small = await crew.join("small", max_streams=1, auto_claim=True)
    large = await crew.join("large", auto_claim=True)
    await crew.die(first)
    await eventually(lambda: sizes([small, large]) == [1, 5], "all to be owned again")


async def test_lost_streams_are_shared_by_the_survivors(crew: Crew) -> None:
    first = await crew.join("first")
    for number in range(8):
        await first.balancer.add_stream(f"s{number}")
    await eventually(lambda: len(first.owned) == 8, "all")
    survivors = [await crew.join(f"m{number}", auto_claim=True) for number in range(2)]
    await crew.die(first)
    await eventually(lambda: sum(sizes(survivors)) == 8, "all to be owned again")
    assert sizes(survivors) == [4, 4]


# --- newcomers ----------------------------------------------------------------------------------------------------


async def test_without_rebalance_an_owner_keeps_what_it_has(crew: Crew) -> None:
    first = await crew.join("first")
    for number in range(4):
        await first.balancer.add_stream(f"s{number}")
    await eventually(lambda: len(first.owned) == 4, "all")
    second = await crew.join("second", auto_claim=True)
    await crew.lag_behind(20)
    assert (len(first.owned), second.owned) == (4, set())


async def test_with_rebalance_a_newcomer_gets_its_share(crew: Crew) -> None:
    first = await crew.join("first", rebalance=True)
    for number in range(8):
        await first.balancer.add_stream(f"s{number}")
    await eventually(lambda: len(first.owned) == 8, "all")
    second = await crew.join("second", auto_claim=True)
    await _settled(crew, lambda: sizes([first, second]) == [4, 4])
    assert len(set(all_owned([first, second]))) == 8
    assert sorted(first.lost) == sorted(second.owned)
    assert crew.counted("ended_total", consumer="first", how="lost") == 0
    assert crew.counted("ended_total", consumer="first", how="released") == 4


async def test_those_who_run_share_with_newcomers_and_no_stream_has_two_handlers(crew: Crew) -> None:
    running: list[str] = []
    twice: list[str] = []

    async def handle(stream: str, lease: object) -> None:
        if stream in running:
            twice.append(stream)
        running.append(stream)
        try:
            await asyncio.Event().wait()
        finally:
            running.remove(stream)

    members = [await crew.running("m0", handle)]
    for number in range(9):
        await members[0].balancer.add_stream(f"s{number}")
    await eventually(lambda: len(running) == 9, "all to run")
    members += [await crew.running("m1", handle), await crew.running("m2", handle)]
    await _settled(crew, lambda: sizes(members) == [3, 3, 3])
    await eventually(lambda: len(running) == 9, "all to run again")
    assert twice == []


async def test_who_is_alone_gives_nothing_away(crew: Crew) -> None:
    handler = Handler()
    member = await crew.running("m", handler)
    for number in range(4):
        await member.balancer.add_stream(f"s{number}")
    await eventually(lambda: len(handler.calls) == 4, "all to run")
    await crew.lag_behind(20)
    assert len(handler.calls) == 4


@pytest.mark.any_server
@pytest.mark.one_node
@pytest.mark.parametrize("other", ["full", "listener"])
async def test_sharing_with_one_who_does_not_take_comes_to_rest(
    crew: Crew, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_COURTESY", 0.05)  # less than the time between two looks
    handler = Handler()
    first = await crew.running("first", handler)
    for number in range(6):
        await first.balancer.add_stream(f"s{number}")
    await eventually(lambda: len(handler.calls) == 6, "all to run")
    if other == "full":
        await crew.running("second", Handler(), max_streams=1)
    else:
        await crew.join("second")
    for _ in range(4):
        await crew.lag_behind(8)
        await first.looks_again(1)
    calls = len(handler.calls)
    for _ in range(4):
        await crew.lag_behind(8)
        await first.looks_again(1)
    assert len(handler.calls) == calls, "streams are given away and taken back without end"


async def _settled(crew: Crew, is_fair: object) -> None:
    assert callable(is_fair)
    for _ in range(12):
        if is_fair():
            return
        await crew.lag_behind(4)
        for member in crew.members:  # those who give and those who take need a moment
            await member.looks_again(1)
    assert is_fair(), [(one.balancer.consumer, one.owned) for one in crew.members]
