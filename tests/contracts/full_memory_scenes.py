"""Scenes of every room, which together call every script and send every command that there is.

Each is played by one who is alone at a server, and has in its list what it calls; the scripts' own names, and the
commands that are sent by themselves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from conquiet import Outgoing, QueueConfig, RedisStreamsQueue, Retention
from conquiet.balance.ledger import Ledger
from conquiet.jobs.job import JobState, NewJob, Settlement
from conquiet.jobs.store import JobRetention, Lease, Wanted
from conquiet.jobs.stores.redis import RedisStore
from conquiet.kit.clock import ManualClock
from conquiet.topics.broker import Broker
from conquiet.topics.consume.growth_limits import GrowthLimits
from conquiet.topics.outside.scan import ends
from conquiet.topics.produce.once import Appender, Chunk, Write, begin, forget
from conquiet.topics.server.dead_letters import forward
from conquiet.topics.server.external_groups import Position, _take_back, adopt_group, publish_progress
from conquiet.topics.server.group import count_after
from conquiet.topics.server.growth import grow
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Registry
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.keys import BalanceKeys, Keys
from conquiet.wire.scripts import Script
from tests.balance.crew import entry
from tests.topics.staging import Held, Stage, hurried

__all__ = ["COMMANDS", "SCENES", "Scene"]

Scene: TypeAlias = Callable[[str, ManualClock], Awaitable[None]]

ORDERS: Final = "orders"
_QUEUE: Final = "emails"
_TTL: Final = 30_000
_BURY: Final = Script.named("bury")
_LEAVE: Final = Script.named("member_leave")
_RENEW: Final = Script.named("lease_renew")
_REQUEUE: Final = Script.named("requeue")
_SUSPECT: Final = Script.named("lease_suspect")
_TAKEOVER: Final = Script.named("takeover")


async def queue(url: str, clock: ManualClock) -> None:
    config = QueueConfig("orders", "billing", "billing-1")
    async with RedisStreamsQueue.connect(url, config) as queue:
        await queue.enqueue({"order": 1})
        await queue.enqueue_many([{"order": number} for number in range(2, 5)])
        first, *_ = await queue.read(count=4)
        await queue.ack(first)
        await queue.claim_stale(min_idle_ms=0, count=2)
        await queue.backlog_stats()


# --- jobs -------------------------------------------------------------------------------------------------------


async def jobs(url: str, clock: ManualClock) -> None:
    async with RedisStore(url, clock=clock) as store:
        await store.add(_QUEUE, [NewJob(id, b"{}") for id in ("done", "failed", "again", "left", "gone", "late")])
        await store.add(_QUEUE, [NewJob("later", b"{}", delay_ms=1000)])
        claimed = {job.id: job for job in (await store.claim(_QUEUE, Wanted(5, "w", _TTL, 3))).jobs}
        leases = [Lease.of(job) for job in claimed.values()]
        assert len(await store.leased(_QUEUE, [leases[0].claim_id], 0)) == len(leases)
        await store.renew(_QUEUE, [Lease.of(claimed["done"])], _TTL)
        for id, kind in (("done", "ack"), ("failed", "fail"), ("again", "retry"), ("left", "release")):
            [is_settled] = await store.settle(_QUEUE, [Settlement.of(claimed[id], kind, error="e", brief="e")])  # type: ignore[arg-type]
            assert is_settled
        await store.cancel(_QUEUE, "gone")
        await store.delete(_QUEUE, "gone")
        await store.replay(_QUEUE, "failed")
        clock.advance(60)  # a lease has run out, and a job has fallen due
        await store.claim(_QUEUE, Wanted(1, "w", _TTL, 3))
        assert await store.purge(_QUEUE, JobState.SUCCEEDED, JobRetention(count=0)) == 1
        await store.find(_QUEUE, ["later"])
        await store.page(_QUEUE, JobState.READY, 10, None)
        await store.cancel(_QUEUE, "later")
        assert await store.finished(_QUEUE, "later", 5) is not None
        await store.news(_QUEUE, "0-0", 0.0)
        await store.counts(_QUEUE)
        await store.add(_QUEUE, [NewJob("last", b"{}")])
        await store.claim(_QUEUE, Wanted(10, "w", _TTL, 3, waits=True))  # known as waiting, until the store is closed


# --- balance ----------------------------------------------------------------------------------------------------


async def balance(url: str, clock: ManualClock) -> None:
    keys, link = BalanceKeys("s"), Connections(Address.of(url))
    one, other = (Ledger(link, keys, owner, 15.0, clock) for owner in ("one", "other"))
    await one.open()
    for stream in ("a", "b", "c"):
        await one.add(stream, {})
    await one.add("a", {})
    await _put(link, keys, "rubbish")
    await one.renew([])
    taken = {given.stream: given for given in (await one.take(10, 0, hungry=True)).given}
    await one.renew([(given.stream, given.epoch) for given in taken.values()])
    await one.move("a", taken["a"].epoch, "5-5")
    await one.position("a")
    await one.finish("a", taken["a"].epoch, taken["a"].entry_id)
    pending, _ = await one.pending("-")
    assert len(await one.regrant(pending[:1])) == 1
    await one.release([("c", taken["c"].epoch)])
    await other.claim("c")
    clock.advance(60)
    assert {given.stream for given in (await other.sweep(10, 0, hungry=True)).given} == {"b", "c"}
    await _put(link, keys, entry("foreign"))
    stranger = ("XREADGROUP", "GROUP", keys.group, "stranger", "STREAMS", keys.input, ">")
    await Stage(Instance(link), Registry(Instance(link))).call(keys.input, *stranger)
    await Ledger(link, keys, "one", 0.001, clock).recover("-")
    await other.release([], leaving=True)
    await link.aclose()


async def _put(link: Connections, keys: BalanceKeys, value: str) -> None:
    await Stage(Instance(link), Registry(Instance(link))).call(keys.input, "XADD", keys.input, "*", "lbs-input", value)


# --- topics -----------------------------------------------------------------------------------------------------


def _stage(url: str, clock: ManualClock) -> Stage:
    instance = Instance(Connections(Address.of(url)), Keys(), clock)
    return Stage(instance, Registry(instance))


async def producing(url: str, clock: ManualClock) -> None:
    stage = _stage(url, clock)
    async with Broker(url, clock=clock) as broker:
        await broker.create_topic(ORDERS, retention=Retention(max_len=3, on_full="reject"))
        topic = await stage.registry.fetch(ORDERS)
        held = await stage.acquire(topic, "g")
        for number in range(6):  # from the fourth on, what is finished has to make room
            await broker.send(ORDERS, number, message_id=f"m{number}")
            ids, _ = await stage.take(held)
            await stage.take(held, 0, *ids)
        await broker.send(ORDERS, 0, message_id="m5")  # it is there already
        await broker.send(ORDERS, 1, delay=60.0, message_id="later")
        await broker.send(ORDERS, 1, delay=60.0)
        await broker.create_topic("short", retention=Retention(max_len=2, on_full="drop"))
        for number in range(4):
            await broker.send("short", number, message_id=f"m{number}")
        await broker.create_topic("plain")
        await broker.send_batch("plain", [Outgoing(1), Outgoing(2, headers={"a": "b"})])
    for batch in range(2):  # the second one makes room too
        await _write(stage, ORDERS, Write("w", batch, goes_on=True), Chunk(0, 0, bytearray(b"0"), [str(batch)]))
    for name in ("short", "plain"):
        await _write(stage, name, Write("by ID", by_id=True), Chunk(0, 0, bytearray(b"4"), ["1", "a"]))
    await stage.instance.link.aclose()


async def _write(stage: Stage, name: str, write: Write, chunk: Chunk) -> None:
    topic = await stage.registry.fetch(name)
    partitions = await begin(stage.instance, topic, write)
    appender = Appender(stage.instance, topic, write, 0)
    try:
        await appender.put(chunk)
        await appender.drain()
    finally:
        await appender.aclose()
    await forget(stage.instance, topic, write, partitions)


async def consuming(url: str, clock: ManualClock) -> None:
    stage = _stage(url, clock)
    topic, instance = await stage.topic(), stage.instance
    stream = stage.stream(topic)
    await stage.join(topic, "g")
    held = await stage.acquire(topic, "g")
    await stage.add(topic, 12)
    gone, ids = (await stage.take(held, 4))[0], (await stage.take(held, 6))[0]
    await stage.call(stream, "XDEL", stream, *gone[:2])
    await _requeue(stage, held, gone[0], gone[2])
    await _bury(stage, held, gone[1], gone[3])
    await stage.park(held, ids[0], delay=0)
    await stage.bury(held, ids[1])
    assert await forward(instance, topic, 0, "g") == 2
    await _requeue(stage, held, ids[2], ids[3])
    await stage.take(held, 2, ids[4])
    lease, retry, attempts, _ = instance.keys.of_group(stream, "g")
    for script, words in ((_RENEW, (15_000, 0)), (_SUSPECT, (ids[5],)), (_SUSPECT, ("",))):
        assert await instance.run(stream, script([lease], held.owner, held.epoch, *words)) == 1
    clock.advance(16)
    heir = await stage.acquire(topic, "g", owner="heir#1")
    call = _TAKEOVER([lease, stream, retry, attempts], "heir#1", heir.epoch, "g", "-", 10, held.owner, "", 3)
    assert len((await instance.run(stream, call))[2]) > 1
    assert (await instance.run(stream, Script.named("leases_look")([lease])))[0] == b"heir#1"
    assert await instance.run(stream, Script.named("group_missing")([stream], "g")) == []
    await stage.release(heir)
    keys = instance.keys
    members = [keys.members(ORDERS, "g"), keys.members_info(ORDERS, "g"), keys.generation(ORDERS, "g")]
    assert await instance.run(members[0], _LEAVE(members, "worker-1#a1")) == 1
    await instance.link.aclose()


async def _bury(stage: Stage, held: Held, *ids: str) -> None:
    keys, stream = stage.instance.keys, stage.stream(held.topic)
    lease, retry, attempts, outbox = keys.of_group(stream, held.group)
    about = (held.owner, held.epoch, stage.instance.clock.offset_ms, held.group, ORDERS, 0)
    words = [word for id in ids for word in (id, 4, "too many retries", "KeyError", "it's gone", "", -1)]
    reply = await stage.instance.run(stream, _BURY([lease, stream, retry, attempts, outbox], *about, *words))
    assert reply == [1, 1]  # of what is gone there is nothing to bury


async def _requeue(stage: Stage, held: Held, now: str, later: str) -> None:
    keys, stream = stage.instance.keys, stage.stream(held.topic)
    lease, retry, attempts, _ = keys.of_group(stream, held.group)
    names = [lease, stream, attempts, keys.delayed(stream), keys.delayed_items(stream), retry]
    words = [word for id, delay in ((now, 0), (later, 1)) for word in (id, delay, 1, f"0/{id}")]
    call = _REQUEUE(names, held.owner, held.epoch, stage.instance.clock.offset_ms, held.group, *words)
    assert (await stage.instance.run(stream, call))[0] == 1
    assert not {now, later}.intersection(await stage.pending(held.topic, held.group))


async def operating(url: str, clock: ManualClock) -> None:
    stage = _stage(url, clock)
    async with Broker(url, clock=clock) as broker:
        admin = broker.admin
        await broker.create_topic(ORDERS, retention=Retention(delete_acked=True, group_expiry=3600.0))
        topic = await stage.registry.fetch(ORDERS)
        await stage.join(topic, "g")
        ids = await stage.dead(topic, "g", 3)
        await stage.call(stage.stream(topic), "XDEL", stage.stream(topic), ids[0])  # of this one a copy has to be made
        await stage.join(topic, "g")
        await admin.describe_group(ORDERS, "g")
        await admin.describe_topic(ORDERS)
        await ends(stage.instance, topic)
        await count_after(stage.instance, stage.stream(topic), "0-0", ids[-1], 10)
        assert await admin.replay(ORDERS) == 3
        await admin.pending(ORDERS, "g")
        await stage.add(topic, 20)
        await admin.reset_group(ORDERS, "g", "latest", force=True)
        assert await admin.trim(ORDERS) >= 20
        await admin.configure(ORDERS, Retention(max_len=1))
        await hurried(clock, admin.grow(ORDERS, 2))
        await GrowthLimits(stage.instance, "g").look(await stage.registry.fetch(ORDERS), [])
        await stage.dead(topic, "g", 1)
        await admin.purge(ORDERS)
        await stage.create_group(topic, "other")
        await stage.add(topic, 30)
        await stage.read(topic, "other", 30)
        await admin.delete_group(ORDERS, "other")
        listed = stage.instance.keys.partitions(ORDERS)
        await stage.call(listed, "SREM", listed, stage.stream(topic))  # as if there had been no room to list it
        await hurried(clock, admin.delete_topic(ORDERS, force=True))
    await stage.instance.link.aclose()


async def replaying_after_a_crash(url: str, clock: ManualClock) -> None:
    """A run that was begun and given up is still on record."""
    stage = _stage(url, clock)
    async with Broker(url, clock=clock) as broker:
        topic = await stage.topic()
        await stage.dead(topic, "g", 1)
        key = stage.instance.keys.replayed(stage.stream(topic))
        await stage.instance.run(key, Script.named("replay_begin")([key], clock.offset_ms, "died", 600_000, 10))
        clock.advance(3600)
        assert await broker.admin.replay(ORDERS) == 1
    await stage.instance.link.aclose()


async def spark_groups(url: str, clock: ManualClock) -> None:
    stage = _stage(url, clock)
    topic, instance, registry = await stage.topic(), stage.instance, stage.registry
    ids = await stage.add(topic, 3)
    for _ in range(2):  # and when the query starts again
        await adopt_group(instance, registry, topic, "query", {0: Position(ids[0])})
    await publish_progress(instance, topic, "query", {0: Position(ids[1])})
    topic = await registry.fetch(ORDERS)
    await hurried(clock, grow(instance, registry, ORDERS, 2))
    await _take_back(instance, registry, topic, "query", [""])
    await instance.link.aclose()


SCENES: Final[dict[Scene, tuple[str, ...]]] = {
    queue: ("XADD", "XGROUP", "XREADGROUP", "XACK", "XCLAIM", "XPENDING", "XLEN"),
    jobs: (
        *("jobs_add", "jobs_claim", "jobs_renew", "jobs_settle", "jobs_cancel", "jobs_delete", "jobs_replay"),
        *("jobs_purge", "jobs_find", "jobs_page", "jobs_watch", "jobs_count", "jobs_leased", "jobs_part", "XREVRANGE"),
    ),
    balance: (
        *("balance_add", "balance_take", "balance_sweep", "balance_claim", "balance_regrant", "balance_recover"),
        *("balance_renew", "balance_finish", "balance_release", "balance_position", "XGROUP", "XPENDING", "HGET"),
    ),
    producing: ("append", "append_rows", "write_begin", "delay", "topic_create", "topic_look", "XADD", "PEXPIRE"),
    consuming: (
        *("take", "takeover", "park", "requeue", "bury", "forward", "partition_acquire", "partition_release"),
        *("lease_renew", "lease_suspect", "member_beat", "member_leave", "SISMEMBER", "SADD", "XDEL", "XRANGE"),
        *("leases_look", "group_missing"),
    ),
    operating: (
        *("replay_begin", "replay", "replay_end", "trim", "topic_configure", "grow_plan", "grow_commit"),
        *("group_extend", "members_call", "group_reset", "group_delete", "members_drop", "lease_retire", "topic_list"),
        *("partition_look", "partition_end", "group_look", "members_look", "count_after", "pending_page"),
        "group_finished",
        *("SREM", "UNLINK", "EXISTS", "SMEMBERS", "SCARD", "XDEL"),
    ),
    replaying_after_a_crash: ("replay_begin", "replay", "replay_end"),
    spark_groups: ("group_claim", "group_settle", "group_adopt", "group_publish", "group_retract", "HDEL", "SADD"),
}
"""Each scene, and what it has to call."""
COMMANDS: Final = {name for names in SCENES.values() for name in names}
