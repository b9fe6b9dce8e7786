"""Who owns what: new streams, claims, and how ownership ends."""

from __future__ import annotations

import asyncio

import pytest

from conquiet.balance import StreamAdded, StreamLease
from conquiet.errors import AlreadyClaimedError, ConfigError, StreamNotOwnedError
from tests.balance.crew import Crew, entry
from tests.rigs.waiting import eventually

pytestmark = [pytest.mark.cluster_too, pytest.mark.guarantee]

FAR = 600.0
"""Seconds of a lease that nobody waits for."""


# --- new streams --------------------------------------------------------------------------------------------------


async def test_two_streams_go_to_two_consumers_each_with_its_info(crew: Crew) -> None:
    one, other = await crew.join("one"), await crew.join("other")
    ids = {name: await one.balancer.add_stream(name, {"n": name}) for name in ("s1", "s2")}
    await eventually(lambda: len(one.added + other.added) == 2, "both streams to be told of")
    assert sorted([*one.added, *other.added]) == ["s1", "s2"]
    assert len(one.added) == len(other.added) == 1
    for event in one.told(StreamAdded) + other.told(StreamAdded):
        assert (event.info, event.entry_id) == ({"n": event.stream}, ids[event.stream])
    assert one.owned == set(one.added)
    assert other.owned == set(other.added)


async def test_an_idle_consumer_hears_nothing_until_there_is_a_stream(crew: Crew) -> None:
    member = await crew.join()
    await member.looks_again()
    assert member.events == []
    await member.balancer.add_stream("s")
    await eventually(lambda: member.added == ["s"], "the stream")


async def test_a_stream_that_was_added_before_the_first_consumer_is_delivered(crew: Crew) -> None:
    producer = crew.make("producer")
    await producer.add_stream("early", {"a": 1})
    await crew.put("lbs-input", entry("foreign", {"b": 2}))
    await producer.aclose()
    member = await crew.join()
    await member.owns("early", "foreign")
    assert {event.stream: event.info for event in member.told(StreamAdded)} == {"early": {"a": 1}, "foreign": {"b": 2}}


async def test_adding_is_idempotent_while_the_stream_is_unfinished(crew: Crew) -> None:
    member = await crew.join()
    id = await member.balancer.add_stream("s", {"first": 1})
    assert await member.balancer.add_stream("s", {"second": 2}) == id
    await member.owns("s")
    assert await member.balancer.add_stream("s") == id
    assert (await crew.size(), member.balancer.owned["s"].info) == (1, {"first": 1})
    await member.balancer.done_stream("s")
    assert await member.balancer.add_stream("s", {"third": 3}) != id
    await eventually(lambda: member.added == ["s", "s"], "the stream once more")
    assert member.balancer.owned["s"].info == {"third": 3}


async def test_a_foreign_entry_of_the_same_name_is_merged(crew: Crew) -> None:
    member = await crew.join()
    id = await member.balancer.add_stream("s", {"mine": 1})
    await member.owns("s")
    await crew.put("lbs-input", entry("s", {"foreign": 2}))
    await crew.put("lbs-input", entry("s"))
    await crew.put("lbs-input", entry("behind"))
    await member.owns("s", "behind")
    await eventually(lambda: member.added == ["s", "behind"], "both to be told of, once")
    assert member.balancer.owned["s"].info == {"mine": 1}
    assert list((await crew.pending()).values()) == [member.balancer.consumer] * 2
    assert id in await crew.pending()
    assert await crew.size() == 2
    assert await crew.ask("EXISTS", crew.keys.bad) == 0


async def test_foreign_twins_that_nobody_has_read_yet_become_one_stream(crew: Crew) -> None:
    for _ in range(3):
        await crew.put("lbs-input", entry("s"))
    one, other = await crew.join("one"), await crew.join("other")
    await eventually(lambda: one.owned | other.owned == {"s"}, "an owner")
    await one.looks_again()
    await other.looks_again()
    assert len(one.added + other.added) == 1
    assert await crew.size() == 1


@pytest.mark.parametrize("name", ["a b", "ünï✓", "{tag}:x", "with|pipe", "x" * 1024, "nul\x00", "new\nline", '"q"\\'])
async def test_any_key_can_be_the_name_of_a_stream(crew: Crew, name: str) -> None:
    member = await crew.join(auto_claim=True)
    await member.balancer.add_stream(name, {"name": name})
    await member.owns(name)
    await crew.die(member)
    second = await crew.join("b")
    await second.owns(name)
    assert second.balancer.owned[name].info == {"name": name}
    await second.balancer.done_stream(name)
    assert await crew.size() == 0


async def test_two_services_on_one_server_do_not_meet(crew: Crew, url: str) -> None:
    other = Crew(url, crew.clock)
    try:
        mine, theirs = await crew.join(), await other.join()
        await mine.balancer.add_stream("s", {"of": "mine"})
        await theirs.balancer.add_stream("s", {"of": "theirs"})
        await eventually(lambda: mine.added == theirs.added == ["s"], "both to be told")
        assert (mine.told(StreamAdded)[0].info, theirs.told(StreamAdded)[0].info) == ({"of": "mine"}, {"of": "theirs"})
        await mine.balancer.done_stream("s")
        await theirs.looks_again()
        assert theirs.balancer.owned["s"].owned
        assert await other.size() == 1
    finally:
        await other.aclose()


async def test_a_consumer_owns_no_more_than_max_streams(crew: Crew) -> None:
    member = await crew.join(max_streams=3)
    for number in range(5):
        await member.balancer.add_stream(f"s{number}")
    await member.owns("s0", "s1", "s2")
    await member.looks_again()
    assert len(member.owned) == 3
    await member.balancer.done_stream("s1")
    await member.owns("s0", "s2", "s3")
    await member.balancer.release_stream("s0")
    await eventually(lambda: "s4" in member.owned, "the next one")
    assert len(member.owned) == 3


async def test_two_consumers_of_one_name_are_told_apart(crew: Crew) -> None:
    one, other = await crew.join("pod"), await crew.join("pod")
    assert one.balancer.consumer != other.balancer.consumer
    for name in ("s1", "s2"):
        await one.balancer.add_stream(name)
    await eventually(lambda: len(one.owned) == len(other.owned) == 1, "one stream each")
    [mine] = one.owned
    with pytest.raises(StreamNotOwnedError):
        await other.balancer.done_stream(mine)
    with pytest.raises(AlreadyClaimedError):
        await other.balancer.claim(mine)


# --- claims -------------------------------------------------------------------------------------------------------


async def test_claiming_what_somebody_has_is_refused_and_changes_nothing(crew: Crew) -> None:
    owner = await crew.join("owner")
    await owner.balancer.add_stream("s", {"a": 1})
    await owner.owns("s")
    rival = await crew.join("rival")
    before = await crew.state()
    with pytest.raises(AlreadyClaimedError, match=r"owner#.*'s'"):
        await rival.balancer.claim("s")
    assert await crew.state() == before
    assert rival.owned == set()
    assert owner.balancer.owned["s"].owned


async def test_of_many_who_claim_exactly_one_gets_it(crew: Crew) -> None:
    rivals = [await crew.join(f"r{number}") for number in range(6)]
    await rivals[0].balancer.add_stream("s", {"a": 1})
    await eventually(lambda: any(rival.owned for rival in rivals), "an owner")
    [owner] = [rival for rival in rivals if rival.owned]
    rivals.remove(owner)
    before = owner.balancer.owned["s"].epoch
    await crew.die(owner)
    found = await asyncio.gather(*(rival.balancer.claim("s") for rival in rivals), return_exceptions=True)
    [lease] = [one for one in found if isinstance(one, StreamLease)]
    assert [type(one) for one in found if one is not lease] == [AlreadyClaimedError] * 4
    assert (lease.stream, lease.info) == ("s", {"a": 1})
    assert lease.epoch > before
    assert [rival.owned for rival in rivals].count({"s"}) == 1
    [winner] = [rival for rival in rivals if rival.owned]
    assert list((await crew.pending()).values()) == [winner.balancer.consumer]


async def test_what_nobody_has_read_yet_can_be_claimed_and_is_delivered_to_nobody_else(crew: Crew) -> None:
    full = await crew.join("full", max_streams=1)
    await full.balancer.add_stream("taken")
    await full.owns("taken")
    await full.balancer.add_stream("s", {"a": 1})
    lease = await full.balancer.claim("s")
    assert (lease.info, lease.owned) == ({"a": 1}, True)
    other = await crew.join("other")
    await other.balancer.add_stream("next")
    await other.owns("next")
    assert full.owned == {"taken", "s"}
    assert list((await crew.pending()).values()).count(full.balancer.consumer) == 2


async def test_claiming_something_unknown_names_it(crew: Crew) -> None:
    member = await crew.join()
    with pytest.raises(ConfigError, match="'nothing'"):
        await member.balancer.claim("nothing")
    await member.balancer.add_stream("s")
    await member.owns("s")
    await member.balancer.done_stream("s")
    with pytest.raises(ConfigError, match="'s'"):
        await member.balancer.claim("s")
    assert await crew.ask("EXISTS", crew.keys.owners) == 0


# --- ends ---------------------------------------------------------------------------------------------------------


async def test_done_forgets_the_stream_but_not_the_service(crew: Crew) -> None:
    member = await crew.join()
    await member.balancer.add_stream("s")
    await member.owns("s")
    await member.balancer.owned["s"].commit("5-5")
    epoch = member.balancer.owned["s"].epoch
    assert (await crew.size(), len(await crew.pending())) == (1, 1)
    await member.balancer.done_stream("s")
    state = await crew.state()
    assert state.pop("epoch") == str(epoch)
    assert state == {"input": [], "owners": {}, "leases": [], "positions": {}, "pending": {}}
    assert await crew.ask("EXISTS", crew.keys.input) == 1
    assert await crew.ask("EXISTS", f"{crew.keys.mutex}s") == 0


async def test_streams_are_finished_one_by_one_and_the_rest_stays_when_the_consumer_leaves(crew: Crew) -> None:
    member = await crew.join()
    for name in ("s1", "s2", "s3"):
        await member.balancer.add_stream(name)
    await member.owns("s1", "s2", "s3")
    counts = []
    for name in ("s1", "s2"):
        await member.balancer.done_stream(name)
        counts.append((await crew.size(), len(await crew.pending())))
    assert counts == [(2, 2), (1, 1)]
    await member.balancer.aclose()
    assert (await crew.size(), list(await crew.ask("HKEYS", crew.keys.owners))) == (1, ["s3"])
    second = await crew.join("b", lease_ttl=FAR)
    await second.owns("s3")


async def test_done_twice_is_refused(crew: Crew) -> None:
    member = await crew.join()
    await member.balancer.add_stream("s")
    await member.owns("s")
    await member.balancer.done_stream("s")
    with pytest.raises(StreamNotOwnedError, match="'s'"):
        await member.balancer.done_stream("s")
    with pytest.raises(StreamNotOwnedError, match="'s'"):
        await member.balancer.release_stream("s")
    with pytest.raises(StreamNotOwnedError, match="'never'"):
        await member.balancer.done_stream("never")


async def test_what_is_released_goes_to_another_without_waiting_for_the_lease(crew: Crew) -> None:
    first = await crew.join("first", lease_ttl=FAR)
    await first.balancer.add_stream("s", {"a": 1})
    await first.owns("s")
    second = await crew.join("second", lease_ttl=FAR, sweep_interval=FAR, auto_claim=True)
    await second.has_looked()
    before = first.balancer.owned["s"].epoch
    await first.balancer.release_stream("s")
    await eventually(lambda: second.added == ["s"], "the other to be told")
    [event] = second.told(StreamAdded)
    assert event.info == {"a": 1}
    assert event.epoch > before
    assert first.lost == []


async def test_who_leaves_hands_all_over_without_waiting_for_the_lease(crew: Crew) -> None:
    first = await crew.join("first", lease_ttl=FAR)
    for number in range(5):
        await first.balancer.add_stream(f"s{number}")
    await eventually(lambda: len(first.owned) == 5, "all")
    second = await crew.join("second", lease_ttl=FAR, sweep_interval=FAR, auto_claim=True)
    await second.has_looked()
    await first.balancer.aclose()
    await eventually(lambda: len(second.owned) == 5, "all of them")
    assert set((await crew.pending()).values()) == {second.balancer.consumer}


async def test_without_auto_claim_a_released_stream_is_told_of_and_can_be_claimed(crew: Crew) -> None:
    first, second = await crew.join("first", lease_ttl=FAR), await crew.join("second", lease_ttl=FAR)
    await first.has_looked()
    await second.has_looked()
    await first.balancer.add_stream("s", {"a": 1})
    await eventually(lambda: bool(first.owned or second.owned), "an owner")
    owner, other = (first, second) if first.owned else (second, first)
    before = owner.balancer.owned["s"].epoch
    await owner.balancer.release_stream("s")
    await eventually(lambda: other.expired == ["s"], "the other to be told")
    assert (await other.balancer.claim("s")).epoch > before
    await other.looks_again()
    assert other.expired == ["s"]


# --- epochs and fencing -------------------------------------------------------------------------------------------


async def test_epochs_only_grow_over_takeovers_restarts_and_finished_streams(crew: Crew) -> None:
    epochs: list[int] = []
    for round in range(3):
        member = await crew.join(f"m{round}")
        await member.balancer.add_stream("s")
        await member.owns("s")
        epochs.append(member.balancer.owned["s"].epoch)
        await crew.die(member)
        member = await crew.join(f"n{round}")
        await member.owns("s")
        epochs.append(member.balancer.owned["s"].epoch)
        await member.balancer.done_stream("s")
        await member.balancer.aclose()
    assert epochs == sorted(set(epochs))


async def test_a_zombie_can_finish_release_commit_and_move_nothing(crew: Crew) -> None:
    zombie = await crew.join("zombie", lease_ttl=FAR)
    await zombie.balancer.add_stream("s", {"a": 1})
    await zombie.owns("s")
    stale = zombie.balancer.owned["s"]
    await crew.ask("ZADD", crew.keys.leases, 1, "s")
    heir = await crew.join("heir", lease_ttl=FAR)
    await heir.owns("s")
    await heir.balancer.owned["s"].commit("3-3")
    before = await crew.state()
    with pytest.raises(StreamNotOwnedError, match="'s'"):
        await stale.commit("9-9")
    assert await crew.state() == before
    with pytest.raises(StreamNotOwnedError, match="'s'"):
        await zombie.balancer.release_stream("s")
    assert await crew.state() == before
    with pytest.raises(StreamNotOwnedError, match="'s'"):
        await zombie.balancer.done_stream("s")
    assert await crew.state() == before
    assert heir.balancer.owned["s"].owned


async def test_a_zombie_that_finishes_is_told_that_it_was_disowned(crew: Crew) -> None:
    zombie = await crew.join("zombie", lease_ttl=FAR)
    await zombie.balancer.add_stream("s")
    await zombie.owns("s")
    await crew.ask("ZADD", crew.keys.leases, 1, "s")
    heir = await crew.join("heir", lease_ttl=FAR)
    await heir.owns("s")
    with pytest.raises(StreamNotOwnedError):
        await zombie.balancer.done_stream("s")
    await eventually(lambda: zombie.lost == ["s"], "the zombie to be told")
    assert zombie.owned == set()


@pytest.mark.slow
async def test_a_stream_held_for_long_is_not_taken_by_who_starts_later(crew: Crew) -> None:
    owner = await crew.join("owner")
    await owner.balancer.add_stream("s")
    await owner.owns("s")
    epoch = owner.balancer.owned["s"].epoch
    await crew.lag_behind(60)
    newcomer = await crew.join("newcomer", auto_claim=True)
    await crew.lag_behind(20)
    assert (newcomer.events, newcomer.owned) == ([], set())
    assert (owner.lost, owner.balancer.owned["s"].epoch) == ([], epoch)
