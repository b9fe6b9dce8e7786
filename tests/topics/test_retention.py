"""What retention removes, and what it never does."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from conquiet.kit.clock import ManualClock
from conquiet.kit.entry_ids import order as place
from conquiet.topics.options import Retention
from conquiet.topics.server.retention import Trimmed, trim
from conquiet.topics.server.topics import Topic
from tests.topics.staging import Stage

pytestmark = pytest.mark.cluster_too


async def _trim(stage: Stage, topic: Topic, **kept: object) -> Trimmed:
    return await trim(stage.instance, topic, 0, Retention(**kept))  # type: ignore[arg-type]


async def _noted(stage: Stage, topic: Topic, field: str) -> str | None:
    key = stage.instance.keys.trim(stage.stream(topic))
    value = await stage.call(key, "HGET", key, field)
    return None if value is None else value.decode()


def _after(id: str) -> str:
    ms, seq = place(id)
    return f"{ms}-{seq + 1}"


# --- one rule at a time ----------------------------------------------------------------------------------


async def test_a_partition_without_rules_is_left_alone(stage: Stage) -> None:
    topic = await stage.topic()
    await stage.add(topic, 3)
    assert await trim(stage.instance, topic, 0) == Trimmed()
    assert len(await stage.ids(topic)) == 3


async def test_a_partition_that_nobody_wrote_to_is_not_made(stage: Stage) -> None:
    topic = await stage.topic()
    assert await _trim(stage, topic, max_len=1, max_age=1.0, delete_acked=True, group_expiry=1.0) == Trimmed()
    assert await stage.call(stage.stream(topic), "EXISTS", stage.stream(topic)) == 0


@pytest.mark.parametrize("count", [12, 100, 101, 250, 2_510])
async def test_the_number_of_entries_is_exact_without_groups(stage: Stage, count: int) -> None:
    topic = await stage.topic(max_len=10)
    ids = await stage.add(topic, count)
    trimmed = await trim(stage.instance, topic, 0)
    assert trimmed == Trimmed(count - 10, 0, _after(ids[-11]))
    assert await stage.ids(topic) == ids[-10:]
    assert await trim(stage.instance, topic, 0) == Trimmed(0, 0, _after(ids[-11]))


@pytest.mark.parametrize("acked", [0, 1, 99, 100, 230, 490, 500])
async def test_the_number_gives_way_to_what_is_unfinished(stage: Stage, acked: int) -> None:
    topic = await stage.topic()
    ids = await stage.add(topic, 500)
    await stage.create_group(topic, "billing")
    if acked:
        await stage.ack(topic, "billing", *await stage.read(topic, "billing", acked))
    trimmed = await _trim(stage, topic, max_len=10)
    kept = ids[min(acked, 490) :]
    assert await stage.ids(topic) == kept
    assert trimmed == Trimmed(500 - len(kept), 0, _after(ids[min(acked, 490) - 1]) if acked else None)


async def test_a_pending_entry_holds_back_what_comes_after_it(stage: Stage) -> None:
    topic = await stage.topic()
    ids = await stage.add(topic, 20)
    await stage.create_group(topic, "billing")
    await stage.read(topic, "billing", 20)
    await stage.ack(topic, "billing", *ids[:5], *ids[6:])
    assert (await _trim(stage, topic, max_len=1)).removed == 5
    assert (await _trim(stage, topic, delete_acked=True)).removed == 0
    assert await stage.ids(topic) == ids[5:]
    await stage.ack(topic, "billing", ids[5])
    assert await _trim(stage, topic, delete_acked=True) == Trimmed(15, 0, _after(ids[-1]))


async def test_the_slowest_group_decides(stage: Stage) -> None:
    topic = await stage.topic()
    ids = await stage.add(topic, 30)
    for group, count in (("fast", 30), ("slow", 7), ("new", 12)):
        await stage.create_group(topic, group)
        await stage.ack(topic, group, *await stage.read(topic, group, count))
    assert (await _trim(stage, topic, delete_acked=True)).removed == 7
    assert await stage.ids(topic) == ids[7:]


async def test_age_goes_by_the_servers_time(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic()
    old = await stage.add(topic, 150)
    clock.advance(60)
    assert (await _trim(stage, topic, max_age=3600.0)).removed == 0
    assert await _trim(stage, topic, max_age=30.0) == Trimmed(150, 0, _after(old[-1]))


async def test_age_gives_way_to_what_is_unfinished(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic()
    ids = await stage.add(topic, 150)
    await stage.create_group(topic, "billing")
    await stage.ack(topic, "billing", *await stage.read(topic, "billing", 120))
    clock.advance(60)
    assert await _trim(stage, topic, max_age=30.0) == Trimmed(120, 0, _after(ids[119]))


async def test_an_age_longer_than_time_itself(stage: Stage) -> None:
    topic = await stage.topic()
    await stage.add(topic, 3)
    assert (await _trim(stage, topic, max_age=1e11)).removed == 0


async def test_finished_entries_stay_as_long_as_there_is_no_group(stage: Stage) -> None:
    topic = await stage.topic()
    await stage.add(topic, 3)
    assert (await _trim(stage, topic, delete_acked=True)).removed == 0


async def test_a_group_that_begins_at_a_moment_has_a_place_like_any_other(stage: Stage) -> None:
    """Its last delivered ID has the largest sequence number that there is."""
    topic = await stage.topic()
    ids = await stage.add(topic, 5)
    ms = place(ids[-1])[0]
    await stage.create_group(topic, "late", f"{ms}-18446744073709551615")
    assert (await _trim(stage, topic, delete_acked=True)).removed == 5


async def test_sequence_numbers_beyond_what_lua_can_count(stage: Stage) -> None:
    topic = await stage.topic()
    stream = stage.stream(topic)
    ids = [f"5-{2**63 + number}" for number in range(4)]
    for id in ids:
        await stage.call(stream, "XADD", stream, id, "payload", "1")
    await stage.create_group(topic, "billing")
    await stage.ack(topic, "billing", *await stage.read(topic, "billing", 2))
    assert await _trim(stage, topic, delete_acked=True) == Trimmed(2, 0, ids[2])
    assert await stage.ids(topic) == ids[2:]


async def test_the_bound_never_goes_back(stage: Stage) -> None:
    topic = await stage.topic()
    ids = await stage.add(topic, 20)
    await _trim(stage, topic, max_len=5)
    key = stage.instance.keys.trim(stage.stream(topic))
    await stage.call(key, "HSET", key, "bound", _after(ids[-1]))
    assert (await _trim(stage, topic, max_len=2)).bound == _after(ids[-1])


# --- dropping -------------------------------------------------------------------------------------------


async def test_dropping_counts_what_some_group_has_not_finished(stage: Stage) -> None:
    topic = await stage.topic()
    ids = await stage.add(topic, 300)
    for group in ("fast", "slow"):
        await stage.create_group(topic, group)
    await stage.ack(topic, "fast", *await stage.read(topic, "fast", 300))
    await stage.read(topic, "slow", 250)
    await stage.ack(topic, "slow", *ids[:100], *ids[110:200])
    # Of the 290 that go, "slow" has finished 190.
    trimmed = await _trim(stage, topic, max_len=10, on_full="drop")
    assert trimmed == Trimmed(290, 100, _after(ids[289]))
    assert await _noted(stage, topic, "dropped") == "100"
    assert await stage.ids(topic) == ids[290:]


async def test_dropping_loses_nothing_if_there_is_no_group(stage: Stage) -> None:
    topic = await stage.topic(max_len=10, on_full="drop")
    await stage.add(topic, 50)
    assert (await trim(stage.instance, topic, 0)).dropped == 0
    assert await _noted(stage, topic, "dropped") is None


# --- groups that nobody serves ----------------------------------------------------------------------------


async def test_a_group_without_an_owner_expires(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic(max_len=5, group_expiry=100.0)
    held = await stage.acquire(topic, "billing")
    await stage.add(topic, 20)
    assert await trim(stage.instance, topic, 0) == Trimmed()
    clock.advance(100)  # its lease of 15 s ran out 85 s ago
    assert await trim(stage.instance, topic, 0) == Trimmed()
    clock.advance(16)
    trimmed = await trim(stage.instance, topic, 0)
    assert (trimmed.removed, trimmed.expired_groups) == (15, ("billing",))
    await stage.acquire(topic, "billing", owner=held.owner)
    assert (await trim(stage.instance, topic, 0)).expired_groups == ()


async def test_a_lease_that_was_just_given_back_counts_as_served(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic(max_len=5, group_expiry=100.0)
    await stage.release(await stage.acquire(topic, "billing"))
    await stage.add(topic, 20)
    assert await trim(stage.instance, topic, 0) == Trimmed()
    clock.advance(114)  # it could have been held for 15 s
    assert await trim(stage.instance, topic, 0) == Trimmed()
    clock.advance(2)
    assert (await trim(stage.instance, topic, 0)).expired_groups == ("billing",)


async def test_a_reader_without_leases_counts_as_long_as_it_moves(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic(max_len=5, group_expiry=100.0)
    await stage.add(topic, 20)
    await stage.create_group(topic, "foreign")
    for _ in range(3):
        assert (await trim(stage.instance, topic, 0)).expired_groups == ()
        clock.advance(99)
        await stage.read(topic, "foreign", 1)
    assert await trim(stage.instance, topic, 0) == Trimmed()
    clock.advance(101)
    assert (await trim(stage.instance, topic, 0)).expired_groups == ("foreign",)


async def test_only_the_others_hold_back_when_one_has_expired(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic(delete_acked=True, group_expiry=100.0)
    ids = await stage.add(topic, 20)
    await stage.create_group(topic, "gone")
    await trim(stage.instance, topic, 0)
    clock.advance(101)
    await stage.create_group(topic, "here")
    await stage.ack(topic, "here", *await stage.read(topic, "here", 8))
    assert await trim(stage.instance, topic, 0) == Trimmed(8, 0, _after(ids[7]), ("gone",))


# --- anything at all ------------------------------------------------------------------------------------------


@dataclass
class _Group:
    delivered: int = 0
    pending: set[int] = field(default_factory=set)

    def has_finished(self, at: int) -> bool:
        return at < self.delivered and at not in self.pending


@pytest.mark.parametrize("seed", range(6))
async def test_trimming_agrees_with_a_model(stage: Stage, seed: int) -> None:
    """Groups read and acknowledge at random; what is left, what was lost and what is pending is always known."""
    dice = random.Random(seed)
    topic, ids, first, dropped = await stage.topic(), list[str](), 0, 0
    groups: dict[str, _Group] = {}
    for _ in range(60):
        action = dice.choice(("add", "read", "ack", "ack", "group", "trim", "acked", "drop"))
        name = dice.choice(sorted(groups)) if groups else ""
        if action == "add":
            ids += await stage.add(topic, dice.choice((1, 30, 150)))
        elif action == "group" and len(groups) < 3:
            await stage.create_group(topic, f"g{len(groups)}")
            groups[f"g{len(groups)}"] = _Group(first)
        elif action == "read" and name:
            got = await stage.read(topic, name, dice.randint(1, 120))
            start = max(groups[name].delivered, first)
            assert got == ids[start : start + len(got)]
            groups[name].pending |= set(range(start, start + len(got)))
            groups[name].delivered = start + len(got) if got else groups[name].delivered
        elif action == "ack" and name and groups[name].pending:
            pending = sorted(groups[name].pending)
            chosen = pending[: dice.randint(1, len(pending))] if dice.random() < 0.7 else dice.sample(pending, 1)
            await stage.ack(topic, name, *(ids[at] for at in chosen))
            groups[name].pending -= set(chosen)
        elif action in ("trim", "acked", "drop"):
            first, lost = await _check_trim(stage, topic, ids, first, groups, action, dice.choice((1, 20, 105)))
            dropped += lost
        assert await stage.ids(topic) == ids[first:]
        # Only dropping makes ghosts: IDs that are pending though their entry is gone.
        assert dropped or all(at >= first for group in groups.values() for at in group.pending)
    for name, group in groups.items():
        assert set(await stage.pending(topic, name)) == {ids[at] for at in group.pending}
    assert await _noted(stage, topic, "dropped") == (str(dropped) if dropped else None)


async def _check_trim(
    stage: Stage, topic: Topic, ids: list[str], first: int, groups: dict[str, _Group], action: str, most: int
) -> tuple[int, int]:
    """Where the partition begins after a trim, and how many unfinished entries that cost."""

    def is_finished(at: int) -> bool:
        return all(group.has_finished(at) for group in groups.values())

    # A pending entry that was dropped is pending still, and holds back until somebody acknowledges it.
    oldest = min((at for group in groups.values() for at in group.pending), default=len(ids))
    bound = min([oldest, *(group.delivered for group in groups.values())])
    wanted = max(len(ids) - most, first)
    begin = min(wanted, max(bound, first))
    if action == "acked":
        trimmed = await _trim(stage, topic, delete_acked=True)
        begin = max(bound, first) if groups else first
    elif action == "trim":
        trimmed = await _trim(stage, topic, max_len=most)
    else:
        trimmed = await _trim(stage, topic, max_len=most, on_full="drop")
        begin = wanted
    assert trimmed.removed == begin - first
    assert trimmed.dropped == sum(not is_finished(at) for at in range(first, begin))
    if trimmed.removed:
        assert trimmed.bound == _after(ids[begin - 1])
    return begin, trimmed.dropped


async def test_on_a_cluster(clustered: Stage) -> None:
    topic = await clustered.topic(partitions=4, max_len=10, group_expiry=60.0)
    for partition in range(4):
        await clustered.acquire(topic, "billing", partition)
        await clustered.add(topic, 30, partition)
        await clustered.ack(
            topic, "billing", *await clustered.read(topic, "billing", 30, partition), partition=partition
        )
        assert (await trim(clustered.instance, topic, partition)).removed == 20
