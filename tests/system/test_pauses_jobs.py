"""A worker that is stopped at an exactly known step, for longer than its leases, and then goes on.

Its heir is at work with the job when the worker's command, or the answer to it, goes on at last: the command changes
nothing for the heir, the worker does not begin with what it has lost, and both work on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from conquiet import Job, JobQueue, JobState
from tests.rigs.freezing import Side, all_of
from tests.rigs.sizing import IS_FULL
from tests.rigs.waiting import eventually
from tests.system.jobs_check import Plan, check
from tests.system.jobs_crew import Crew, Home, PostgresHome, add, all_finished, all_jobs
from tests.system.jobs_log import now
from tests.system.pauses_jobs import Place, place_at, worker_here

pytestmark = pytest.mark.system
pytest_plugins = ["tests.system.jobs_fixtures"]

LEASE: Final = 0.8
LEASE_OF_HEIR: Final = 15.0
SIDES: Final[tuple[Side, ...]] = ("before", "after")


@dataclass(frozen=True)
class Step:
    """A call of the store at which the worker is stopped, and what its handler does with the job."""

    call: str
    do: str = "done"
    sample: Side | None = None
    """On which side it is part of a run of small scale."""

    @property
    def name(self) -> str:
        return f"{self.call} {self.do}"


STEPS: Final = (
    Step("claim", sample="after"),
    Step("renew", sample="before"),
    Step("settle", "done", sample="before"),
    Step("settle", "once"),
    Step("settle", "leave", sample="before"),
)
"""Where it leaves, a job that does not end is given back."""


def cases(home: Home) -> Iterable[tuple[Step, Side]]:
    """Each step on both sides in a run of full scale; else a sample, which is larger on Redis."""
    few = STEPS[:1] + STEPS[2:3] if isinstance(home, PostgresHome) else STEPS
    return [(step, side) for step in STEPS for side in SIDES if IS_FULL or (step in few and step.sample == side)]


# --- the scene ---------------------------------------------------------------------------------------------------


@dataclass
class Scene:
    """One worker that is stopped, and its heir."""

    step: Step
    side: Side
    directory: Path
    crew: Crew
    work: JobQueue
    place: Place

    async def play(self) -> None:
        do = {"leave": "hang"}.get(self.step.do, self.step.do)
        plans = {"first": Plan(), "a": Plan(do)}
        await self._reach_the_step(plans)
        await self.crew.freeze("victim")
        stopped_at = now()
        await self.place.stopped()
        gate = self.directory / "gate-of-heir"
        crew = self.crew
        async with worker_here(crew.home.url, crew.space, crew.log, "heir", gate, LEASE_OF_HEIR):
            await eventually(self._is_taken_over, "the heir is at work, unless the job was finished in time")
            await self._go_on()
            gate.touch()
            await all_finished(self.work)
            if self.step.do != "leave":
                await self._both_work_on(plans)
        if self.step.do != "leave":
            await self._the_other_works_on(plans)
        late = [run for run in crew.log.runs_of("victim") if run.job == "a" and run.start >= stopped_at]
        assert late == [], "it began with what it had lost"
        assert check(plans, crew.log.read(), await all_jobs(self.work), crew.disturbances) == []

    async def _is_taken_over(self) -> bool:
        if self.crew.log.runs_of("heir"):
            return True
        # An outcome whose answer was kept counts, unless the lease ran out and the worker claimed the job once more.
        return (self.step.call, self.side) == ("settle", "after") and (await self._job("a")).is_finished

    async def _reach_the_step(self, plans: dict[str, Plan]) -> None:
        step, gate, crew, place = self.step, self.directory / "gate", self.crew, self.place
        how = ["--drain", "0", "--hang"] if step.do == "leave" else []
        gate.touch()
        await crew.start("victim", "--lease-ttl", str(LEASE), "--gate", str(gate), *how, url=place.url)
        await add(self.work, {"first": plans["first"]})
        await all_finished(self.work)
        gate.unlink()
        if step.call == "claim":
            await place.keep(step.call, self.side)
        await add(self.work, {"a": plans["a"]})
        if step.call != "claim":
            await crew.begun("victim", count=2)
            if step.call == "renew":
                await place.is_known(step.call)
            await place.keep(step.call, self.side)
        if step.do == "leave":
            crew.leave("victim")
        elif step.call == "settle":
            gate.touch()
        await place.kept()

    async def _go_on(self) -> None:
        """What was kept goes on, then the worker does; for the heir nothing changes."""
        before = await self._known()
        await self.place.release()
        after = await self._known()
        assert after == before, f"{after}, and {before} before"
        (self.directory / "gate").touch()
        self.crew.wake("victim")
        if self.step.do == "leave":
            assert await self.crew.ended("victim") == 0
        if (self.step.call, self.side) == ("renew", "before"):
            said = self.crew.log.said_by
            await eventually(lambda: ("renew", "a") in said("victim", "stale"), "its heartbeat is refused")
        after = await self._known()
        assert after == before, f"{after}, and {before} before"

    async def _known(self) -> tuple[JobState, int, str | None, int]:
        job = await self._job("a")
        return job.state, job.lease_token, job.worker, job.attempts

    async def _job(self, id: str) -> Job:
        return (await all_jobs(self.work))[id]

    async def _both_work_on(self, plans: dict[str, Plan]) -> None:
        more = {f"more-{number}": Plan() for number in range(10)}
        plans |= more
        await add(self.work, more)
        await all_finished(self.work)

    async def _the_other_works_on(self, plans: dict[str, Plan]) -> None:
        """Alone, since its heir has left."""
        plans |= {"last": Plan()}
        await add(self.work, {"last": Plan()})
        await all_finished(self.work)
        assert (await self._job("last")).worker == "victim"
        await self.crew.dismiss("victim")


async def play(home: Home, directory: Path, step: Step, side: Side) -> None:
    directory.mkdir()
    with Crew.hired(home, directory) as crew:
        async with AsyncExitStack() as stack:
            work = await stack.enter_async_context(crew.queue())
            place = await stack.enter_async_context(place_at(home, crew.space))
            await Scene(step, side, directory, crew, work, place).play()


async def test_a_worker_that_is_stopped_at_any_step_changes_nothing_for_its_heir(home: Home, tmp_path: Path) -> None:
    scenes: dict[str, Callable[[], Any]] = {}
    for number, (step, side) in enumerate(cases(home)):
        scenes[f"{side} {step.name}"] = partial(play, home, tmp_path / str(number), step, side)
    await all_of(scenes)
