"""Fifty callers in five processes want one job a unique key, and processes die: there is one, whatever dies."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from conquiet import JobQueue, JobState
from tests.rigs.waiting import eventually
from tests.system.jobs_crew import Crew

pytest_plugins = ("tests.system.jobs_fixtures",)
pytestmark = pytest.mark.system

SCRIPT = Path(__file__).with_name("unique_process.py")
ROOT = Path(__file__).parents[2]
KEYS = 20


async def unfinished(work: JobQueue) -> Counter[str]:
    """How many jobs of each unique key are not finished."""
    found: Counter[str] = Counter()
    for state in (JobState.READY, JobState.IN_FLIGHT):
        page = await work.list_jobs(state, 1000)
        assert page.cursor is None
        found.update(job.payload["unique"] for job in page.jobs)
    return found


async def test_there_is_one_job_a_key_whatever_dies(job_crew: Crew, work: JobQueue, scale: float) -> None:
    place = (job_crew.home.url, job_crew.space, "10", str(KEYS))

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-W", "error", str(SCRIPT), *place]
        return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})

    callers = [start() for _ in range(5)]
    try:
        for turn in range(max(5, int(60 * scale))):
            await eventually(lambda: _all_there(work), "a job for every key")
            assert max((await unfinished(work)).values()) == 1
            await work.ack(*await work.claim(KEYS // 2))
            if turn % 2:
                victim = random.randrange(len(callers))
                callers[victim].kill()
                callers[victim].wait()
                callers[victim] = start()
    finally:
        for one in callers:
            one.kill()
            one.wait()
    assert set((await unfinished(work)).values()) == {1}


async def _all_there(work: JobQueue) -> bool:
    found = await unfinished(work)
    assert not found or max(found.values()) == 1, found
    return len(found) == KEYS
