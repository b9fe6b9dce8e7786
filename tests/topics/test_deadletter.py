"""Dead letters: on their way, in their stream, and given back; whatever crashes, each of them once."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable

import pytest

from conquiet.errors import ConfigError
from conquiet.kit.clock import ManualClock
from conquiet.topics.operate import replay
from conquiet.topics.operate.dead_letters import letters, purge
from conquiet.topics.options import Retention
from conquiet.topics.server import dead_letters
from conquiet.topics.server.dead_letters import DeadLetter, forward
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Topic
from conquiet.wire.connections import Connections
from conquiet.wire.scripts import Call
from conquiet.wire.streams import entries_of
from tests.topics.burying import Interrupted, buried_by_owner, left_of, waiting_on
from tests.topics.staging import Stage

pytestmark = pytest.mark.cluster_too


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
    _, ids = await buried_by_owner(stage, topic, 250)
    moved = [await forward(stage.instance, topic, 0, "billing") for _ in range(4)]
    assert moved == [100, 100, 50, 0]
    assert [letter.original_id for letter in await letters(stage.instance, topic, 1000)] == ids
    assert await waiting_on(stage, topic) == 0
    assert await left_of(stage, stage.instance.keys.forwarded("orders")) == []


async def test_large_letters_go_in_several_steps(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = await stage.topic()
    _, ids = await buried_by_owner(stage, topic, 8, note="x" * 300_000)
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
    _, ids = await buried_by_owner(stage, topic, 5)
    go_on = _interrupted(monkeypatch, needle, before=before)
    with pytest.raises(Interrupted):
        await forward(stage.instance, topic, 0, "billing")
    go_on()
    await forward(stage.instance, topic, 0, "billing", limit=2)
    await forward(stage.instance, topic, 0, "billing")
    assert [letter.original_id for letter in await letters(stage.instance, topic)] == ids
    assert await waiting_on(stage, topic) == 0


@pytest.mark.parametrize("step", range(1, 4))
async def test_a_crash_at_each_script_of_a_forward(stage: Stage, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The claim, the letters, and forgetting them: each is run, and its answer never arrives."""
    topic = await stage.topic()
    _, ids = await buried_by_owner(stage, topic, 5)
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
    while await waiting_on(stage, topic):
        await forward(stage.instance, topic, 0, "billing", limit=2)
    assert [letter.original_id for letter in await letters(stage.instance, topic)] == ids
    assert await left_of(stage, stage.instance.keys.forwarded("orders")) == []


async def test_a_forwarder_that_wakes_up_late_changes_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """One has read the outbox and sleeps; another forwards everything and forgets it; then the first goes on."""
    topic = await stage.topic()
    _, ids = await buried_by_owner(stage, topic, 5)
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
    _, ids = await buried_by_owner(stage, topic, 300)
    while await waiting_on(stage, topic):
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


@pytest.mark.any_server
@pytest.mark.one_node
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
