"""A store of jobs that stands still at exactly known steps, for longer than all leases, with two workers at work.

Each scene has a queue of its own; the store stands still once, when all of them have reached their steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil
import pytest

from conquiet import JobQueue, JobWorker
from conquiet.wire.embedded import EmbeddedRedis
from tests.rigs.freezing import PAUSES, Side, elapse, own_server, paused
from tests.rigs.sizing import IS_FULL
from tests.rigs.waiting import LONG, eventually
from tests.system.jobs_check import Plan, check
from tests.system.jobs_crew import Crew, Home, PostgresHome, add, all_finished, all_jobs, silenced
from tests.system.jobs_log import Disturbance, now
from tests.system.pauses_jobs import Place, place_at, worker_here

pytestmark = pytest.mark.system
pytest_plugins = ["tests.system.jobs_fixtures"]

LEASE: Final = 0.9
LONGER: Final = 2.0
"""Seconds for which a store stands still: more than two leases."""
STEPS: Final = ("claim", "renew", "settle", "leave")
SIDES: Final[tuple[Side, ...]] = ("before", "after")


def cases() -> Iterable[tuple[str, Side]]:
    """All steps on both sides in a run of full scale; else each step once."""
    for number, step in enumerate(STEPS):
        for at, side in enumerate(SIDES):
            if IS_FULL or number % 2 == at:
                yield step, side


@dataclass
class Scene:
    """Two workers of one queue: the first one's calls may be kept."""

    step: str
    side: Side
    directory: Path
    crew: Crew
    work: JobQueue
    place: Place
    workers: AsyncExitStack
    plans: dict[str, Plan] = field(default_factory=lambda: {f"job-{number}": Plan() for number in range(6)})

    async def reach_the_step(self) -> None:
        crew, place = self.crew, self.place
        self._gate.touch()
        first = await self._enter("first", place.url)
        await add(self.work, {"warm": Plan()})
        await all_finished(self.work)
        self._gate.unlink()
        if self.step == "claim":
            await place.keep("claim", self.side)
            await add(self.work, self.plans)
        else:
            await add(self.work, self.plans)
            await eventually(lambda: len(crew.log.open_runs("first")) == len(self.plans), "all are at work")
            if self.step == "renew":
                await place.is_known("renew")
            await place.keep("renew" if self.step == "renew" else "settle", self.side)
        if self.step == "settle":
            self._gate.touch()
        elif self.step == "leave":
            first.stop()
        await place.kept()
        await self._enter("second", crew.home.url)

    async def _enter(self, name: str, url: str) -> JobWorker:
        # The handlers of the second one wait for nothing.
        gate = self._gate if name == "first" else self.directory / "no-gate"
        (self.directory / "no-gate").touch()
        crew = self.crew
        here = worker_here(url, crew.space, crew.log, name, gate, LEASE, drain=0.0 if self.step == "leave" else LONG)
        return await self.workers.enter_async_context(here)

    @property
    def _gate(self) -> Path:
        return self.directory / "gate"

    async def go_on(self) -> None:
        """All goes on; and so does what comes after."""
        self._gate.touch()
        await all_finished(self.work)
        more = {f"more-{number}": Plan() for number in range(10)}
        await add(self.work, more)
        await all_finished(self.work)
        self.plans |= {"warm": Plan(), **more}

    async def judge(self, disturbances: list[Disturbance]) -> None:
        jobs = await all_jobs(self.work)
        found = check(self.plans, self.crew.log.read(), jobs, [*disturbances, Disturbance("leave", "first", 0)])
        assert found == [], f"{self.side} {self.step}"
        assert max(job.attempts for job in jobs.values()) <= 2, f"{self.side} {self.step}: jobs wander"


@dataclass
class OwnRedis:
    """The home of jobs in a Redis of one's own, as far as it is needed."""

    server: EmbeddedRedis

    @property
    def url(self) -> str:
        return self.server.url

    def restart(self, *, crash: bool) -> None:
        raise NotImplementedError

    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(self.server.pid)]


async def test_workers_go_on_after_a_store_that_stood_still(home: Home, tmp_path: Path) -> None:
    """A PostgreSQL is stopped; a Redis in all ways, each time a new one, if this is a run of full scale."""
    if isinstance(home, PostgresHome):
        await play(home, tmp_path, silence(home))
        return
    for number, how in enumerate(PAUSES if IS_FULL else PAUSES[:1]):
        async with own_server() as server:
            await play(OwnRedis(server), tmp_path / str(number), paused(server, how, LONGER))


@asynccontextmanager
async def silence(home: Home) -> AsyncIterator[None]:
    with silenced(home):
        yield
        await elapse(LONGER)


async def play(home: Home, directory: Path, pause: AbstractAsyncContextManager[None]) -> None:
    async with AsyncExitStack() as stack:
        scenes = [await scene(stack, home, directory / f"{side}-{step}", step, side) for step, side in cases()]
        await asyncio.gather(*(one.reach_the_step() for one in scenes))
        at = now()
        async with pause:
            for one in scenes if not isinstance(home, PostgresHome) else ():
                one.place.release_soon()
        for one in scenes:
            one.place.release_soon()
        outage = [Disturbance("outage", "", at, now())]
        await asyncio.gather(*(one.go_on() for one in scenes))
        for one in scenes:
            await asyncio.wait_for(one.workers.aclose(), LONG)
            await one.judge(outage)


async def scene(stack: AsyncExitStack, home: Home, directory: Path, step: str, side: Side) -> Scene:
    directory.mkdir(parents=True)
    crew = stack.enter_context(Crew.hired(home, directory))
    work = await stack.enter_async_context(crew.queue())
    place = await stack.enter_async_context(place_at(home, crew.space))
    workers = await stack.enter_async_context(AsyncExitStack())
    return Scene(step, side, directory, crew, work, place, workers)
