"""A handler that computes, and lets nobody else have a turn on its event loop, keeps its job."""

from __future__ import annotations

import pytest

from conquiet import JobQueue, JobState
from tests.rigs.waiting import eventually
from tests.system.jobs_check import Plan, check
from tests.system.jobs_crew import Crew, add, all_finished, all_jobs

pytestmark = pytest.mark.system
pytest_plugins = ["tests.system.jobs_fixtures"]

LEASE_TTL = 0.7
HOW = ("--lease-ttl", str(LEASE_TTL))


async def test_a_job_that_blocks_its_loop_for_ten_leases_is_run_once(job_crew: Crew, work: JobQueue) -> None:
    """spec 5: long-running work with short leases."""
    plans = {"long": Plan("burn"), **{f"j{number}": Plan() for number in range(20)}}
    await job_crew.start("busy", *HOW, "--concurrency", "1")
    await add(work, {"long": plans["long"]}, work=10 * LEASE_TTL)
    await job_crew.begun("busy")
    await job_crew.start("hungry", *HOW)
    await add(work, {id: plan for id, plan in plans.items() if id != "long"})
    await eventually(lambda: len(job_crew.log.runs_of("hungry")) == 20, "the hungry one has all the rest")
    await all_finished(work)
    await job_crew.dismiss("busy", "hungry")

    jobs = await all_jobs(work)
    assert check(plans, job_crew.log.read(), jobs, job_crew.disturbances) == []
    [run] = job_crew.log.runs_of("busy")
    assert run.end is not None
    assert run.end - run.start >= 10 * LEASE_TTL * 1e6
    assert (jobs["long"].state, jobs["long"].attempts, jobs["long"].failures) == (JobState.SUCCEEDED, 1, ())
    assert [run.owner for run in job_crew.log.runs if run.job == "long"] == ["busy"]
