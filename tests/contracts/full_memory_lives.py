"""Scenes of whole lives: consumers and workers that begin, fail, try again, share, hand over and leave.

They send what they send, in states that nobody has set up; see :mod:`tests.contracts.full_memory_scenes`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import Final

from conquiet import Broker, Job, Outgoing, RedisStore, Reject, Retention, StreamLease, Subscription
from conquiet.kit.clock import ManualClock
from conquiet.message import Message
from tests.balance.crew import Crew
from tests.contracts.full_memory_scenes import Scene
from tests.jobs.working import queue_in, settled, working
from tests.rigs.waiting import eventually
from tests.topics.consuming import buried, finished, impatient

__all__ = ["LIVES"]

_ORDERS: Final = "orders"


async def consumers(url: str, clock: ManualClock) -> None:
    """Every message fails once; one of three is given up. A second consumer comes, and goes."""
    handled: Counter[str] = Counter()

    async def handle(message: Message) -> None:
        if message.payload % 3 == 0:
            raise Reject("a third of them")
        if message.retry_count == 0:
            raise ValueError("the first attempt fails")
        handled[message.topic] += 1

    async with Broker(url, clock=clock) as broker:
        for mode in ("park", "requeue"):
            await broker.create_topic(mode, partitions=2, retention=Retention(delete_acked=True))
            one, other = (
                broker.subscribe(mode, group="g", handler=handle, options=impatient(mode=mode)) for _ in range(2)
            )
            async with one:
                await broker.send_batch(mode, [Outgoing(number, key=str(number)) for number in range(9)])
                async with other:
                    await eventually(partial(_is_shared, mode, one, other), "each to have its share")
                await finished(broker, mode, "g")
                await buried(broker, mode, 3)
        assert handled == {"park": 6, "requeue": 6}


def _is_shared(topic: str, *consumers: Subscription) -> bool:
    return all(len(consumer.owned[topic]) == 1 for consumer in consumers)


async def workers(url: str, clock: ManualClock) -> None:
    """Every job fails once, and one of three until it is given up."""

    async def handle(job: Job) -> int:
        if job.attempts == 1 or job.payload % 3 == 0:
            raise ValueError("no")
        return int(job.payload)

    async with RedisStore(url, clock=clock) as store:
        queue = queue_in(store)
        async with working(queue, handle, concurrency=3), working(queue, handle, concurrency=3):
            ids = await queue.enqueue_many(range(9))
            await settled(queue, succeeded=6, failed=3)
            await queue.replay(ids[0])
            await queue.wait(ids[0], 30)


async def owners(url: str, clock: ManualClock) -> None:
    """Streams are shared out, handed on by one who leaves, and finished."""
    gate, done = asyncio.Event(), Counter[str]()

    async def handle(stream: str, lease: StreamLease) -> None:
        await gate.wait()
        await lease.commit("5-5")
        done[stream] += 1

    crew = Crew(url, clock)
    members = [await crew.running(name, handle) for name in ("a", "b")]
    for number in range(6):
        await members[0].balancer.add_stream(f"s{number}")
    await eventually(lambda: sorted(len(one.owned) for one in members) == [3, 3], "three each")
    await members[1].balancer.aclose()
    await eventually(lambda: len(members[0].owned) == 6, "all of them")
    gate.set()
    await eventually(lambda: sum(done.values()) == 6, "all to be done")
    await eventually(lambda: not members[0].owned, "all to be finished")
    await crew.aclose()


LIVES: Final[dict[Scene, tuple[str, ...]]] = {
    consumers: (
        *("member_beat", "partition_acquire", "take", "park", "requeue", "bury", "forward", "members_call"),
        *("partition_release", "member_leave", "XDEL", "XADD"),
    ),
    workers: ("jobs_add", "jobs_claim", "jobs_settle", "jobs_replay", "jobs_watch"),
    owners: ("balance_add", "balance_take", "balance_sweep", "balance_renew", "balance_position", "balance_finish"),
}
"""Each life, and what it has to call at least."""
