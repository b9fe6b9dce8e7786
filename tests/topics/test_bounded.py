"""No call holds the server up, however much there is: the work of each is counted."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
import pytest

from conquiet import Broker, Reject
from conquiet.errors import QueueError
from conquiet.kit.clock import ManualClock
from conquiet.message import Message
from conquiet.topics.operate.admin import Admin
from conquiet.topics.outside import scan
from conquiet.topics.server import retention
from conquiet.topics.server.group import count_after
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Registry, Topic
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.keys import Keys
from conquiet.wire.scripts import Script
from conquiet.wire.streams import pack
from tests.rigs.asking import ask
from tests.rigs.monitoring import watched
from tests.rigs.proxy import Proxy
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
    lease = stage.instance.keys.lease(stage.stream(topic), "billing")
    assert await stage.call(lease, "HEXISTS", lease, "forget") == 0


async def test_deleting_a_group_forgets_page_by_page(stage: Stage, admin: Admin, url: str) -> None:
    await left(stage)
    async with watched(url) as work:
        await admin.delete_group("orders", "billing")
    assert 0 < work.most <= PAGE
    assert await admin.list_groups("orders") == []


async def begin_reset(stage: Stage, topic: Topic, id: str) -> None:
    """The first page of a reset, after which whoever wanted it dies."""
    stream, keys = stage.stream(topic), stage.instance.keys
    names = [keys.lease(stream, "billing"), stream, keys.retry(stream, "billing"), keys.attempts(stream, "billing")]
    call = Script.named("group_reset")(names, stage.instance.clock.offset_ms, "billing", id, 100)
    assert await stage.instance.run(stream, call) == 1


async def begin_deletion(stage: Stage, topic: Topic) -> None:
    stream, keys = stage.stream(topic), stage.instance.keys
    lease, retry, attempts, outbox = keys.of_group(stream, "billing")
    names = [lease, stream, retry, attempts, outbox, keys.trim(stream)]
    call = Script.named("group_delete")(names, stage.instance.clock.offset_ms, "billing", 100)
    assert await stage.instance.run(stream, call) == [0, 1]


@pytest.mark.parametrize("to", ["earliest", "latest"])
async def test_who_takes_a_partition_whose_reset_was_not_completed_completes_it(
    stage: Stage, url: str, to: str
) -> None:
    """Nothing of before is handled, and all from the new place on is."""
    topic, _ = await left(stage)
    await begin_reset(stage, topic, "0-0" if to == "earliest" else "$")
    [more] = await stage.add(topic, 1, 0, b'"new"')
    seen = Recorder()
    options = impatient(max_inflight=1000)
    async with (
        Broker(url, namespace=stage.instance.keys.namespace, clock=stage.instance.clock) as broker,
        broker.subscribe("orders", group="billing", handler=seen, options=options),
    ):
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
    assert (await retention.trim(stage.instance, topic, 0)).removed == 0
    assert await stage.ids(topic) == ids


async def test_who_subscribes_after_a_deletion_that_was_not_completed_begins_anew(stage: Stage, url: str) -> None:
    topic, _ = await left(stage, 300)
    await begin_deletion(stage, topic)
    stage.instance.clock.advance(0.01)  # type: ignore[attr-defined]
    seen = Recorder()
    async with (
        Broker(url, namespace=stage.instance.keys.namespace, clock=stage.instance.clock) as broker,
        broker.subscribe("orders", group="billing", handler=seen, options=impatient()),
    ):
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


# --- messages that are large ----------------------------------------------------------------------------------

LARGE: Final = b'"%s"' % (b"x" * 1_000_000)
SCRIPT_LIMIT: Final = 6 << 20
LIMIT: Final = 18 << 20
"""Bytes that one answer may have, of a script and of a plain command; there are more than that of each."""


class Sizes(Proxy):
    """Notes how large the answers are."""

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self.most = 0

    async def _may_return(self, command: bytes, reply: bytes) -> bool:
        self.most = max(self.most, len(reply))
        return await super()._may_return(command, reply)


@pytest.fixture
async def sizes(url: str) -> AsyncIterator[Sizes]:
    async with Sizes(url) as sizes:
        yield sizes


@pytest.fixture
async def narrow(sizes: Sizes, keys: Keys, clock: ManualClock) -> AsyncIterator[Stage]:
    """As ``stage``, through what notes the sizes."""
    link = Connections(Address.of(sizes.url))
    instance = Instance(link, keys, clock)
    yield Stage(instance, Registry(instance))
    await link.aclose()


@pytest.mark.parametrize("way", ["new", "new up to a limit", "due", "taken over"])
async def test_one_call_takes_no_more_than_some_megabytes(stage: Stage, narrow: Stage, sizes: Sizes, way: str) -> None:
    """All of them are taken, in order, by as many calls as it needs."""
    topic = await stage.topic()
    held = await stage.acquire(topic, "billing")
    ids = await stage.add(topic, 20, 0, LARGE)
    if way in ("due", "taken over"):
        await stage.read(topic, "billing", 100)
        if way == "due":
            await stage.park(held, *ids, delay=0.0)
    exchange = Script.named("takeover" if way == "taken over" else "take")
    stream, keys, got, page = stage.stream(topic), stage.instance.keys, list[str](), "-"
    lease, retry, attempts, _ = keys.of_group(stream, "billing")
    for _ in range(20):
        fence, limit = (held.owner, held.epoch), ids[-1] if way.endswith("limit") else ""
        names, last = [lease, stream, retry, attempts], got[-1] if got else "0-0"
        if way == "taken over":
            reply = await narrow.instance.run(stream, exchange(names, *fence, "billing", page, 100, "", "", 3))
            page, rows, more = reply[1].decode(), reply[2], reply[1]
        else:
            names += [keys.delayed(stream), keys.delayed_items(stream)]
            call = exchange(names, *fence, narrow.instance.clock.offset_ms, "billing", 100, 100, last, limit)
            reply = await narrow.instance.run(stream, call)
            rows, more = [*reply[2], *reply[3]], reply[6] or reply[4] == 0
        got += [row[0].decode() for row in rows]
        if not more:
            break
    assert got == ids
    assert 0 < sizes.most <= SCRIPT_LIMIT


async def test_delayed_messages_that_are_large_are_moved_step_by_step(stage: Stage) -> None:
    topic = await stage.topic()
    held = await stage.acquire(topic, "billing")
    stream, keys = stage.stream(topic), stage.instance.keys
    delayed, items = keys.delayed(stream), keys.delayed_items(stream)
    for number in range(12):
        await stage.call(items, "HSET", items, f"i{number:02}", msgspec.msgpack.encode(["payload", LARGE.decode()]))
        await stage.call(delayed, "ZADD", delayed, 1, f"i{number:02}")
    await stage.take(held, 0)
    assert 0 < await stage.call(stream, "XLEN", stream) < 12
    for _ in range(12):
        await stage.take(held, 0)
    assert await stage.call(stream, "XLEN", stream) == 12
    assert await stage.call(delayed, "EXISTS", delayed, items) == 0


@pytest.mark.slow
async def test_large_messages_are_read_counted_and_buried_step_by_step(
    narrow: Stage, stage: Stage, sizes: Sizes, keys: Keys, clock: ManualClock, url: str
) -> None:
    topic = await stage.topic()
    await stage.add(topic, 30, 0, LARGE)
    stream = stage.stream(topic)
    assert [len(page) > 0 async for page in scan.pages(narrow.instance, stream, "0-0", "+", 1000)].count(False) == 0
    async with Broker(sizes.url, namespace=keys.namespace, clock=clock) as broker:

        async def fail(message: Message) -> None:
            raise Reject("no")

        async with broker.subscribe("orders", group="billing", handler=fail, options=impatient()):
            await finished(broker, "orders", "billing")
        assert len(await broker.admin.dead_letters("orders", 100)) == 30
        assert await broker.admin.replay("orders") == 30
    assert 0 < sizes.most <= LIMIT
    assert await count_after(stage.instance, stream, "0-0", "+", 100) == (30, "+")


# --- a million of anything else -----------------------------------------------------------------------------


@pytest.mark.slow
async def test_pending_pages_of_any_size_are_looked_up_in_steps(stage: Stage, admin: Admin, url: str) -> None:
    await left(stage)
    async with watched(url) as work:
        page = await admin.pending("orders", "billing", 10 * MANY)
    assert len(page.entries) == MANY
    assert work.most <= 10 * PAGE  # three short commands an entry, for five hundred of them


@pytest.mark.parametrize("limit", [{"dead_letter_max_len": 50}, {"dead_letter_max_age": 60.0}])
async def test_dead_letters_beyond_a_limit_that_was_lowered_go_step_by_step(
    stage: Stage, clock: ManualClock, limit: dict[str, Any]
) -> None:
    topic = await stage.topic(**limit)
    letters = stage.instance.keys.dead_letters("orders")
    await stage.instance.link.call_many(letters, [pack("XADD", letters, "*", "a", "b")] * MANY)
    clock.advance(120.0)
    lengths = [MANY]
    for _ in range(5):
        await stage.dead(topic, "billing", 1)
        lengths.append(await stage.call(letters, "XLEN", letters))
    assert max(before - after for before, after in itertools.pairwise(lengths)) <= 1_100
    assert lengths[-1] == (50 if "dead_letter_max_len" in limit else 0)


@pytest.mark.slow
@pytest.mark.parametrize("on_full", ["drop", "grow"])
async def test_large_messages_are_removed_step_by_step_and_all_of_them(stage: Stage, url: str, on_full: str) -> None:
    """What is dropped is read, to tell whether somebody misses it; what is finished need not be."""
    topic = await stage.topic(max_len=2, on_full=on_full)
    await stage.create_group(topic, "billing")
    await stage.add(topic, 40, 0, LARGE)
    if on_full == "grow":
        await stage.ack(topic, "billing", *await stage.read(topic, "billing", 40))
    before = await commands(url, "xrange")
    assert (await retention.trim(stage.instance, topic, 0)).removed == 38
    assert await commands(url, "xrange") - before <= 12
    assert len(await stage.ids(topic)) == 2


async def commands(url: str, name: str) -> int:
    """How often the server was told a command."""
    about = await ask(url, "INFO", "commandstats")
    return int(about.get(f"cmdstat_{name}", {"calls": 0})["calls"])
