"""Consumers come and go, and one dies: partitions move, and only as they should."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from conquiet import Broker, Message, SubscribeOptions, Subscription
from tests.rigs.waiting import eventually
from tests.system.topics_crew import GROUP, TOPIC, Source, Team, numbered
from tests.system.topics_log import Log, Record, check

pytestmark = [pytest.mark.system, pytest.mark.any_server, pytest.mark.cluster_too]

LEASE_TTL = 2.0
HEARTBEAT = LEASE_TTL / 3
PARTITIONS = 8
SECOND = 1_000_000


@pytest.fixture
def team(url: str, tmp_path: Path) -> Iterator[Team]:
    with Team.hired(url, tmp_path) as team:
        yield team


def holdings(log: Log, names: Iterable[str]) -> Iterator[tuple[int, Mapping[str, list[int]]]]:
    """What each of ``names`` owned, after each change, with the server's time of it."""
    owned: dict[str, list[int]] = {name: [] for name in names}
    for note in sorted(log.read().notes, key=lambda note: note.at):
        if note.what == "owned" and note.name in owned:
            owned[note.name] = note.detail
            yield note.at, dict(owned)


async def shared_by(team: Team, *names: str) -> None:
    """Return once the partitions are shared out evenly among exactly these, and they have noted it themselves."""
    share = PARTITIONS // len(names)

    async def is_shared() -> bool:
        noted = [[len(note.detail) for note in team.log.noted(name, "owned")[-1:]] for name in names]
        return Counter(await team.owners()) == dict.fromkeys(names, share) and all(own == [share] for own in noted)

    await eventually(is_shared, f"{', '.join(names)} have the same number of partitions")


async def test_consumers_share_when_more_come_and_take_over_when_some_leave(team: Team) -> None:
    """spec 3: per-partition exclusive ownership by one consumer instance."""
    names = ["first", "second", "third", "fourth"]
    async with team.broker() as broker:
        await broker.create_topic(TOPIC, partitions=PARTITIONS)
        source = Source(team, broker)
        flowing = asyncio.create_task(source.flow())
        await team.start("first", "--work", "0.02")
        await team.owns_all("first")
        await asyncio.gather(*(team.start(name, "--work", "0.02") for name in names[1:]))
        await shared_by(team, *names)

        before_leaving = await team.now()
        await team.dismiss("second", "fourth")
        await shared_by(team, "first", "third")
        source.going = False
        await flowing
        await team.all_is_done(broker, source.sent)
        await team.dismiss("first", "third")

    assert check(source.sent, team.log.read().records) == []
    ready = max(team.log.noted(name, "ready")[0].at for name in names)
    shared = next(at for at, owned in holdings(team.log, names) if [len(owned[name]) for name in names] == [2] * 4)
    assert shared - ready <= 5 * HEARTBEAT * SECOND
    stayed = [
        at
        for at, owned in holdings(team.log, ["first", "third"])
        if at > before_leaving and sum(map(len, owned.values())) == PARTITIONS
    ]
    assert stayed[0] - before_leaving <= 2 * SECOND


@pytest.mark.timeout(300)
async def test_many_hand_overs_keep_the_order(team: Team, scale: float) -> None:
    """spec 3: order within a partition. A hand-over may fall at any point of the owner's loop."""
    rounds = max(30, int(300 * scale))
    records: list[Record] = []

    def consumer(broker: Broker, name: str) -> Subscription:
        async def handle(message: Message) -> None:
            start = time.monotonic_ns()
            await asyncio.sleep(0.001)
            made = (message.partition, message.epoch, message.id, message.key or "-", message.payload["seq"])
            records.append(Record(name, *made, message.retry_count, start, time.monotonic_ns(), "done"))

        options = SubscribeOptions(consumer=name, max_inflight=50, handle_signals=False)
        return broker.subscribe(TOPIC, group=GROUP, handler=handle, options=options)

    sent: set[tuple[str, int]] = set()
    going = True

    async def flow() -> None:
        while going:
            messages = numbered(20, 20, first=len(sent))
            await broker.send_batch(TOPIC, messages)
            sent.update((message.key or "-", message.payload["seq"]) for message in messages)
            await asyncio.sleep(0.005)  # the pace, not a wait for anything

    async with team.broker() as broker:
        await broker.create_topic(TOPIC, partitions=4)
        async with consumer(broker, "stays"):
            flowing = asyncio.create_task(flow())
            for number in range(rounds):
                async with consumer(broker, f"guest-{number}") as guest:
                    await eventually(lambda guest=guest: len(guest.owned[TOPIC]) == 2, "it has its share")  # type: ignore[misc]
            going = False
            await flowing
            await eventually(lambda: {record.message for record in records} >= sent, "everything is handled")
    assert check(sent, records) == []


async def test_what_a_killed_consumer_had_in_flight_is_handled_by_another(team: Team, tmp_path: Path) -> None:
    """spec 3: on owner death (no renew), leases expire, others acquire and resume."""
    async with team.broker() as broker:
        await broker.create_topic(TOPIC, partitions=PARTITIONS)
        await team.start("victim", "--gate", str(tmp_path / "never"))
        await team.start("survivor")
        await shared_by(team, "victim", "survivor")
        await broker.send_batch(TOPIC, numbered(100, 100))
        await eventually(
            lambda: sum(record.owner.startswith("victim") for record in team.log.read().records) == 20,
            "as many as may be are in flight",
        )
        killed = await team.kill("victim")
        sent = {(f"k{seq}", seq) for seq in range(100)}
        await team.all_is_done(broker, sent)
        await team.dismiss("survivor")
    records = team.log.read().records
    assert check(sent, records, team.disturbances) == []
    begun = {record.message for record in records if record.owner == killed.owner}
    again = [record for record in records if record.message in begun and record.owner != killed.owner]
    assert {record.message for record in again} == begun
    assert max(record.start for record in again) - killed.at <= 2 * (LEASE_TTL + 1) * SECOND


async def test_a_group_that_fails_is_not_noticed_by_another(team: Team, url: str, tmp_path: Path) -> None:
    sent = {(f"k{seq % 10}", seq) for seq in range(200)}
    with Team.hired(url, tmp_path, namespace=team.namespace, group="audit") as audit:
        async with team.broker() as broker:
            await broker.create_topic(TOPIC, partitions=2)
            await asyncio.gather(
                team.start("a1", "--fail", "3"),
                team.start("a2", "--fail", "3"),
                audit.start("b1"),
                audit.start("b2"),
            )
            await broker.send_batch(TOPIC, numbered(200, 10))
            await team.all_is_done(broker, sent)
            await audit.all_is_done(broker, sent)
            assert await broker.admin.dead_letters(TOPIC) == []
        await team.dismiss("a1", "a2")
        await audit.dismiss("b1", "b2")
    assert check(sent, team.log.read().records) == check(sent, audit.log.read().records) == []
    tries = Counter((record.message, record.retry) for record in team.log.records)
    assert tries == {(message, retry): 1 for message in sent for retry in range(4)}
    assert [record.retry for record in audit.log.records] == [0] * len(sent)
