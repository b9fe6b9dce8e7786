"""Workers that are killed lose nothing, and not much time."""

from __future__ import annotations

from pathlib import Path

import pytest

from conquiet import JobQueue
from tests.system.jobs_check import Plan, check
from tests.system.jobs_crew import Crew, add, all_finished, all_jobs

pytestmark = pytest.mark.system
pytest_plugins = ["tests.system.jobs_fixtures"]

LEASE_TTL = 1.0
BOUND = LEASE_TTL + 1.0
"""Seconds within which the work of a killed worker is in work again; the tests allow twice that."""
HOW = ("--lease-ttl", str(LEASE_TTL))


@pytest.mark.parametrize("rest", ["idle", "busy"])
async def test_the_work_of_a_killed_worker_is_soon_in_work_again(
    rest: str, job_crew: Crew, work: JobQueue, tmp_path: Path
) -> None:
    """By those who have nothing to do, and by those who have."""
    plans = {f"held-{number}": Plan() for number in range(10)}
    await job_crew.start("victim", *HOW, "--gate", str(tmp_path / "never"))
    await add(work, plans)
    await job_crew.begun("victim", count=10)
    await job_crew.start("heir", *HOW, "--concurrency", "4")
    if rest == "busy":
        more = {f"more-{number}": Plan() for number in range(200)}
        plans.update(more)
        await add(work, more, work=0.05)
        await job_crew.begun("heir")
    killed = await job_crew.kill("victim")
    await all_finished(work)
    await job_crew.dismiss("heir")

    jobs = await all_jobs(work)
    assert check(plans, job_crew.log.read(), jobs, job_crew.disturbances) == []
    again = [claim for claim in job_crew.log.claims if claim.job.startswith("held") and claim.owner == "heir"]
    assert len(again) == 10
    assert max(claim.at_ms * 1000 for claim in again) - killed <= 2 * BOUND * 1e6
    leases = [jobs[id].failures[0].ended_ms for id in plans if id.startswith("held")]
    assert min(claim.at_ms for claim in again) >= min(leases), "a job changes hands only when its lease has ended"


async def test_a_job_that_kills_its_workers_fails_in_the_end(job_crew: Crew, work: JobQueue, tmp_path: Path) -> None:
    """spec 5: the retry bound holds for attempts that nobody tells the end of, too."""
    plans = {"deadly": Plan(max_retries=2)}
    await add(work, plans)
    for number in range(3):
        await job_crew.start(f"victim-{number}", "--lease-ttl", "0.3", "--gate", str(tmp_path / "never"))
        await job_crew.begun(f"victim-{number}")
        await job_crew.kill(f"victim-{number}")
    await job_crew.start("heir", "--lease-ttl", "0.3")
    await all_finished(work)
    await job_crew.dismiss("heir")
    jobs = await all_jobs(work)
    assert check(plans, job_crew.log.read(), jobs, job_crew.disturbances) == []
    assert [failure.worker for failure in jobs["deadly"].failures] == ["victim-0", "victim-1", "victim-2"]
    assert job_crew.log.runs_of("heir") == []
