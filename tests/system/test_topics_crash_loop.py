"""A message that kills every process that handles it."""

from __future__ import annotations

from pathlib import Path

import pytest

from conquiet import Broker
from tests.rigs.waiting import eventually
from tests.system.topics_crew import TOPIC, Team, numbered
from tests.system.topics_log import Disturbance, Record, check

pytestmark = [pytest.mark.system, pytest.mark.any_server, pytest.mark.cluster_too]

MAX_CRASHES = 5
"""As in ``SubscribeOptions``."""


def deaths(records: list[Record]) -> list[Disturbance]:
    """Each process that did not end all it had begun, as if it had held whatever there is."""
    last = {record.owner: record.start for record in sorted(records, key=lambda record: record.start)}
    held = frozenset(record.place for record in records)
    unfinished = {record.owner for record in records if record.end is None}
    return [Disturbance("kill", owner, last[owner], held) for owner in unfinished]


async def live_through(team: Team, broker: Broker, sent: set[tuple[str, int]]) -> int:
    """Restart the consumer whenever it dies, until all is over; how often it died."""
    times = 0

    async def is_over() -> bool:
        nonlocal times
        if team.code("worker") is not None:
            assert team.code("worker") == 3
            times += 1
            team.launch("worker", "--heed", "--lease-ttl", "1")
        return team.log.done() >= sent and bool(await broker.admin.dead_letters(TOPIC))

    team.launch("worker", "--heed", "--lease-ttl", "1")
    await eventually(is_over, "the crashes have ended", seconds=50)
    return times


async def test_a_crash_loop_ends_in_the_dead_letters(url: str, tmp_path: Path) -> None:
    """spec 3: at-least-once processing semantics with configurable retry & DLQ."""
    with Team.hired(url, tmp_path) as team:
        async with team.broker() as broker:
            await broker.create_topic(TOPIC, partitions=2)
            sent = {(f"k{seq % 10}", seq) for seq in (*range(30), *range(31, 61))}
            await broker.send_batch(TOPIC, numbered(30, 10))
            poison = await broker.send(TOPIC, {"seq": 30, "do": "exit"}, key="k0")
            await broker.send_batch(TOPIC, numbered(30, 10, first=31))
            times = await live_through(team, broker, sent)
            await team.all_is_done(broker, sent)
            [letter] = await broker.admin.dead_letters(TOPIC)
            await team.dismiss("worker")
    assert (letter.reason, letter.original_id) == ("crash loop", poison)
    records = team.log.read().records
    assert times == sum(record.seq == 30 for record in records) == MAX_CRASHES
    others = [record for record in records if record.seq != 30]
    assert check(sent, others, deaths(records)) == []
