"""The judge of workers finds what is wrong, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conquiet import Attempt, Job, JobState
from tests.system.jobs_check import Plan, check
from tests.system.jobs_log import Claim, Disturbance, Log, Pen, Run, Saying

PLAIN = Plan()
MS = 1000
"""A millisecond in the log, whose times are microseconds."""


def done(token: int = 1, **more: Any) -> Job:
    """A job that has succeeded in one attempt, unless told otherwise."""
    known: dict[str, Any] = {
        "attempts": 1,
        "lease_token": token,
        "state": JobState.SUCCEEDED,
        "raw_result": b'{"token": %d}' % token,
        "worker": "x",
        "claimed_ms": 100,
        "finished_ms": 120,
    }
    return Job(id="a", queue="work", raw=b"{}", **{**known, **more})


def failed(*failures: Attempt, **more: Any) -> Job:
    """A job that has failed in as many attempts."""
    known = {"attempts": len(failures), "last_error": failures[-1].error, "raw_result": None, "failures": failures}
    return done(len(failures), state=JobState.FAILED, **{**known, **more})


def failure(number: int, error: str, worker: str = "x", started: int = 100, ended: int = 120) -> Attempt:
    return Attempt(number, worker, started, ended, error)


class Story:
    """A log that is told line by line; whatever is not told otherwise, ``x`` does at once and the store accepts."""

    def __init__(self, directory: Path) -> None:
        self.log = Log(directory)

    def claim(self, token: int, at: int, owner: str = "x", job: str = "a", attempts: int = 0) -> Story:
        self.log.claims.append(Claim(owner, job, token, attempts or token, at))
        return self

    def run(
        self, token: int, start: int, end: int | None, outcome: str = "done", owner: str = "x", job: str = "a"
    ) -> Story:
        ended = None if end is None else end * MS
        self.log.runs.append(Run(owner, job, token, token, start * MS, ended, outcome if end else ""))
        return self

    def say(self, kind: str, token: int, at: int, answer: Any = "applied", owner: str = "x", job: str = "a") -> Story:
        self.log.sayings.append(Saying(owner, job, token, kind, at * MS, answer))
        return self

    def attempt(self, token: int, at: int, kind: str = "ack", owner: str = "x") -> Story:
        """A whole one, of 20 ms."""
        outcome = "done" if kind == "ack" else "failed"
        return (
            self.claim(token, at, owner).run(token, at, at + 19, outcome, owner).say(kind, token, at + 20, owner=owner)
        )


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def killed(owner: str = "x", at: int = 110) -> Disturbance:
    return Disturbance("kill", owner, at * MS)


def stopped(owner: str = "x", at: int = 110, until: int = 250) -> Disturbance:
    return Disturbance("stop", owner, at * MS, until * MS)


def outage(at: int = 110, until: int = 250) -> Disturbance:
    return Disturbance("outage", "", at * MS, until * MS)


def kinds(story: Story, job: Job | None, *causes: Disturbance, plan: Plan = PLAIN) -> set[str]:
    """What the judge complains of, in short."""
    jobs = {} if job is None else {job.id: job}
    complaints = check({"a": plan}, story.log, jobs, causes)
    return {complaint.partition(" (")[0].partition(":")[0] for complaint in complaints}


# --- what is good ---------------------------------------------------------------------------------------------------


def test_a_job_that_was_done(story: Story) -> None:
    assert kinds(story.attempt(1, 100), done()) == set()


def test_a_job_that_failed_once(story: Story) -> None:
    job = done(2, attempts=2, failures=(failure(1, "no"),))
    assert kinds(story.attempt(1, 100, "retry").attempt(2, 200), job, plan=Plan("once")) == set()


def test_a_job_that_failed_for_good(story: Story) -> None:
    job = failed(failure(1, "no"), failure(2, "no"))
    story.attempt(1, 100, "retry").attempt(2, 200, "fail")
    assert kinds(story, job, plan=Plan("always", 1)) == set()


def test_a_killed_worker(story: Story) -> None:
    job = done(2, attempts=2, failures=(failure(1, "lease expired"),))
    story.claim(1, 100).run(1, 101, None).attempt(2, 200, owner="y")
    assert kinds(story, job, killed()) == set()


def test_a_killed_worker_that_noted_not_even_the_claim(story: Story) -> None:
    job = done(2, attempts=2, failures=(failure(1, "lease expired"),))
    assert kinds(story.attempt(2, 200, owner="y"), job, killed()) == set()


def test_a_zombie_that_is_refused(story: Story) -> None:
    job = done(2, attempts=2, failures=(failure(1, "lease expired"),))
    story.claim(1, 100).run(1, 101, 260, "cancelled").say("renew", 1, 255, "stale").attempt(2, 200, owner="y")
    assert kinds(story, job, stopped()) == set()


def test_an_acknowledgment_whose_answer_was_lost(story: Story) -> None:
    story.claim(1, 100).run(1, 101, 110).say("ack", 1, 111, "")
    assert kinds(story, done()) == set()


def test_a_job_that_was_given_back(story: Story) -> None:
    story.claim(1, 100).say("release", 1, 105).attempt(2, 200, owner="y")
    story.log.claims[-1] = replace(story.log.claims[-1], attempts=1)
    assert kinds(story, done(2)) == set()


# --- what is not ----------------------------------------------------------------------------------------------------


def test_a_lost_job(story: Story) -> None:
    assert kinds(story.attempt(1, 100), None) == {"lost"}


def test_a_job_that_nobody_enqueued(story: Story) -> None:
    complaints = check({}, story.attempt(1, 100).log, {"a": done()})
    assert complaints == ["never enqueued: a"]


@pytest.mark.parametrize("state", [JobState.READY, JobState.IN_FLIGHT])
def test_a_job_that_is_not_finished(state: JobState, story: Story) -> None:
    job = done(state=state, attempts=0, lease_token=0, raw_result=None)
    assert kinds(story, job) == {"not finished"}


def test_a_job_acknowledged_twice(story: Story) -> None:
    found = kinds(story.attempt(1, 100).attempt(2, 200), done(2, attempts=2, failures=(failure(1, "no"),)))
    assert found >= {"acknowledged twice", "finished twice", "claimed again after its end"}


def test_a_job_acknowledged_twice_under_one_token(story: Story) -> None:
    found = kinds(story.attempt(1, 100).say("ack", 1, 130), done())
    assert found == {"acknowledged twice", "finished twice", "settled twice under one token"}


@pytest.mark.parametrize("kind", ["ack", "retry", "fail", "release"])
def test_a_stale_word_that_was_accepted(kind: str, story: Story) -> None:
    story.claim(1, 100).run(1, 101, 255).say(kind, 1, 256).claim(2, 200, "y").run(2, 201, 205, owner="y")
    story.say("ack", 2, 206, owner="y")
    job = done(2, attempts=2, failures=(failure(1, "lease expired"),))
    assert f"stale {kind} accepted" in kinds(story, job, stopped())


def test_a_success_by_a_stale_acknowledgment(story: Story) -> None:
    """The store has the result of the first attempt, though the second had the job."""
    story.claim(1, 100).run(1, 101, 255).say("ack", 1, 256).claim(2, 200, "y").run(2, 201, 300, "cancelled", "y")
    job = done(2, attempts=2, failures=(failure(1, "lease expired"),), raw_result=b'{"token": 1}')
    assert kinds(story, job, stopped(), stopped("y")) == {
        "stale ack accepted",
        "succeeded without an acknowledgment",
        "succeeded without having been done",
        "the result is of another attempt",
    }


def test_too_many_attempts(story: Story) -> None:
    job = failed(*(failure(number, "no") for number in (1, 2, 3)))
    story.attempt(1, 100, "retry").attempt(2, 200, "retry").attempt(3, 300, "fail")
    assert kinds(story, job, plan=Plan("always", 1)) == {"attempt 3 of 2"}


def test_more_runs_than_attempts(story: Story) -> None:
    story.attempt(1, 100, "release").attempt(2, 200)
    assert "run 2 times in 1 attempts" in kinds(story, done(2))


def test_too_few_attempts(story: Story) -> None:
    job = failed(failure(1, "no"))
    assert kinds(story.attempt(1, 100, "fail"), job, plan=Plan("always", 1)) == {"failed with attempts left"}


def test_two_runs_under_one_token(story: Story) -> None:
    story.attempt(1, 100).run(1, 105, 110, owner="y")
    assert kinds(story, done()) == {
        "run twice under one token",
        "run without a claim",
        "still at work when the next began",
    }


def test_a_token_given_out_twice(story: Story) -> None:
    assert kinds(story.attempt(1, 100).claim(1, 100, "y"), done()) == {"claimed twice under one token"}


def test_a_finished_job_that_is_run_again(story: Story) -> None:
    story.attempt(1, 100).claim(2, 200, "y").run(2, 201, None, owner="y")
    assert kinds(story, done(), killed("y")) >= {"claimed under a token that the store has forgotten"}
    job = done(2, attempts=2, failures=(failure(1, "lease expired"),))
    assert kinds(story.say("ack", 2, 210, "", "y"), job, killed("y")) >= {"claimed again after its end"}


def test_a_refusal_without_cause(story: Story) -> None:
    for kind in ("ack", "renew"):
        told = Story(story.log.directory).claim(1, 100).run(1, 101, 110).say(kind, 1, 111, "stale")
        job = failed(failure(1, "no"))
        assert f"{kind} refused without cause" in kinds(told, job, plan=Plan(max_retries=0))


def test_a_renewal_that_crossed_the_acknowledgment(story: Story) -> None:
    assert kinds(story.attempt(1, 100).say("renew", 1, 121, "stale"), done()) == set()


def test_the_end_of_the_last_lease_refuses_what_comes_later(story: Story) -> None:
    job = failed(failure(1, "lease expired"))
    story.claim(1, 100).run(1, 101, 255).say("ack", 1, 256, "stale")
    assert kinds(story, job, stopped(), plan=Plan(max_retries=0)) == set()


def test_a_success_that_nobody_claims(story: Story) -> None:
    story.claim(1, 100).run(1, 101, None)
    assert kinds(story, done(), killed()) == {
        "succeeded without an acknowledgment",
        "succeeded without having been done",
    }


def test_a_success_of_what_always_fails(story: Story) -> None:
    assert kinds(story.attempt(1, 100), done(), plan=Plan("always")) == {"succeeded though it always fails"}


def test_a_failure_that_nobody_reported(story: Story) -> None:
    story.claim(1, 100).run(1, 101, 110, "failed")
    found = kinds(story, failed(failure(1, "no")), plan=Plan(max_retries=0))
    assert found == {"failed, but nobody said so", "a failure that x did not report, in attempt 1"}


def test_a_failure_of_what_was_acknowledged(story: Story) -> None:
    found = kinds(story.attempt(1, 100), failed(failure(1, "lease expired")), killed(), plan=Plan(max_retries=0))
    assert found == {"acknowledged, yet failed"}


def test_a_lease_that_ended_without_cause(story: Story) -> None:
    job = done(2, attempts=2, failures=(failure(1, "lease expired"),))
    story.claim(1, 100).run(1, 101, 115).say("ack", 1, 116, "").attempt(2, 200, owner="y")
    expected = {"a lease of x ended without cause, in attempt 1"}
    assert kinds(story, job) == expected
    assert kinds(story, job, killed("y")) == expected
    assert kinds(story, job, killed("x", at=130)) == expected
    assert kinds(story, job, stopped("x", 50, 90)) == expected
    assert kinds(story, job, outage(50, 90)) == expected
    assert kinds(story, job, outage()) == set()


def test_an_attempt_that_is_not_accounted_for(story: Story) -> None:
    story.attempt(1, 100, "retry").attempt(2, 200)
    assert kinds(story, done(2, attempts=2)) == {"0 failures in 2 attempts"}


def test_two_runs_side_by_side(story: Story) -> None:
    job = done(2, attempts=2, failures=(failure(1, "no"),))
    story.claim(1, 100).run(1, 101, 205, "failed").say("retry", 1, 120).attempt(2, 200, owner="y")
    assert kinds(story, job, plan=Plan("once")) == {"still at work when the next began"}


def test_a_stop_between_the_claim_and_the_handler(story: Story) -> None:
    job = done(2, attempts=2, failures=(failure(1, "lease expired"),))
    story.claim(1, 100).attempt(2, 200, owner="y").run(1, 252, 260).say("ack", 1, 261, "stale")
    assert kinds(story, job, stopped()) == set()
    assert "still at work when the next began" in kinds(story, job, stopped("y"))
    story.log.runs[-1].outcome = "cancelled"
    assert kinds(story, job, stopped()) == set()
    assert "cancelled without cause" in kinds(story, job, stopped("y"))


def test_a_handler_that_never_ended(story: Story) -> None:
    job = done(2, attempts=2, failures=(failure(1, "lease expired"),))
    story.claim(1, 100).run(1, 101, None).attempt(2, 200, owner="y")
    assert kinds(story, job, stopped()) == {"begun and never ended"}


def test_a_handler_that_was_cancelled_without_cause(story: Story) -> None:
    job = done(2, attempts=2, failures=(failure(1, "late"),))
    story.claim(1, 100).run(1, 101, 110, "cancelled").say("retry", 1, 111).attempt(2, 200)
    assert kinds(story, job) == {"cancelled without cause"}
    assert kinds(story, job, plan=Plan("slow")) == set()
    assert kinds(story, job, Disturbance("leave", "x", 105 * MS)) == set()


def test_a_job_that_is_claimed_too_early(story: Story) -> None:
    story.attempt(1, 100)
    assert kinds(story, done(enqueued_ms=50), plan=Plan(delay=0.051)) == {"claimed before its time"}
    assert kinds(story, done(enqueued_ms=50), plan=Plan(delay=0.050)) == set()


# --- the log --------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_as_it_comes(tmp_path: Path) -> None:
    log = Log(tmp_path)
    assert log.read().runs == []
    pen = Pen(log.path("x"))
    pen.claimed([("a", 1, 1, 100), ("b", 3, 2, 100)])
    number = pen.begin("a", 1, 1)
    assert [(run.job, run.outcome) for run in log.read().runs] == [("a", "")]
    assert log.open_runs("x") == log.runs
    pen.end(number, "done")
    asked = pen.say([("a", 1, "ack"), ("b", 3, "retry")])
    assert log.said_by("x", "") == [("ack", "a"), ("retry", "b")]
    pen.said(asked, [True, False])
    pen.refused([("b", 3)])
    pen.note("ended", {"more": 1})
    assert log.read().claims == [Claim("x", "a", 1, 1, 100), Claim("x", "b", 3, 2, 100)]
    assert [(run.owner, run.job, run.outcome) for run in log.runs_of("x")] == [("x", "a", "done")]
    assert log.said_by("x", "applied") == [("ack", "a")]
    assert log.said_by("x", "stale") == [("renew", "b"), ("retry", "b")]
    assert log.told == {"a"}
    assert log.tokens == {"a": 1, "b": 3}
    assert log.open_runs("x") == []
    assert [note.detail for note in log.noted("x", "ended")] == [{"more": 1}]


def test_a_line_that_a_kill_has_cut_is_not_read(tmp_path: Path) -> None:
    log = Log(tmp_path)
    Pen(log.path("x")).begin("a", 1, 1)
    with (tmp_path / "x.log").open("a") as file:
        file.write('["begin",1,"b"')
    Pen(log.path("y")).begin("c", 1, 1)
    assert [run.job for run in log.read().runs] == ["a", "c"]
