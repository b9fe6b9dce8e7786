"""A worker that was stopped for longer than its leases comes back, and can change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from conquiet import JobQueue, JobState
from tests.rigs.waiting import eventually
from tests.system.jobs_check import Plan, check
from tests.system.jobs_crew import Crew, add, all_finished, all_jobs

pytestmark = pytest.mark.system
pytest_plugins = ["tests.system.jobs_fixtures"]

SHORT = ("--lease-ttl", "0.8")


@pytest.mark.parametrize("heir", ["at work", "done"])
async def test_whatever_a_zombie_tries_is_refused(heir: str, job_crew: Crew, work: JobQueue, tmp_path: Path) -> None:
    """By the token while another has the jobs, and by their state when that one is done."""
    gate, mute, gate_of_heir = tmp_path / "gate", tmp_path / "mute", tmp_path / "gate-of-heir"
    plans = {"good": Plan(), "bad": Plan("once"), "endless": Plan("hang")}
    await job_crew.start("zombie", *SHORT, "--gate", str(gate), "--mute", str(mute), "--hang")
    await add(work, plans)
    await job_crew.begun("zombie", count=3)
    mute.touch()  # so that its handlers end before it hears that the leases are lost
    await job_crew.freeze("zombie")
    await job_crew.start("heir", "--lease-ttl", "30", "--gate", str(gate_of_heir))
    await job_crew.begun("heir", count=3)
    if heir == "done":
        gate_of_heir.touch()
        await all_finished(work)
    before = await all_jobs(work)
    assert {job.worker for job in before.values()} == {"heir"}

    gate.touch()
    job_crew.wake("zombie")
    refused = {("ack", "good"), ("retry", "bad")}
    await eventually(lambda: set(job_crew.log.said_by("zombie", "stale")) >= refused, "its outcomes are refused")
    mute.unlink()
    await eventually(lambda: ("renew", "endless") in job_crew.log.said_by("zombie", "stale"), "so is its heartbeat")
    outcomes = {"good": "done", "bad": "failed", "endless": "cancelled"}
    await eventually(
        lambda: {run.job: run.outcome for run in job_crew.log.runs_of("zombie")} == outcomes,
        "its last handler is cancelled",
    )
    if heir == "done":
        assert await all_jobs(work) == before
    assert {job.worker for job in (await all_jobs(work)).values()} == {"heir"}
    gate_of_heir.touch()
    await all_finished(work)

    await job_crew.dismiss("heir")
    plans["new"] = Plan()
    await add(work, {"new": plans["new"]})
    await all_finished(work)
    await job_crew.dismiss("zombie")
    assert job_crew.log.said_by("zombie", "applied") == [("ack", "new")]
    [note] = job_crew.log.noted("zombie", "refused")
    assert note.detail == {"ack": 1, "retry": 1, "renew": 1}
    assert check(plans, job_crew.log.read(), await all_jobs(work), job_crew.disturbances) == []


async def test_a_zombie_that_is_told_to_leave_as_it_wakes_gives_nothing_back(
    job_crew: Crew, work: JobQueue, tmp_path: Path
) -> None:
    """What it would hand over is somebody else's by now."""
    gate = tmp_path / "gate"
    await job_crew.start("zombie", *SHORT, "--gate", str(gate), "--drain", "0", "--hang")
    await add(work, {"a": Plan("hang")})
    await job_crew.begun("zombie")
    await job_crew.freeze("zombie")
    await job_crew.start("heir", *SHORT, "--gate", str(gate))
    await job_crew.begun("heir")
    held = (await all_jobs(work))["a"]
    job_crew.leave("zombie")
    job_crew.wake("zombie")
    assert await job_crew.ended("zombie") == 0
    after = (await all_jobs(work))["a"]
    assert (after.state, after.lease_token, after.worker) == (JobState.IN_FLIGHT, held.lease_token, "heir")
    assert [run.outcome for run in job_crew.log.runs_of("heir")] == [""]
    assert job_crew.log.said_by("zombie", "applied") == []


async def test_the_end_of_the_last_lease_is_the_end_of_the_job(job_crew: Crew, work: JobQueue, tmp_path: Path) -> None:
    """Nobody runs it once more, and the worker that comes back with a success is too late."""
    gate, mute = tmp_path / "gate", tmp_path / "mute"
    plans = {"a": Plan(max_retries=0)}
    await job_crew.start("zombie", *SHORT, "--gate", str(gate), "--mute", str(mute))
    await add(work, plans)
    await job_crew.begun("zombie")
    mute.touch()
    await job_crew.freeze("zombie")
    await job_crew.start("heir", *SHORT)
    await all_finished(work)
    gate.touch()
    job_crew.wake("zombie")
    await eventually(lambda: job_crew.log.said_by("zombie", "stale") == [("ack", "a")], "it is refused")
    mute.unlink()
    await job_crew.dismiss("zombie", "heir")
    jobs = await all_jobs(work)
    assert (jobs["a"].state, jobs["a"].last_error) == (JobState.FAILED, "lease expired")
    assert job_crew.log.runs_of("heir") == []
    assert check(plans, job_crew.log.read(), jobs, job_crew.disturbances) == []
