"""No call holds the server up, however much there is: the work of each is counted."""

from __future__ import annotations

from typing import Final

import pytest

from conquiet.errors import QueueError
from conquiet.topics import Broker, retention
from conquiet.topics.admin import Admin
from conquiet.topics.registry import Topic
from tests.rigs.monitoring import watched
from conquiet.wire.scripts import Script
from tests.topics.consuming import Recorder, finished, impatient
from tests.topics.staging import Held, Stage

pytestmark = pytest.mark.any_server

MANY: Final = 3_300
"""More than any call may deal with."""
PAGE: Final = 1_500
"""Words that a call may need for a thousand entries; some hundred microseconds of a server's time."""


async def left(stage: Stage, count: int = MANY) -> tuple[Topic, Held]:
    """A group with so many pending entries, whose owner is gone."""
    topic = await stage.topic()
    held = await stage.acquire(topic, "billing")
    stream = stage.stream(topic)
    await stage.add(topic, count)
    await stage.call(stream, "XREADGROUP", "GROUP", "billing", held.owner, "COUNT", count, "STREAMS", stream, ">")
    await stage.release(held)
    return topic, held


# --- a group that is made to forget -------------------------------------------------------------------------


async def test_resetting_a_group_forgets_page_by_page(stage: Stage, admin: Admin, url: str) -> None:
    topic, _ = await left(stage)
    async with watched(url) as work:
        await admin.reset_group("orders", "billing", "earliest")
    assert 0 < work.most <= PAGE
    info = await admin.describe_group("orders", "billing")
    assert (info.pending, info.lag) == (0, MANY)
    lease = stage.site.keys.lease(stage.stream(topic), "billing")
    assert await stage.call(lease, "HEXISTS", lease, "forget") == 0


async def test_deleting_a_group_forgets_page_by_page(stage: Stage, admin: Admin, url: str) -> None:
    await left(stage)
    async with watched(url) as work:
        await admin.delete_group("orders", "billing")
    assert 0 < work.most <= PAGE
    assert await admin.list_groups("orders") == []


async def begin_reset(stage: Stage, topic: Topic, id: str) -> None:
    """The first page of a reset, after which whoever wanted it dies."""
    stream, keys = stage.stream(topic), stage.site.keys
    names = [keys.lease(stream, "billing"), stream, keys.retry(stream, "billing"), keys.attempts(stream, "billing")]
    call = Script.named("group_reset")(names, stage.site.clock.offset_ms, "billing", id, 100)
    assert await stage.site.run(stream, call) == 1


async def begin_deletion(stage: Stage, topic: Topic) -> None:
    stream, keys = stage.stream(topic), stage.site.keys
    lease, retry, attempts, outbox = keys.of_group(stream, "billing")
    names = [lease, stream, retry, attempts, outbox, keys.trim(stream)]
    call = Script.named("group_delete")(names, stage.site.clock.offset_ms, "billing", 100)
    assert await stage.site.run(stream, call) == [0, 1]


@pytest.mark.parametrize("to", ["earliest", "latest"])
async def test_who_takes_a_partition_whose_reset_was_not_completed_completes_it(
    stage: Stage, url: str, to: str
) -> None:
    """Nothing of before is handled, and all from the new place on is."""
    topic, _ = await left(stage)
    await begin_reset(stage, topic, "0-0" if to == "earliest" else "$")
    [more] = await stage.add(topic, 1, 0, b'"new"')
    seen = Recorder()
    async with Broker(url, namespace=stage.site.keys.namespace, clock=stage.site.clock) as broker:
        async with broker.subscribe("orders", group="billing", handler=seen, options=impatient(max_inflight=1000)):
            await finished(broker, "orders", "billing")
    assert [message.id for message in seen.messages] == (await stage.ids(topic) if to == "earliest" else [more])


async def test_the_reset_can_be_repeated_to_another_place(stage: Stage, admin: Admin) -> None:
    topic, _ = await left(stage, 300)
    await begin_reset(stage, topic, "$")
    await admin.reset_group("orders", "billing", "earliest")
    info = await admin.describe_group("orders", "billing")
    assert (info.pending, info.lag) == (0, 300)


async def test_the_owner_is_fenced_off_from_the_first_page_on(stage: Stage) -> None:
    topic, held = await left(stage, 300)
    held = await stage.acquire(topic, "billing", owner=held.owner)
    await begin_reset(stage, topic, "0-0")
    assert await stage.take(held) is None


async def test_retention_removes_nothing_that_a_reset_is_about_to_bring_back(stage: Stage) -> None:
    topic = await stage.topic(delete_acked=True)
    held = await stage.acquire(topic, "billing")
    ids = await stage.add(topic, 300)
    await stage.take(held, 300)
    await begin_reset(stage, topic, "0-0")
    assert (await retention.trim(stage.site, topic, 0)).removed == 0
    assert await stage.ids(topic) == ids


async def test_who_subscribes_after_a_deletion_that_was_not_completed_begins_anew(stage: Stage, url: str) -> None:
    topic, _ = await left(stage, 300)
    await begin_deletion(stage, topic)
    stage.site.clock.advance(0.01)  # type: ignore[attr-defined]
    seen = Recorder()
    async with Broker(url, namespace=stage.site.keys.namespace, clock=stage.site.clock) as broker:
        async with broker.subscribe("orders", group="billing", handler=seen, options=impatient()):
            await finished(broker, "orders", "billing")
    assert [message.id for message in seen.messages] == await stage.ids(topic)


async def test_the_deletion_can_be_repeated(stage: Stage, admin: Admin) -> None:
    topic, _ = await left(stage, 300)
    await begin_deletion(stage, topic)
    await admin.delete_group("orders", "billing")
    assert await admin.list_groups("orders") == []
    held = await stage.acquire(topic, "billing")
    assert len((await stage.take(held, 300))[0]) == 300


async def test_nothing_is_replayed_into_a_group_that_is_being_reset(stage: Stage, admin: Admin) -> None:
    """It would be forgotten with the rest."""
    topic = await stage.topic()
    await stage.dead(topic, "billing", 1)
    stream = stage.stream(topic)
    await stage.add(topic, 300)
    await stage.read(topic, "billing", 300)
    await begin_reset(stage, topic, "$")
    with pytest.raises(QueueError, match="is being reset"):
        await admin.replay("orders")
    assert len(await admin.dead_letters("orders")) == 1
    await admin.reset_group("orders", "billing", "latest")
    assert await admin.replay("orders") == 1
    assert len(await stage.call(stream, "XPENDING", stream, "billing", "-", "+", 10)) == 1
