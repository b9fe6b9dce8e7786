"""Dead letters that are given back: all or some of them, once each, also when the replay is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from conquiet.errors import ConfigError, GroupLostError, QueueError
from conquiet.kit.clock import ManualClock
from conquiet.topics.operate import replay
from conquiet.topics.operate.dead_letters import letters
from conquiet.topics.server import dead_letters
from conquiet.topics.server.dead_letters import forward
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import LegacyTopic
from conquiet.wire.scripts import Call, Script
from conquiet.wire.streams import entries_of
from tests.rigs.monitoring import watched
from tests.topics.burying import Interrupted, buried_by_owner, left_of, waiting_on
from tests.topics.staging import Stage

pytestmark = pytest.mark.cluster_too


# --- given back ------------------------------------------------------------------------------------------------


async def test_an_entry_that_is_still_there_is_pending_again_under_its_id(stage: Stage) -> None:
    topic = await stage.topic()
    await stage.create_group(topic, "shipping")
    [id] = await stage.dead(topic, "billing", 1)
    assert await replay.replay(stage.instance, topic) == 1
    assert await letters(stage.instance, topic) == []
    assert await stage.ids(topic) == [id]
    held = await stage.acquire(topic, "billing")
    assert await stage.take(held) == ([], [(id, f"0||||0/{id}")])
    assert await stage.pending(topic, "shipping") == []
    assert await stage.take(held, 1, id) == ([], [])
    assert await stage.pending(topic, "billing") == []
    assert await left_of(stage, stage.instance.keys.replayed(stage.stream(topic))) == []


async def test_failing_again_after_a_replay_makes_a_new_letter(stage: Stage) -> None:
    topic = await stage.topic()
    [id] = await stage.dead(topic, "billing", 1)
    await replay.replay(stage.instance, topic)
    held = await stage.acquire(topic, "billing")
    await stage.take(held)
    await stage.bury(held, id)
    await forward(stage.instance, topic, 0, "billing")
    [letter] = await letters(stage.instance, topic)
    assert letter.original_id == id
    assert await replay.replay(stage.instance, topic) == 1


async def test_of_an_entry_that_is_gone_its_group_gets_a_copy(stage: Stage) -> None:
    topic = await stage.topic(partitions=2)
    held = await stage.acquire(topic, "billing", 1)
    more = {
        "key": "k",
        "retryCount": "2",
        "originalMessageId": "1/7-7",
        "onlyGroup": "billing",
        "replayedFrom": "1/6-6",
    }
    [id] = await stage.add(topic, 1, 1, **more)
    await stage.take(held)
    await stage.bury(held, id)
    await forward(stage.instance, topic, 1, "billing")
    stream = stage.stream(topic, 1)
    await stage.call(stream, "XTRIM", stream, "MAXLEN", 0)
    assert await replay.replay(stage.instance, topic) == 1
    [(_, fields)] = entries_of(await stage.call(stream, "XRANGE", stream, "-", "+"))
    assert fields == [
        *(b"payload", b"{}", b"timestamp", b"1", b"key", b"k"),
        *(b"onlyGroup", b"billing", b"replayedFrom", f"1/{id}".encode()),
    ]
    assert await letters(stage.instance, topic) == []


async def test_two_letters_of_one_entry_give_it_back_once(stage: Stage) -> None:
    topic = await stage.topic()
    [id] = await stage.dead(topic, "billing", 1)
    key = stage.instance.keys.dead_letters("orders")
    [(_, words)] = entries_of(await stage.call(key, "XRANGE", key, "-", "+"))
    await stage.call(key, "XADD", key, "*", *words)
    assert await replay.replay(stage.instance, topic) == 2
    held = await stage.acquire(topic, "billing")
    assert await stage.take(held) == ([], [(id, f"0||||0/{id}")])


async def test_an_entry_that_the_group_was_set_back_before_is_not_made_pending(stage: Stage) -> None:
    topic = await stage.topic()
    [id] = await stage.dead(topic, "billing", 1)
    stream = stage.stream(topic)
    await stage.call(stream, "XGROUP", "SETID", stream, "billing", "0")
    assert await replay.replay(stage.instance, topic) == 1
    assert await stage.pending(topic, "billing") == []
    assert await stage.read(topic, "billing", 10) == [id]


async def test_an_entry_in_hand_is_not_taken_away_from_its_owner(stage: Stage) -> None:
    topic = await stage.topic()
    [id] = await stage.dead(topic, "billing", 1)
    stream = stage.stream(topic)
    await stage.call(stream, "XCLAIM", stream, "billing", "worker-9#z", 0, id, "FORCE", "JUSTID")
    assert await replay.replay(stage.instance, topic) == 1
    [row] = await stage.call(stream, "XPENDING", stream, "billing", "-", "+", 10)
    assert row[1] == b"worker-9#z"


async def test_letters_are_chosen_by_id_and_group(stage: Stage) -> None:
    topic = await stage.topic(partitions=2)
    await stage.dead(topic, "billing", 3, 0)
    await stage.dead(topic, "shipping", 2, 1)
    all_of_them = await letters(stage.instance, topic)
    assert await replay.replay(stage.instance, topic, [all_of_them[0].id, all_of_them[3].id], "billing") == 1
    assert await replay.replay(stage.instance, topic, [all_of_them[0].id, "1-1"]) == 0
    assert await replay.replay(stage.instance, topic, []) == 0
    assert await replay.replay(stage.instance, topic, group="shipping") == 2
    assert await letters(stage.instance, topic) == all_of_them[1:3]


async def test_more_than_a_page_is_replayed(stage: Stage) -> None:
    topic = await stage.topic()
    _, ids = await buried_by_owner(stage, topic, 230)
    while await waiting_on(stage, topic):
        await forward(stage.instance, topic, 0, "billing")
    assert await replay.replay(stage.instance, topic) == 230
    assert await stage.pending(topic, "billing") == ids


@pytest.mark.slow
@pytest.mark.any_server
@pytest.mark.one_node
async def test_a_replay_that_was_killed_makes_the_next_one_no_longer(
    stage: Stage, clock: ManualClock, url: str
) -> None:
    """What it may still have at hand is remembered for ten minutes, and nobody looks through that."""
    topic = await stage.topic()
    _, ids = await buried_by_owner(stage, topic, 1000)
    while await waiting_on(stage, topic):
        await forward(stage.instance, topic, 0, "billing")
    stream, keys = stage.stream(topic), stage.instance.keys
    replayed, gone = keys.replayed(stream), keys.replayed_gone(stream)
    await stage.instance.run(stream, Script.named("replay_begin")([replayed], clock.offset_ms, "killed", 600_000, 100))
    async with watched(url) as work:
        assert await replay.replay(stage.instance, topic) == len(ids)
    assert len(work.calls) < 2.5 * len(ids)  # each letter is read once more and given back
    assert work.most < 1_500
    assert await left_of(stage, replayed) == [b"run:killed"]
    assert await stage.call(gone, "ZCARD", gone) == len(ids)
    assert 0 < await stage.call(gone, "PTTL", gone) <= 600_000
    clock.advance(601)
    assert await stage.dead(topic, "billing", 1)
    assert await replay.replay(stage.instance, topic) == 1
    assert await stage.call(gone, "EXISTS", replayed, gone) == 0


@pytest.mark.any_server
async def test_a_letter_without_fields_whose_entry_is_gone_is_refused(stage: Stage) -> None:
    """There is nothing that a copy could be made of."""
    topic = await stage.topic()
    held = await stage.acquire(topic, "billing")
    words = [word for number in range(4000) for word in (f"f{number}", "x")]
    stream = stage.stream(topic)
    id = (await stage.call(stream, "XADD", stream, "*", *words)).decode()
    await stage.take(held)
    await stage.bury(held, id)
    await forward(stage.instance, topic, 0, "billing")
    await stage.call(stream, "XDEL", stream, id)
    with pytest.raises(ConfigError, match="is gone, and its letter has no fields"):
        await replay.replay(stage.instance, topic)
    assert len(await letters(stage.instance, topic)) == 1


async def test_a_letter_whose_group_is_gone_stays_and_the_others_do_not(stage: Stage) -> None:
    topic = await stage.topic(partitions=2)
    await stage.dead(topic, "billing", 2, 0)
    [id] = await stage.dead(topic, "shipping", 1, 1)
    stream = stage.stream(topic, 0)
    await stage.call(stream, "XGROUP", "DESTROY", stream, "billing")
    with pytest.raises(
        GroupLostError, match=r"no group 'billing' .* \(and 1 more were refused\); 1 letters were replayed"
    ):
        await replay.replay(stage.instance, topic)
    assert [letter.group for letter in await letters(stage.instance, topic)] == ["billing"] * 2
    assert await stage.pending(topic, "shipping", 1) == [id]
    assert await left_of(stage, stage.instance.keys.replayed(stream)) == []


async def test_a_legacy_stream_cannot_hold_a_copy(stage: Stage) -> None:
    stream = stage.instance.keys.partition("legacy", 0)
    topic = await stage.registry.fetch(LegacyTopic(stream))
    kept, lost = await stage.dead(topic, "billing", 2)
    await stage.call(stream, "XDEL", stream, lost)
    with pytest.raises(ConfigError, match=f"entry {lost} is gone, and a legacy stream cannot hold a copy"):
        await replay.replay(stage.instance, topic)
    assert await stage.pending(topic, "billing") == [kept]
    assert [letter.original_id for letter in await letters(stage.instance, topic)] == [lost]


@pytest.mark.parametrize("gone", [True, False])
@pytest.mark.parametrize("step", ["replay_begin", "replay", "delete", "replay_end"])
@pytest.mark.parametrize("before", [True, False])
async def test_a_crash_while_replaying_loses_and_doubles_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, gone: bool, step: str, before: bool
) -> None:
    topic = await stage.topic()
    await stage.dead(topic, "billing", 3)
    if gone:
        stream = stage.stream(topic)
        await stage.call(stream, "XTRIM", stream, "MAXLEN", 0)
    with monkeypatch.context() as patch:
        _crash_at(patch, step, before)
        with pytest.raises(Interrupted):
            await replay.replay(stage.instance, topic)
    await replay.replay(stage.instance, topic)
    assert await replay.replay(stage.instance, topic) == 0
    assert await letters(stage.instance, topic) == []
    held = await stage.acquire(topic, "billing")
    fresh, due = await stage.take(held)
    assert (len(fresh), len(due)) == ((3, 0) if gone else (0, 3))
    assert await stage.take(held) == ([], [])


def _crash_at(patch: pytest.MonkeyPatch, step: str, before: bool) -> None:
    def crashing(work: Callable[..., Awaitable[object]], name_of: Callable[[object], str]) -> object:
        async def run(*args: object) -> object:
            if name_of(args[-1]) != step:
                return await work(*args)
            if not before:
                await work(*args)
            raise Interrupted

        return run

    patch.setattr(Instance, "run", crashing(Instance.run, lambda call: call.script.name))  # type: ignore[attr-defined]
    patch.setattr(Instance, "run_many", crashing(Instance.run_many, lambda calls: calls[0].script.name))  # type: ignore[index]
    patch.setattr(replay, "delete", crashing(dead_letters.delete, lambda _: "delete"))


@pytest.mark.parametrize("gone", [True, False])
async def test_a_replay_that_wakes_up_late_changes_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    """One has read the letters and sleeps; another replays, removes and finishes them; then the first goes on."""
    topic = await stage.topic()
    ids = await stage.dead(topic, "billing", 3)
    stream = stage.stream(topic)
    if gone:
        await stage.call(stream, "XTRIM", stream, "MAXLEN", 0)
    run_many = Instance.run_many
    asleep, awake = asyncio.Event(), asyncio.Event()

    async def slow(self: Instance, key: str, calls: list[Call]) -> list[object]:
        if not asleep.is_set():
            asleep.set()
            await awake.wait()
        return await run_many(self, key, calls)

    monkeypatch.setattr(Instance, "run_many", slow)
    first = asyncio.create_task(replay.replay(stage.instance, topic))
    await asleep.wait()
    assert await replay.replay(stage.instance, topic) == 3
    held = await stage.acquire(topic, "billing")
    fresh, due = await stage.take(held)
    await stage.take(held, 0, *fresh, *(id for id, _ in due))
    awake.set()
    assert await first == 0
    assert await stage.take(held) == ([], [])
    assert len(fresh) + len(due) == len(ids)
    marks = stage.instance.keys.replayed_gone(stream)
    assert await stage.call(marks, "EXISTS", stage.instance.keys.replayed(stream), marks) == 0


async def test_many_replays_at_once(stage: Stage) -> None:
    topic = await stage.topic()
    _, ids = await buried_by_owner(stage, topic, 150)
    while await waiting_on(stage, topic):
        await forward(stage.instance, topic, 0, "billing")
    stream = stage.stream(topic)
    await stage.call(stream, "XTRIM", stream, "MAXLEN", 0)
    counts = await asyncio.gather(*(replay.replay(stage.instance, topic) for _ in range(4)))
    assert sum(counts) == len(ids)
    assert len(await stage.ids(topic)) == len(ids)
    gone = stage.instance.keys.replayed_gone(stream)
    assert await stage.call(gone, "EXISTS", stage.instance.keys.replayed(stream), gone) == 0


async def test_a_replay_that_stood_still_for_too_long_is_given_up(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, clock: ManualClock
) -> None:
    topic = await stage.topic()
    await stage.dead(topic, "billing", 1)
    run_many = Instance.run_many

    async def slow(self: Instance, key: str, calls: list[Call]) -> list[object]:
        monkeypatch.undo()
        clock.advance(601)
        assert await replay.replay(stage.instance, topic) == 1
        return await run_many(self, key, calls)

    monkeypatch.setattr(Instance, "run_many", slow)
    with pytest.raises(QueueError, match="stood still for too long"):
        await replay.replay(stage.instance, topic)


async def test_on_a_cluster(clustered: Stage) -> None:
    topic = await clustered.topic(partitions=4)
    for partition in range(4):
        await clustered.dead(topic, "billing", 2, partition)
        stream = clustered.stream(topic, partition)
        if partition % 2:
            await clustered.call(stream, "XTRIM", stream, "MAXLEN", 0)
    assert len(await letters(clustered.instance, topic)) == 8
    assert await replay.replay(clustered.instance, topic) == 8
    for partition in range(4):
        held = await clustered.acquire(topic, "billing", partition)
        fresh, due = await clustered.take(held)
        assert (len(fresh), len(due)) == ((2, 0) if partition % 2 else (0, 2))
