"""Workers are killed and stopped at random, and the server is restarted, while jobs flow."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from conquiet import JobQueue
from tests.rigs.waiting import eventually
from tests.system.jobs_check import Plan, check
from tests.system.jobs_crew import Crew, add, all_finished, all_jobs
from tests.system.jobs_fixtures import KINDS, own_home
from tests.system.jobs_log import Run

pytestmark = pytest.mark.system

LEASE_TTL = 1.5
WORKERS = 4
BACKLOG = 300
"""How many jobs are enqueued and not finished at a time, about."""
_PATIENCE = 5.0
"""Seconds that others have to come for what a stopped worker held; what has no attempt left nobody comes for."""
HOW = ("--lease-ttl", str(LEASE_TTL), "--concurrency", "20", "--timeout", "0.4")


class Source:
    """Enqueues jobs of all sorts, about as fast as they are finished, up to a limit that rises with the storm."""

    def __init__(self, crew: Crew, queue: JobQueue, rng: random.Random) -> None:
        self._crew = crew
        self._queue = queue
        self._rng = rng
        self.limit = 0
        self.going = True
        self.confirmed: dict[str, Plan] = {}

    def _plan(self) -> Plan:
        [do] = self._rng.choices(["done", "once", "always", "slow"], [85, 8, 5, 2])
        delay = self._rng.random() if self._rng.random() < 0.1 else 0.0
        most = self._rng.choice([0, 1, 5]) if self._rng.random() < 0.1 else None
        return Plan(do, most, round(delay, 3), self._rng.randint(-2, 2))

    async def flow(self) -> None:
        while self.going or len(self.confirmed) < self.limit:
            first = len(self.confirmed)
            if first >= self.limit or first - len(self._crew.log.read().told) >= BACKLOG:
                await asyncio.sleep(0.005)  # the pace, not a wait for anything
                continue
            count = min(self._rng.randint(1, 100), self.limit - first)
            plans = {f"j{number:05d}": self._plan() for number in range(first, first + count)}
            await add(self._queue, plans, work=0.02)
            self.confirmed.update(plans)


class Storm:
    """What happens to the workers and to the server. One worker is always awake."""

    def __init__(self, crew: Crew, source: Source, rng: random.Random) -> None:
        self._crew = crew
        self._source = source
        self._rng = rng
        self._count = 0
        self._frozen: dict[str, tuple[float, list[Run]]] = {}
        self.running: list[str] = []

    async def join(self) -> None:
        self._count += 1
        name = f"w{self._count}"
        await self._crew.start(name, *HOW)
        self.running.append(name)

    async def strike(self, event: str) -> None:
        """Let one event happen, and somebody new come for whoever goes."""
        self._source.limit += BACKLOG  # there is work while it happens
        if event in ("crash", "restart"):
            await self._crew.outage(crash=event == "crash")
            return
        await eventually(lambda: self.thawed() or len(self._awake()) >= 2, "somebody can be spared")
        if event == "leave":
            name = self._rng.choice(self._awake())
            self.running.remove(name)
            await self._crew.dismiss(name)
            await self.join()
            return
        name, held = await self._caught()
        if event == "stop":
            self._frozen[name] = time.monotonic() + LEASE_TTL + self._rng.uniform(0.1, 1.0), held
            return
        self.running.remove(name)
        await self._crew.kill(name)
        await self.join()

    async def _caught(self) -> tuple[str, list[Run]]:
        """Somebody who stands still in the middle of work, and that work."""
        while True:
            name = self._rng.choice(self._awake())
            await self._crew.freeze(name)
            if held := self._crew.log.open_runs(name):
                return name, held
            self._crew.wake(name)
            self._source.limit += 20
            await asyncio.sleep(0.005)  # the pace, not a wait for anything

    def thawed(self) -> bool:
        """Wake those who were stopped for long enough, and have lost something; whether nobody is left stopped."""
        for name, (until, held) in list(self._frozen.items()):
            tokens = self._crew.log.read().tokens
            late = time.monotonic() - until
            if late >= _PATIENCE or (late >= 0 and any(tokens[run.job] > run.token for run in held)):
                del self._frozen[name]
                self._crew.wake(name)
        return not self._frozen

    def _awake(self) -> list[str]:
        return [name for name in self.running if name not in self._frozen]


async def blow(storm: Storm, source: Source, crew: Crew, events: Sequence[str], total: int) -> None:
    """Spread ``events`` over the work."""
    for number, event in enumerate(events, start=1):
        due = total * number // (len(events) + 1)
        source.limit = max(source.limit, due)
        await eventually(
            lambda due=due: storm.thawed() is None or len(crew.log.read().told) >= due - BACKLOG,  # type: ignore[misc]
            f"{due - BACKLOG} jobs are finished",
            seconds=300,
        )
        await storm.strike(event)
    await eventually(storm.thawed, "everybody is awake")
    source.limit = max(source.limit, total)
    source.going = False


@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("kind", KINDS)
async def test_every_job_ends_and_none_is_lost_whatever_happens(kind: str, tmp_path: Path, scale: float) -> None:
    """spec 5: at-least-once, durability, lease safety, the retry bound, fencing, and every failure mode."""
    seed = int(os.environ.get("CONQUIET_TEST_SEED") or secrets.randbelow(1_000_000))
    print(f"CONQUIET_TEST_SEED={seed}")
    rng = random.Random(seed)
    total = max(1_000, int(20_000 * scale))
    events = ["kill", "stop"] * max(1, int(15 * scale)) + ["crash", "restart", "leave"]
    rng.shuffle(events)
    with own_home(kind, tmp_path / "data") as home, Crew.hired(home, tmp_path) as crew:
        async with crew.queue() as queue:
            source = Source(crew, queue, rng)
            storm = Storm(crew, source, rng)
            await asyncio.gather(*(storm.join() for _ in range(WORKERS)))
            await asyncio.gather(source.flow(), blow(storm, source, crew, events, total))
            await all_finished(queue, seconds=120)
            await crew.dismiss(*storm.running)
            jobs = await all_jobs(queue)
        complaints = check(source.confirmed, crew.log.read(), jobs, crew.disturbances)
        assert not complaints, "\n".join([f"CONQUIET_TEST_SEED={seed}: {len(complaints)} complaints", *complaints[:10]])
        assert len(jobs) == len(source.confirmed) >= total
        assert any(saying.answer == "stale" for saying in crew.log.sayings), "no zombie tried anything"
        errors = {failure.error for job in jobs.values() for failure in job.failures}
        assert {"lease expired", "RuntimeError: as it was asked to"} < errors
