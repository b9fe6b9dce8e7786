"""Dead letters: on their way, in their stream, and given back; whatever crashes, each of them once."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Awaitable, Callable

import pytest

from conquiet.errors import ConfigError, GroupLostError, QueueError
from conquiet.kit.clock import ManualClock
from conquiet.topics.operate import replay
from conquiet.topics.operate.dead_letters import letters, purge
from conquiet.topics.options import Retention
from conquiet.topics.server import dead_letters
from conquiet.topics.server.dead_letters import DeadLetter, forward
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import LegacyTopic, Topic
from conquiet.wire.connections import Connections
from conquiet.wire.scripts import Call, Script
from conquiet.wire.streams import entries_of
from tests.rigs.monitoring import watched
from tests.topics.staging import Held, Stage

pytestmark = pytest.mark.cluster_too


async def _buried(stage: Stage, topic: Topic, count: int, **more: str) -> tuple[Held, list[str]]:
    """Dead letters that are still in the outbox."""
    held = await stage.acquire(topic, "billing")
    ids = await stage.add(topic, count, **more)
    await stage.take(held, count)
    for start in range(0, count, 100):
        await stage.bury(held, *ids[start : start + 100])
    return held, ids


async def _waiting(stage: Stage, topic: Topic) -> int:
    outbox = stage.instance.keys.outbox(stage.stream(topic), "billing")
    return int(await stage.call(outbox, "XLEN", outbox))


async def _left(stage: Stage, key: str) -> list[bytes]:
    return list(await stage.call(key, "HKEYS", key))


class Interrupted(Exception):
    """A crash at a chosen point."""


def _interrupted(monkeypatch: pytest.MonkeyPatch, needle: bytes, *, before: bool) -> Callable[[], None]:
    """Crash at the next command that contains ``needle``, before or after it is run; returns how to go on."""
    call_many = Connections.call_many

    async def crashing(self: Connections, key: str, commands: list[bytes]) -> list[object]:
        found = any(needle in command for command in commands)
        if found and before:
            raise Interrupted
        replies = await call_many(self, key, commands)
        # A server that has never seen a script has not run it.
        if found and not any(isinstance(reply, Exception) for reply in replies):
            raise Interrupted
        return replies

    monkeypatch.setattr(Connections, "call_many", crashing)
    return monkeypatch.undo


# --- on their way --------------------------------------------------------------------------------------------


async def test_a_letter_tells_everything(stage: Stage) -> None:
    topic = await stage.topic(partitions=3)
    held = await stage.acquire(topic, "billing", 2, "worker-1#a1")
    [id] = await stage.add(topic, 1, 2, b'{"order": 1}', key="customer-7", headers='{"trace":"abc"}', retryCount="0")
    await stage.take(held)
    await stage.park(held, id, delay=0)
    await stage.bury(held, id)
    assert await forward(stage.instance, topic, 2, "billing") == 1
    [letter] = await letters(stage.instance, topic)
    now = dt.datetime.now(dt.UTC)
    assert letter.topic == "orders"
    assert (letter.partition, letter.group, letter.original_id) == (2, "billing", id)
    assert (letter.key, letter.payload, letter.raw) == ("customer-7", {"order": 1}, b'{"order": 1}')
    assert letter.headers == {"trace": "abc"}
    assert (letter.attempts, letter.crashes, letter.reason) == (4, 0, "too many retries")
    assert (letter.error_type, letter.error, letter.traceback) == ("KeyError", "it's gone", "Traceback...")
    assert letter.first_failed_at is not None
    assert letter.failed_at is not None
    assert letter.first_failed_at <= letter.failed_at <= now + dt.timedelta(seconds=1)
    assert letter.failed_at.tzinfo is not None
    assert letter.consumer == "worker-1"
    assert letter.fields[::2] == (b"payload", b"timestamp", b"key", b"headers", b"retryCount")
    assert not letter.is_foreign


async def test_nothing_is_moved_from_an_empty_outbox(stage: Stage) -> None:
    topic = await stage.topic()
    assert await forward(stage.instance, topic, 0, "billing") == 0
    keys = stage.instance.keys
    assert await stage.call(keys.forwarded("orders"), "EXISTS", keys.forwarded("orders")) == 0


async def test_letters_arrive_once_in_order_and_leave_nothing_behind(stage: Stage) -> None:
    topic = await stage.topic()
    _, ids = await _buried(stage, topic, 250)
    moved = [await forward(stage.instance, topic, 0, "billing") for _ in range(4)]
    assert moved == [100, 100, 50, 0]
    assert [letter.original_id for letter in await letters(stage.instance, topic, 1000)] == ids
    assert await _waiting(stage, topic) == 0
    assert await _left(stage, stage.instance.keys.forwarded("orders")) == []


async def test_large_letters_go_in_several_steps(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = await stage.topic()
    _, ids = await _buried(stage, topic, 8, note="x" * 300_000)
    sizes = list[int]()
    run = Instance.run

    async def measured(self: Instance, key: str, call: Call) -> object:
        sizes.append(len(call.by_hash()))
        return await run(self, key, call)

    monkeypatch.setattr(Instance, "run", measured)
    assert await forward(stage.instance, topic, 0, "billing") == 8
    assert max(sizes) < 1_100_000
    assert [letter.original_id for letter in await letters(stage.instance, topic)] == ids


@pytest.mark.parametrize("needle", [b"EVALSHA", b"XRANGE", b"XDEL"])
@pytest.mark.parametrize("before", [True, False])
async def test_a_crash_while_forwarding_loses_and_doubles_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, needle: bytes, before: bool
) -> None:
    topic = await stage.topic()
    _, ids = await _buried(stage, topic, 5)
    go_on = _interrupted(monkeypatch, needle, before=before)
    with pytest.raises(Interrupted):
        await forward(stage.instance, topic, 0, "billing")
    go_on()
    await forward(stage.instance, topic, 0, "billing", limit=2)
    await forward(stage.instance, topic, 0, "billing")
    assert [letter.original_id for letter in await letters(stage.instance, topic)] == ids
    assert await _waiting(stage, topic) == 0


@pytest.mark.parametrize("step", range(1, 4))
async def test_a_crash_at_each_script_of_a_forward(stage: Stage, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The claim, the letters, and forgetting them: each is run, and its answer never arrives."""
    topic = await stage.topic()
    _, ids = await _buried(stage, topic, 5)
    run, count = Instance.run, 0

    async def crashing(self: Instance, key: str, call: Call) -> object:
        nonlocal count
        count += 1
        reply = await run(self, key, call)
        if count == step:
            raise Interrupted
        return reply

    with monkeypatch.context() as patch:
        patch.setattr(Instance, "run", crashing)
        with pytest.raises(Interrupted):
            await forward(stage.instance, topic, 0, "billing")
    # A letter more, and a smaller step than before the crash.
    held = await stage.acquire(topic, "billing")
    ids += await stage.add(topic, 1)
    await stage.take(held)
    await stage.bury(held, ids[-1])
    while await _waiting(stage, topic):
        await forward(stage.instance, topic, 0, "billing", limit=2)
    assert [letter.original_id for letter in await letters(stage.instance, topic)] == ids
    assert await _left(stage, stage.instance.keys.forwarded("orders")) == []


async def test_a_forwarder_that_wakes_up_late_changes_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """One has read the outbox and sleeps; another forwards everything and forgets it; then the first goes on."""
    topic = await stage.topic()
    _, ids = await _buried(stage, topic, 5)
    read = dead_letters._Outbox.read
    asleep, awake = asyncio.Event(), asyncio.Event()

    async def slow(self: dead_letters._Outbox, most: int) -> object:
        found = await read(self, most)
        if not asleep.is_set():
            asleep.set()
            await awake.wait()
        return found

    monkeypatch.setattr(dead_letters._Outbox, "read", slow)
    first = asyncio.create_task(forward(stage.instance, topic, 0, "billing"))
    await asleep.wait()
    assert await forward(stage.instance, topic, 0, "billing") == 5
    awake.set()
    assert await first == 0
    assert [letter.original_id for letter in await letters(stage.instance, topic)] == ids


async def test_many_forwarders_at_once(stage: Stage) -> None:
    topic = await stage.topic()
    _, ids = await _buried(stage, topic, 300)
    while await _waiting(stage, topic):
        await asyncio.gather(*(forward(stage.instance, topic, 0, "billing", limit=40) for _ in range(5)))
    assert sorted(letter.original_id for letter in await letters(stage.instance, topic, 1000)) == sorted(ids)


async def test_an_entry_as_wide_as_a_script_can_take(stage: Stage) -> None:
    """The outbox holds what one script could write: the next one must be able to take that."""
    topic = await stage.topic()
    outbox = stage.instance.keys.outbox(stage.stream(topic), "billing")
    words = [f"w{number}" for number in range(7998)]
    await stage.call(outbox, "XADD", outbox, "*", *words)
    assert await forward(stage.instance, topic, 0, "billing") == 1
    [letter] = await letters(stage.instance, topic)
    assert letter.is_foreign
    assert len(letter.fields) == 7998


async def test_dead_letters_have_limits_of_their_own(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic(dead_letter_max_len=3)
    ids = await stage.dead(topic, "billing", 5)
    assert [letter.original_id for letter in await letters(stage.instance, topic)] == ids[2:]
    aged = Topic("orders", 1, retention=Retention(dead_letter_max_age=60.0))
    clock.advance(120)
    await stage.dead(aged, "billing", 1)
    assert [letter.original_id for letter in await letters(stage.instance, topic)] == []
    assert await purge(stage.instance, topic) == 0


# --- where they are ------------------------------------------------------------------------------------------


async def test_a_letter_may_have_fields_of_the_same_names_as_its_own(stage: Stage) -> None:
    topic = await stage.topic()
    [id] = await stage.dead(topic, "billing", 1, group="shop", fields="99", originalMessageId="0/1-1", error="none")
    [letter] = await letters(stage.instance, topic)
    assert (letter.group, letter.original_id, letter.error) == ("billing", id, "it's gone")
    assert letter.fields[4:] == (b"group", b"shop", b"fields", b"99", b"originalMessageId", b"0/1-1", b"error", b"none")


@pytest.mark.parametrize(
    "words",
    [
        ["hello", "world"],
        ["originalTopic", "orders", "partitionId", "0"],
        ["fields", "1", "a", "b"],
    ],
)
async def test_a_foreign_entry_is_listed_and_purged_but_not_replayed(stage: Stage, words: list[str]) -> None:
    topic = await stage.topic()
    key = stage.instance.keys.dead_letters("orders")
    foreign = (await stage.call(key, "XADD", key, "*", *words)).decode()
    [id] = await stage.dead(topic, "billing", 1)
    first, second = await letters(stage.instance, topic)
    assert (first.reason, first.is_foreign, first.fields) == ("foreign entry", True, tuple(map(str.encode, words)))
    assert (first.payload, first.key, first.headers, first.raw) == (None, None, {}, b"")
    assert second.original_id == id
    with pytest.raises(ConfigError, match=f"entry {foreign} is no dead letter"):
        await replay.replay(stage.instance, topic, [second.id, foreign])
    assert len(await letters(stage.instance, topic)) == 2
    assert await replay.replay(stage.instance, topic) == 1
    assert await purge(stage.instance, topic, [foreign]) == 1
    assert await letters(stage.instance, topic) == []


async def test_a_letter_of_another_topic_is_foreign(stage: Stage) -> None:
    topic, other = await stage.topic(), await stage.topic("returns")
    await stage.dead(other, "billing", 1)
    source, target = stage.instance.keys.dead_letters("returns"), stage.instance.keys.dead_letters("orders")
    [(_, words)] = entries_of(await stage.call(source, "XRANGE", source, "-", "+"))
    await stage.call(target, "XADD", target, "*", *words)
    [letter] = await letters(stage.instance, topic)
    assert letter.is_foreign


@pytest.mark.parametrize(
    ("fields", "payload", "headers"),
    [
        ([b"payload", b"{not json", b"headers", b"[1"], None, {}),
        ([b"payload", b"\xff\x00", b"codec", b"bytes"], b"\xff\x00", {}),
        ([b"payload", b"\xff\x00", b"codec", b"avro"], None, {}),
        ([b"payload", b"[1]", b"headers", b"[1]"], [1], {}),
        ([b"data", b'{"a": 1}'], {"a": 1}, {}),
        ([], None, {}),
    ],
)
def test_an_undecodable_entry_is_a_letter_as_it_is(fields: list[bytes], payload: object, headers: object) -> None:
    letter = DeadLetter("1-1", "orders", tuple(fields))
    assert (letter.payload, letter.headers) == (payload, headers)


async def test_letters_are_found_by_group_and_place(stage: Stage) -> None:
    topic = await stage.topic(partitions=2)
    for _ in range(3):
        await stage.dead(topic, "billing", 1, 0)
        await stage.dead(topic, "shipping", 1, 1)
    all_of_them = await letters(stage.instance, topic)
    assert [letter.group for letter in all_of_them] == ["billing", "shipping"] * 3
    assert await letters(stage.instance, topic, 2) == all_of_them[:2]
    assert await letters(stage.instance, topic, 2, after=all_of_them[1].id) == all_of_them[2:4]
    assert await letters(stage.instance, topic, 2, group="shipping") == all_of_them[1:5:2]
    assert await letters(stage.instance, topic, after=all_of_them[2].id, group="billing") == [all_of_them[4]]
    assert await purge(stage.instance, topic, [all_of_them[0].id, all_of_them[1].id, "1-1"], "billing") == 1
    assert await purge(stage.instance, topic, group="shipping") == 3
    assert await letters(stage.instance, topic) == [all_of_them[2], all_of_them[4]]
    assert await purge(stage.instance, topic) == 2


@pytest.mark.parametrize("id", ["", "5", "a-b", "5-", "-5", "5-18446744073709551616", "5-5-5", None, 5, "٣-٣"])
async def test_what_is_no_id_is_refused(stage: Stage, id: object) -> None:
    topic = await stage.topic()
    for work in (replay.replay, purge):
        with pytest.raises(ConfigError, match="must be an entry's ID"):
            await work(stage.instance, topic, [id])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="not the string '5-5'"):
        await purge(stage.instance, topic, "5-5")
    if id is not None:
        with pytest.raises(ConfigError, match="after must be an entry's ID"):
            await letters(stage.instance, topic, after=id)  # type: ignore[arg-type]


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
    assert await _left(stage, stage.instance.keys.replayed(stage.stream(topic))) == []


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
    _, ids = await _buried(stage, topic, 230)
    while await _waiting(stage, topic):
        await forward(stage.instance, topic, 0, "billing")
    assert await replay.replay(stage.instance, topic) == 230
    assert await stage.pending(topic, "billing") == ids


@pytest.mark.any_server
@pytest.mark.one_node
async def test_a_replay_that_was_killed_makes_the_next_one_no_longer(
    stage: Stage, clock: ManualClock, url: str
) -> None:
    """What it may still have at hand is remembered for ten minutes, and nobody looks through that."""
    topic = await stage.topic()
    _, ids = await _buried(stage, topic, 1000)
    while await _waiting(stage, topic):
        await forward(stage.instance, topic, 0, "billing")
    stream, keys = stage.stream(topic), stage.instance.keys
    replayed, gone = keys.replayed(stream), keys.replayed_gone(stream)
    await stage.instance.run(stream, Script.named("replay_begin")([replayed], clock.offset_ms, "killed", 600_000, 100))
    async with watched(url) as work:
        assert await replay.replay(stage.instance, topic) == len(ids)
    assert len(work.calls) < 2.5 * len(ids)  # each letter is read once more and given back
    assert work.most < 1_500
    assert await _left(stage, replayed) == [b"run:killed"]
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
    assert await _left(stage, stage.instance.keys.replayed(stream)) == []


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
    _, ids = await _buried(stage, topic, 150)
    while await _waiting(stage, topic):
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
