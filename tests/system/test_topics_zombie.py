"""An owner that was stopped for longer than its leases comes back, and can change nothing."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from conquiet import Broker
from tests.rigs.asking import ask, blocked
from tests.rigs.waiting import eventually
from tests.system.topics_crew import GROUP, TOPIC, Team, numbered
from tests.system.topics_log import check

pytestmark = [pytest.mark.system, pytest.mark.any_server, pytest.mark.cluster_too]

PARTITIONS = 4
"""One for each of three messages in flight, and an idle one."""


@pytest.fixture
def team(url: str, tmp_path: Path) -> Iterator[Team]:
    with Team.hired(url, tmp_path) as team:
        yield team


@pytest.fixture
async def broker(team: Team) -> AsyncIterator[Broker]:
    async with team.broker() as broker:
        yield broker


async def until_renewed(team: Team) -> None:
    """Return right after a heartbeat: the next one is as far off as can be."""

    async def deadlines() -> list[str]:
        return [await ask(team.url, "HGET", team.keys.lease(stream, GROUP), "until_ms") for stream in streams]

    streams = await team.partitions()
    before = await deadlines()

    async def all_are_renewed() -> bool:
        return all(new != old for new, old in zip(await deadlines(), before, strict=True))

    await eventually(all_are_renewed, "every lease is renewed")


async def leftovers(team: Team) -> list[int]:
    """How many retries, records of failure and outgoing dead letters each partition has."""
    keys, found = team.keys, []
    for stream in await team.partitions():
        found.append(await ask(team.url, "ZCARD", keys.retry(stream, GROUP)))
        found.append(await ask(team.url, "HLEN", keys.attempts(stream, GROUP)))
        found.append(await ask(team.url, "XLEN", keys.outbox(stream, GROUP)))
    return found


async def three_in_flight(team: Team, broker: Broker, *how: str) -> set[tuple[str, int]]:
    """The zombie-to-be owns everything and handles one message to succeed, one to fail, one to be rejected."""
    await broker.create_topic(TOPIC, partitions=PARTITIONS)
    await team.start("zombie", "--heed", "--lease-ttl", "3", *how)
    await team.owns_all("zombie")
    for seq, do in enumerate(("done", "fail", "reject")):
        await broker.send(TOPIC, {"seq": seq, "do": do}, key=f"k{seq}", partition=seq)
    await eventually(lambda: len(team.log.read().records) == 3, "three messages are being handled")
    return {(f"k{seq}", seq) for seq in range(3)}


@pytest.mark.parametrize("clock", ["running", "suspended"])
async def test_whatever_a_zombie_tries_is_refused(clock: str, team: Team, broker: Broker, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    how = ["--suspended"] if clock == "suspended" else []
    sent = await three_in_flight(team, broker, "--gate", str(gate), *how)
    await until_renewed(team)
    await team.stop("zombie")
    await team.start("heir")
    await team.owns_all("heir")
    await broker.send(TOPIC, {"seq": 3}, key="k3", partition=3)  # the zombie's wait for news has the answer, too
    sent.add(("k3", 3))
    await team.all_is_done(broker, sent)
    gate.touch()
    team.signal("zombie", signal.SIGCONT)

    async def is_back() -> bool:
        return set(await team.owners()) == {"zombie", "heir"}

    await eventually(is_back, "the zombie has leases of its own again")
    await team.dismiss("zombie", "heir")
    [refused] = team.log.noted("zombie", "refused")
    [of_heir] = team.log.noted("heir", "refused")
    assert of_heir.detail == {}
    if clock == "suspended":  # by its own clock its leases are good, so it tries everything
        assert refused.detail.keys() >= {"ack", "retry", "dead_letter", "take"}
    assert sum(refused.detail.values()) > 0

    records = team.log.read().records
    assert check(sent, records, team.disturbances) == []
    assert {record.message for record in records if record.owner.startswith("heir")} == sent
    assert sorted(record.outcome for record in records if record.owner.startswith("zombie")) == [
        "done",
        "failed",
        "failed",
    ]
    assert not any(await leftovers(team))
    assert await broker.admin.dead_letters(TOPIC) == []
    info = await broker.admin.describe_group(TOPIC, GROUP)
    assert (info.lag, info.pending) == (0, 0)


async def test_a_zombie_that_stops_as_it_wakes_releases_nothing(team: Team, broker: Broker) -> None:
    await broker.create_topic(TOPIC, partitions=2)
    await team.start("zombie", "--suspended")
    await team.owns_all("zombie")
    await until_renewed(team)
    await team.stop("zombie")
    await team.start("heir")
    await team.owns_all("heir")
    team.signal("zombie", signal.SIGTERM)
    team.signal("zombie", signal.SIGCONT)
    assert await team.ended("zombie") == 0
    [refused] = team.log.noted("zombie", "refused")
    assert refused.detail == {"release": 2}
    assert await team.owners() == ["heir", "heir"]
    await broker.send_batch(TOPIC, numbered(10, 10))
    await team.all_is_done(broker, {(f"k{seq}", seq) for seq in range(10)})
    await team.dismiss("heir")
    assert team.log.noted("heir", "refused")[0].detail == {}


async def test_a_stopped_owner_of_an_empty_partition_holds_nothing_back(team: Team, broker: Broker) -> None:
    await broker.create_topic(TOPIC, partitions=1)
    await team.start("zombie")
    await blocked(team.url)
    await team.start("heir")
    await team.stop("zombie")
    await team.owns_all("heir")
    await broker.send_batch(TOPIC, numbered(100, 10))
    sent = {(f"k{seq % 10}", seq) for seq in range(100)}
    await team.all_is_done(broker, sent)
    assert {record.owner.partition("#")[0] for record in team.log.records} == {"heir"}
    team.signal("zombie", signal.SIGCONT)
    await team.dismiss("zombie", "heir")
    assert check(sent, team.log.read().records, team.disturbances) == []
    assert len(team.log.records) == 100
