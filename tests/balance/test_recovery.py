"""What becomes of the streams of those who are gone, with or without a word."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from conquiet.balance import StreamAdded, StreamExpired
from conquiet.errors import AlreadyClaimedError
from conquiet.kit.clock import SYSTEM_CLOCK, ManualClock
from tests.balance.crew import Crew, Member
from tests.rigs.waiting import eventually

pytestmark = [pytest.mark.cluster_too, pytest.mark.guarantee]


async def filled(crew: Crew, consumer: str, count: int, **options: Any) -> Member:
    """A consumer that owns so many streams, ``s0`` and on."""
    member = await crew.join(consumer, **options)
    for number in range(count):
        await member.balancer.add_stream(f"s{number}", {"n": number})
    await eventually(lambda: len(member.owned) == count, "all streams to be owned")
    return member


async def test_the_same_consumer_gets_its_stream_again_after_a_restart(crew: Crew) -> None:
    first = await filled(crew, "pod-1", 1)
    epoch = first.balancer.owned["s0"].epoch
    await first.vanish()
    await crew.lag_behind(16)
    second = await crew.join("pod-1")
    await eventually(lambda: second.added == ["s0"], "it to be told")
    [event] = second.told(StreamAdded)
    assert event.info == {"n": 0}
    assert event.epoch > epoch
    assert crew.counted("claims_total") == 0


async def test_a_restart_before_the_time_is_up_waits_for_it(crew: Crew, clock: ManualClock) -> None:
    first = await filled(crew, "pod-1", 1)
    await first.vanish()
    second = await crew.join("pod-1", auto_claim=True)
    await crew.lag_behind(8)  # well within the lease, however late the renewals of the second are
    assert second.owned == set()
    await crew.lag_behind(12)
    await second.owns("s0")


async def test_exactly_the_unfinished_ones_are_recovered(crew: Crew) -> None:
    first = await filled(crew, "first", 5)
    for name in ("s1", "s3"):
        await first.balancer.done_stream(name)
    await first.vanish()
    await crew.lag_behind(16)
    second = await crew.join("second")
    await eventually(lambda: sorted(second.added) == ["s0", "s2", "s4"], "the unfinished ones")
    await second.owns("s0", "s2", "s4")
    assert {event.stream: event.info["n"] for event in second.told(StreamAdded)} == {"s0": 0, "s2": 2, "s4": 4}
    assert set((await crew.pending()).values()) == {second.balancer.consumer}
    assert crew.counted("acquired_total", consumer="first") == 5
    assert crew.counted("ended_total", consumer="first", how="finished") == 2
    assert crew.counted("recovered_total", consumer="second") == 3


@pytest.mark.slow
async def test_a_lost_stream_is_told_of_and_the_first_to_claim_it_has_it(crew: Crew) -> None:
    first = await filled(crew, "first", 1)
    second, third = await crew.join("second"), await crew.join("third")
    await crew.lag_behind(4)
    epoch = first.balancer.owned["s0"].epoch
    await first.vanish()
    await crew.lag_behind(16)
    await eventually(lambda: second.expired == third.expired == ["s0"], "both to be told")
    [event] = second.told(StreamExpired)
    assert (event.info, event.epoch, event.owner) == ({"n": 0}, epoch, "first")
    lease = await second.balancer.claim("s0")
    assert lease.info == {"n": 0}
    assert lease.epoch > epoch
    with pytest.raises(AlreadyClaimedError):
        await third.balancer.claim("s0")
    await crew.lag_behind(20)
    assert (second.owned, third.owned, third.expired) == ({"s0"}, set(), ["s0"])


async def test_a_survivor_with_auto_claim_takes_over_by_itself_and_keeps_its_own(crew: Crew) -> None:
    first = await filled(crew, "first", 4)
    second = await crew.join("second", auto_claim=True)
    await second.balancer.add_stream("own")
    await eventually(lambda: second.owned == {"own"}, "the second's own")
    await first.vanish()
    await crew.lag_behind(20)
    await second.owns("own", "s0", "s1", "s2", "s3")
    assert (second.expired, second.lost) == ([], [])
    assert set((await crew.pending()).values()) == {second.balancer.consumer}


async def test_a_consumer_that_only_stops_is_not_told_that_it_lost_anything(crew: Crew) -> None:
    one, other = await crew.join("one"), await crew.join("other")
    for name in ("s1", "s2"):
        await one.balancer.add_stream(name)
    await eventually(lambda: len(one.owned) == len(other.owned) == 1, "one each")
    [mine] = one.owned
    await one.balancer.aclose()
    await one.ended()
    assert one.lost == []
    await eventually(lambda: other.expired == [mine], "the other to be told")
    await other.balancer.claim(mine)
    assert len(other.owned) == 2


@pytest.mark.slow
async def test_the_streams_of_many_dead_are_shared_by_the_survivors(crew: Crew) -> None:
    members = [await crew.join(f"m{number}", auto_claim=True) for number in range(5)]
    for number in range(100):
        await members[0].balancer.add_stream(f"s{number}")
    await eventually(lambda: sum(len(one.owned) for one in members) == 100, "all to be owned")
    dead, alive = members[:2], members[2:]
    names = [one.balancer.consumer for one in dead]
    for one in dead:
        await one.vanish()
    await crew.lag_behind(20)
    await eventually(lambda: sum(len(one.owned) for one in alive) == 100, "the survivors to own all")
    owned = [stream for one in alive for stream in one.owned]
    assert len(set(owned)) == 100
    pending = list((await crew.pending()).values())
    assert [pending.count(name) for name in names] == [0, 0]
    assert sorted(map(pending.count, [one.balancer.consumer for one in alive])) == sorted(
        len(one.owned) for one in alive
    )
    assert len(pending) == 100


@pytest.mark.slow
@pytest.mark.parametrize("auto_claim", [False, True])
async def test_more_than_a_thousand_are_recovered_by_who_begins(crew: Crew, auto_claim: bool) -> None:
    count = 1100
    first = await crew.join("first", max_streams=5000, event_buffer=5000)
    for start in range(0, count, 100):
        await asyncio.gather(*(first.balancer.add_stream(f"s{start + n}") for n in range(100)))
    await eventually(lambda: len(first.owned) == count, "all to be owned")
    await first.vanish()
    crew.clock.advance(16)
    second = await crew.join("second", max_streams=5000, event_buffer=5000, auto_claim=auto_claim)
    await eventually(lambda: len(second.owned) == count, f"all to be recovered, not {len(second.owned)}")
    await eventually(lambda: len(second.events) == count, "all to be told")
    assert second.expired == []
    await crew.lag_behind(20)
    assert (len(second.owned), second.lost) == (count, [])


@pytest.mark.slow
async def test_all_of_more_lost_streams_than_one_look_shows_are_told_of(crew: Crew) -> None:
    count = 450
    first = await crew.join("first")
    for start in range(0, count, 50):
        await asyncio.gather(*(first.balancer.add_stream(f"s{start + n}") for n in range(50)))
    await eventually(lambda: len(first.owned) == count, "all to be owned")
    second = await crew.join("second")
    await crew.lag_behind(4)
    await first.vanish()
    await crew.lag_behind(16)
    await eventually(lambda: len(second.expired) == count, "all to be told of")
    assert len(set(second.expired)) == count


async def test_a_full_consumer_takes_over_as_soon_as_there_is_room(crew: Crew) -> None:
    first = await filled(crew, "first", 2)
    second = await crew.join("second", max_streams=1, auto_claim=True)
    await second.balancer.add_stream("own")
    await second.owns("own")
    await crew.die(first)
    await second.looks_again()
    assert second.owned == {"own"}
    await second.balancer.done_stream("own")
    await eventually(lambda: len(second.owned) == 1, "one of the lost ones")
    assert second.owned < {"s0", "s1"}


@pytest.mark.slow
async def test_the_names_of_consumers_that_are_gone_do_not_pile_up(crew: Crew) -> None:
    options: dict[str, Any] = {"clock": SYSTEM_CLOCK, "lease_ttl": 0.9}
    for _ in range(4):
        member = await crew.join("pod", **options)
        await member.balancer.add_stream("s")
        await member.owns("s")
        await member.balancer.done_stream("s")
        await member.balancer.aclose()
    last = await crew.join("pod", **options)
    await last.balancer.add_stream("s")
    await last.owns("s")

    async def is_alone() -> bool:
        rows = await crew.ask("XINFO", "CONSUMERS", crew.keys.input, crew.keys.group)
        return len(rows) == 1 and last.balancer.consumer in str(rows)

    await eventually(is_alone, "the others to be forgotten")


# --- by other hands -----------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_group_that_is_gone_is_made_anew_and_owners_keep_their_streams(crew: Crew) -> None:
    member = await filled(crew, "m", 2)
    await crew.ask("XGROUP", "DESTROY", crew.keys.input, crew.keys.group)
    await member.balancer.add_stream("new")
    await member.owns("s0", "s1", "new")
    await eventually(lambda: member.added == ["s0", "s1", "new"], "all to be told of, once")
    assert len(await crew.pending()) == 3


async def test_an_input_that_is_gone_does_not_end_the_consumer(crew: Crew) -> None:
    member = await filled(crew, "m", 1)
    await crew.ask("DEL", crew.keys.input)
    await member.balancer.add_stream("new")
    await eventually(lambda: "new" in member.owned, "the new one")
    await member.balancer.done_stream("s0")
    await member.balancer.add_stream("s0")
    await eventually(lambda: member.added == ["s0", "new", "s0"], "the old one anew")


async def test_a_stream_whose_entry_was_removed_before_anybody_read_it_can_be_added_again(crew: Crew) -> None:
    producer = crew.make("producer")
    id = await producer.add_stream("s")
    await crew.ask("XDEL", crew.keys.input, id)
    assert await producer.add_stream("s") != id
    await producer.aclose()
    member = await crew.join()
    await member.owns("s")


async def test_a_lost_stream_whose_entry_was_removed_is_forgotten_with_its_position(crew: Crew) -> None:
    first = await filled(crew, "first", 1)
    await first.balancer.owned["s0"].commit("5-0")
    await crew.ask("XDEL", crew.keys.input, first.balancer.owned["s0"].entry_id)
    await crew.die(first)
    second = await crew.join("second", auto_claim=True)
    await eventually(lambda: _is_forgotten(crew), "it to be forgotten")
    assert (second.added, (await crew.state())["positions"]) == ([], {})
    await second.balancer.add_stream("s0")
    await second.owns("s0")


async def _is_forgotten(crew: Crew) -> bool:
    state = await crew.state()
    return bool(state["owners"] == {} and state["leases"] == [])
