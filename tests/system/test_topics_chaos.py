"""Consumers are killed, stopped, told to leave and joined by others at random, while messages flow."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.rigs.waiting import eventually
from tests.system.topics_crew import TOPIC, Source, Team
from tests.system.topics_log import check

pytestmark = [pytest.mark.system, pytest.mark.any_server, pytest.mark.cluster_too]

LEASE_TTL = 2.0
PARTITIONS = 8
CONSUMERS = 3


class Storm:
    """What happens to the consumers. One of them is always alive."""

    def __init__(self, team: Team, rng: random.Random) -> None:
        self._team = team
        self._rng = rng
        self._count = 0
        self._frozen: dict[str, float] = {}
        self.running: list[str] = []

    async def join(self) -> None:
        self._count += 1
        name = f"c{self._count}"
        await self._team.start(name, "--lease-ttl", str(LEASE_TTL), "--work", "0.03", "--heed", "--max-inflight", "40")
        self.running.append(name)

    async def strike(self, event: str) -> None:
        """Let one event happen, and somebody new come for whoever goes."""
        await eventually(lambda: self.thawed() or len(self._alive()) >= 2, "somebody can be spared")
        name = self._rng.choice(self._alive())
        if event == "stop":
            await self._team.stop(name)
            self._frozen[name] = time.monotonic() + LEASE_TTL + self._rng.uniform(0.3, 1.5)
            return
        self.running.remove(name)
        if event == "kill":
            await self._team.kill(name)
        else:
            await self._team.dismiss(name)
        await self.join()

    def thawed(self) -> bool:
        """Wake those who were stopped for long enough; whether nobody is left stopped."""
        for name, until in list(self._frozen.items()):
            if time.monotonic() >= until:
                del self._frozen[name]
                self._team.signal(name, signal.SIGCONT)
        return not self._frozen

    def _alive(self) -> list[str]:
        return [name for name in self.running if name not in self._frozen]


async def blow(storm: Storm, team: Team, events: Sequence[str], count: int) -> None:
    """Spread ``events`` over the handling of ``count`` messages."""
    for number, event in enumerate(events, start=1):
        due = count * number // (len(events) + 1)
        await eventually(
            lambda due=due: storm.thawed() is None or len(team.log.done()) >= due,  # type: ignore[misc]
            f"{due} messages are handled",
            seconds=300,
        )
        await storm.strike(event)


@pytest.mark.timeout(1_200)
async def test_nothing_is_lost_and_order_is_kept_whatever_happens_to_consumers(
    url: str, tmp_path: Path, scale: float
) -> None:
    """spec 3: at-least-once, order within a partition, one owner at a time, recovery of stalled consumers."""
    seed = int(os.environ.get("CONQUIET_TEST_SEED") or secrets.randbelow(1_000_000))
    print(f"CONQUIET_TEST_SEED={seed}")
    rng = random.Random(seed)
    count = max(2_000, int(100_000 * scale))
    events = ["kill", "stop", "leave"] * max(2, int(10 * scale))
    rng.shuffle(events)
    with Team.hired(url, tmp_path) as team:
        async with team.broker() as broker:
            await broker.create_topic(TOPIC, partitions=PARTITIONS)
            storm, source = Storm(team, rng), Source(team, broker, keys=60, fail_every=97)
            for _ in range(CONSUMERS):
                await storm.join()
            await asyncio.gather(source.flow(count), blow(storm, team, events, count))
            await eventually(storm.thawed, "everybody is awake")
            await team.all_is_done(broker, source.sent, seconds=300)
            await team.dismiss(*storm.running)
            assert await broker.admin.dead_letters(TOPIC) == []
        complaints = check(source.sent, team.log.read().records, team.disturbances)
        assert complaints == [], f"CONQUIET_TEST_SEED={seed}"
        assert any(one.held for one in team.disturbances), "nobody was disturbed in the act"
