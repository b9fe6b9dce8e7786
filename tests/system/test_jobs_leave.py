"""Workers that are told to leave finish what they can, and hand back the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from conquiet import JobQueue, JobState
from tests.rigs.waiting import LONG, eventually
from tests.system.jobs_check import Plan, check
from tests.system.jobs_crew import Crew, add, all_finished, all_jobs, silenced

pytestmark = pytest.mark.system
pytest_plugins = ["tests.system.jobs_fixtures"]

LONG_LEASE = ("--lease-ttl", "60")
"""Whatever goes to somebody else was handed over: no lease ends in these tests."""


async def test_handlers_at_work_finish_and_nothing_more_is_begun(
    job_crew: Crew, work: JobQueue, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    plans = {f"j{number}": Plan() for number in range(10)}
    await job_crew.start("leaver", *LONG_LEASE, "--concurrency", "3", "--gate", str(gate))
    await add(work, plans)
    await job_crew.begun("leaver", count=3)
    job_crew.leave("leaver")
    gate.touch()
    assert await job_crew.ended("leaver") == 0
    jobs = await all_jobs(work)
    begun = {run.job for run in job_crew.log.runs_of("leaver")}
    for id, job in jobs.items():
        expected = (JobState.SUCCEEDED, 1) if id in begun else (JobState.READY, 0)
        assert (job.state, job.attempts) == expected
    await job_crew.start("heir", *LONG_LEASE)
    await all_finished(work)
    await job_crew.dismiss("heir")
    assert check(plans, job_crew.log.read(), await all_jobs(work), job_crew.disturbances) == []
    assert len(job_crew.log.runs) == 10


async def test_what_is_claimed_as_the_end_comes_is_back_at_once_at_no_cost(job_crew: Crew, work: JobQueue) -> None:
    """The answer to its claim comes when it has been told to leave: none of that is begun any more."""
    plans = {f"j{number}": Plan() for number in range(5)}
    await job_crew.start("leaver", *LONG_LEASE, "--late")
    await add(work, plans)
    await eventually(lambda: len(job_crew.log.read().claims) == 5, "the store has leased them")
    job_crew.leave("leaver")
    assert await job_crew.ended("leaver") == 0
    assert job_crew.log.runs_of("leaver") == []
    jobs = await all_jobs(work)
    assert {(job.state, job.attempts, job.worker) for job in jobs.values()} == {(JobState.READY, 0, None)}
    await job_crew.start("heir", *LONG_LEASE)
    await all_finished(work)
    await job_crew.dismiss("heir")
    assert check(plans, job_crew.log.read(), await all_jobs(work), job_crew.disturbances) == []


@pytest.mark.parametrize("do", ["hang", "stubborn"])
async def test_a_handler_that_does_not_end_in_time_is_handed_back(
    do: str, job_crew: Crew, work: JobQueue, tmp_path: Path
) -> None:
    """As a try that failed. One that will not be cancelled holds up the process, but not its job."""
    gate = tmp_path / "gate"
    plans = {"a": Plan(do)}
    await job_crew.start("leaver", *LONG_LEASE, "--drain", "0.2", "--gate", str(gate), "--hang")
    await add(work, plans)
    await job_crew.begun("leaver")
    job_crew.leave("leaver")
    await job_crew.start("heir", *LONG_LEASE)
    await all_finished(work)
    gate.touch()
    assert await job_crew.ended("leaver") == 0
    await job_crew.dismiss("heir")
    jobs = await all_jobs(work)
    assert [failure.error for failure in jobs["a"].failures] == ["the worker was stopped"]
    assert (jobs["a"].state, jobs["a"].attempts, jobs["a"].worker) == (JobState.SUCCEEDED, 2, "heir")
    assert check(plans, job_crew.log.read(), jobs, job_crew.disturbances) == []


async def test_a_thread_that_does_not_end_in_time_holds_nothing_up(
    job_crew: Crew, work: JobQueue, tmp_path: Path
) -> None:
    await job_crew.start("leaver", *LONG_LEASE, "--threads", "--drain", "0.2", "--gate", str(tmp_path / "never"))
    await add(work, {"a": Plan()})
    await job_crew.begun("leaver")
    job_crew.leave("leaver")
    assert await job_crew.ended("leaver") == 0
    job = (await all_jobs(work))["a"]
    assert (job.state, job.attempts) == (JobState.READY, 1)
    assert [failure.error for failure in job.failures] == ["the worker was stopped"]


async def test_whoever_leaves_in_full_flow_holds_nothing(job_crew: Crew, work: JobQueue, scale: float) -> None:
    """At whatever moment: every attempt that was counted was begun, and what was begun is settled."""
    plans: dict[str, Plan] = {}
    for turn in range(max(3, int(30 * scale))):
        name = f"leaver-{turn}"
        await job_crew.start(name, *LONG_LEASE, "--concurrency", "50")
        more = {f"{turn}-{number}": Plan() for number in range(1000)}
        plans.update(more)
        await add(work, more, work=0.001)
        await eventually(lambda name=name: len(job_crew.log.runs_of(name)) > 100, "it is in full flow")  # type: ignore[misc]
        await job_crew.dismiss(name)
        jobs = await all_jobs(work)
        assert {job.state for job in jobs.values()} <= {JobState.READY, JobState.SUCCEEDED}
        begun = {run.job for run in job_crew.log.read().runs}
        assert {id for id, job in jobs.items() if job.attempts} == begun
    await job_crew.start("last", *LONG_LEASE, "--concurrency", "50")
    await all_finished(work, 10 * LONG)  # tens of thousands of jobs at full size
    await job_crew.dismiss("last")
    assert check(plans, job_crew.log.read(), await all_jobs(work), job_crew.disturbances) == []
    assert len(job_crew.log.runs) == len(plans)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
async def test_a_store_that_does_not_answer_holds_nobody_up(
    busy: bool, job_crew: Crew, work: JobQueue, tmp_path: Path
) -> None:
    """Whether the worker waits for jobs, or has outcomes that it cannot get rid of: then their leases run out."""
    gate = tmp_path / "gate"
    plans = {f"j{number}": Plan() for number in range(5)}
    await job_crew.start("leaver", "--lease-ttl", "1", "--concurrency", "10", "--drain", "1", "--gate", str(gate))
    if busy:
        await add(work, plans)
        await job_crew.begun("leaver", count=5)
    with silenced(job_crew.home):
        gate.touch()
        if busy:
            await eventually(lambda: bool(job_crew.log.said_by("leaver", "")), "it has tried to tell")
        job_crew.leave("leaver")
        assert await job_crew.ended("leaver") == 0
    if not busy:
        await add(work, plans)
    await job_crew.start("heir", "--lease-ttl", "1")
    await all_finished(work)
    await job_crew.dismiss("heir")
    assert check(plans, job_crew.log.read(), await all_jobs(work), job_crew.disturbances) == []
