"""What retention does within a send: full topics, bounds that were lowered, message IDs that run out."""

from __future__ import annotations

import pytest

from conquiet.kit.clock import ManualClock
from conquiet.kit.entry_ids import order as place
from conquiet.topics.server.topics import Topic
from conquiet.wire.scripts import Script
from tests.topics.staging import Stage

pytestmark = pytest.mark.cluster_too

_APPEND = Script.named("append")


async def _noted(stage: Stage, topic: Topic, field: str) -> str | None:
    key = stage.instance.keys.trim(stage.stream(topic))
    value = await stage.call(key, "HGET", key, field)
    return None if value is None else value.decode()


def _after(id: str) -> str:
    ms, seq = place(id)
    return f"{ms}-{seq + 1}"


async def _append(
    stage: Stage, topic: Topic, message_id: str = "", *, window: int = 600_000, size: int = 100
) -> list[object]:
    keys, stream, kept = stage.instance.keys, stage.stream(topic), topic.retention
    names = [stream, keys.dedup(stream), keys.dedup_ids(stream), keys.trim(stream)]
    most = -1 if kept.max_len is None else kept.max_len
    call = _APPEND(names, stage.instance.clock.offset_ms, message_id, window, size, most, kept.on_full, "payload", "1")
    return [part.decode() if isinstance(part, bytes) else part for part in await stage.instance.run(stream, call)]


async def test_a_full_topic_takes_no_more_until_something_is_finished(stage: Stage) -> None:
    topic = await stage.topic(max_len=3, on_full="reject")
    await stage.create_group(topic, "billing")
    first = [str((await _append(stage, topic))[1]) for _ in range(3)]
    assert await _append(stage, topic) == ["FULL", 3]
    await stage.read(topic, "billing", 2)
    assert await _append(stage, topic) == ["FULL", 3]
    await stage.ack(topic, "billing", *first[:2])
    status, last, _ = await _append(stage, topic)
    assert status == "OK"
    # Of what is finished no more goes than is needed.
    assert await stage.ids(topic) == [*first[1:], last]
    assert await _noted(stage, topic, "bound") == _after(first[0])


async def test_a_full_topic_without_groups_forgets_the_oldest(stage: Stage) -> None:
    topic = await stage.topic(max_len=3, on_full="reject")
    ids = [(await _append(stage, topic))[1] for _ in range(5)]
    assert await stage.ids(topic) == ids[2:]


async def test_a_full_topic_that_drops_counts_what_was_unfinished(stage: Stage) -> None:
    topic = await stage.topic(max_len=3, on_full="drop")
    await stage.create_group(topic, "billing")
    ids = [str((await _append(stage, topic))[1]) for _ in range(3)]
    await stage.read(topic, "billing", 2)
    await stage.ack(topic, "billing", ids[1])  # the one before it is pending
    outcomes = [await _append(stage, topic) for _ in range(3)]
    assert [outcome[2] for outcome in outcomes] == [1, 0, 1]
    assert await _noted(stage, topic, "dropped") == "2"
    assert await stage.ids(topic) == [outcome[1] for outcome in outcomes]
    assert await _noted(stage, topic, "bound") == _after(ids[2])


async def test_a_limit_that_was_lowered_is_reached_step_by_step(stage: Stage) -> None:
    topic = await stage.topic(max_len=10, on_full="drop")
    await stage.add(topic, 250)
    lengths = []
    for _ in range(3):
        await _append(stage, topic)
        lengths.append(len(await stage.ids(topic)))
    assert lengths == [151, 52, 10]


async def test_a_message_id_is_taken_once_within_its_window(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic()
    first = await _append(stage, topic, "m-1")
    assert await _append(stage, topic, "m-1") == ["AGAIN", first[1]]
    clock.advance(590.0)
    assert (await _append(stage, topic, "m-1"))[0] == "AGAIN"
    clock.advance(11.0)
    assert (await _append(stage, topic, "m-1"))[0] == "OK"


async def test_a_message_id_is_free_after_its_window_however_many_are_stale(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic()
    for number in range(250):
        await _append(stage, topic, f"m-{number}", size=1000)
    clock.advance(601.0)
    assert (await _append(stage, topic, "m-249", size=1000))[0] == "OK"
    assert (await _append(stage, topic, "m-249", size=1000))[0] == "AGAIN"
    key = stage.instance.keys.dedup(stage.stream(topic))
    assert await stage.call(key, "ZCARD", key) == await stage.call(f"{key}:ids", "HLEN", f"{key}:ids") == 150


async def test_no_more_message_ids_are_kept_than_asked(stage: Stage) -> None:
    topic = await stage.topic()
    for number in range(5):
        await _append(stage, topic, f"m-{number}", size=3)
    assert (await _append(stage, topic, "m-2", size=3))[0] == "AGAIN"
    assert (await _append(stage, topic, "m-1", size=3))[0] == "OK"
