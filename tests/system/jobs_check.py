"""The judge: whether what workers noted, and what the store has in the end, keep the promises of jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final

from conquiet import Job, JobState
from conquiet.jobs.job import EXPIRED, HISTORY
from tests.system.jobs_log import Claim, Disturbance, Log, Run, Saying

__all__ = ["MAX_RETRIES", "Plan", "check"]

MAX_RETRIES: Final = 3
"""The policy's, where a job has no limit of its own."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What was enqueued: what its handler is to do, its own limit, and for how many seconds it has to wait."""

    do: str = "done"
    max_retries: int | None = None
    delay: float = 0.0
    priority: int = 0

    @property
    def attempts(self) -> int:
        """How many there may be."""
        return 1 + (MAX_RETRIES if self.max_retries is None else self.max_retries)


@dataclass(slots=True)
class _Case:
    """All that is known of one job."""

    id: str
    plan: Plan | None = None
    job: Job | None = None
    claims: list[Claim] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    sayings: list[Saying] = field(default_factory=list)


def check(
    plans: Mapping[str, Plan], log: Log, jobs: Mapping[str, Job], disturbances: Iterable[Disturbance] = ()
) -> list[str]:
    """Everything that is wrong; nothing, if the promises were kept.

    ``plans`` are the jobs whose enqueueing was confirmed, ``jobs`` what the store has at the end, ``log`` what was
    noted on the way.

    * Each job is there and has succeeded or failed; there are no others.
    * A token is given out once, is run at most once, and none is above the store's last.
    * There are at most ``max_retries`` + 1 attempts, and no more runs than attempts.
    * Who has lost the job can change nothing; and nobody is refused without having lost it.
    * It is acknowledged once, by the run that was last, whose result is kept. What has finished is not run again.
    * It fails only when it has no attempts left, and by the word of its worker or the end of its lease.
    * A lease ends only if its worker was killed or stopped, or the store was away; so nothing is run twice without
      need, or side by side, or cancelled, without such a reason.
    * Every attempt is accounted for, in the store's history; whatever was begun has ended, but for what was killed.
    * Nothing is claimed before its time.
    """
    causes = list(disturbances)
    found: list[str] = []
    for case in _cases(plans, log, jobs).values():
        if case.plan is None:
            found.append(f"never enqueued: {case.id}")
        elif case.job is None:
            found.append(f"lost: {case.id}")
        else:
            found += [f"{complaint} ({case})" for complaint in _complaints(case, case.plan, case.job, causes)]
    return found


def _cases(plans: Mapping[str, Plan], log: Log, jobs: Mapping[str, Job]) -> dict[str, _Case]:
    cases = {id: _Case(id, plan, jobs.get(id)) for id, plan in plans.items()}
    for id, job in jobs.items():
        cases.setdefault(id, _Case(id, job=job))
    for claim in log.claims:
        cases.setdefault(claim.job, _Case(claim.job)).claims.append(claim)
    for run in log.runs:
        cases.setdefault(run.job, _Case(run.job)).runs.append(run)
    for saying in log.sayings:
        cases.setdefault(saying.job, _Case(saying.job)).sayings.append(saying)
    return cases


def _complaints(case: _Case, plan: Plan, job: Job, causes: list[Disturbance]) -> Iterator[str]:
    yield from _tokens(case, job)
    yield from _attempts(case, plan, job)
    yield from _accepted(case, job)
    yield from _refused(case, job)
    if job.state is JobState.SUCCEEDED:
        yield from _success(case, plan, job)
    elif job.state is JobState.FAILED:
        yield from _failure(case, plan, job)
    else:
        yield f"not finished: {job.state}"
    yield from _history(case, job, causes)
    yield from _runs(case, plan, causes)
    if any(claim.at_ms < job.enqueued_ms + round(plan.delay * 1000) for claim in case.claims):
        yield "claimed before its time"


# --- claims --------------------------------------------------------------------------------------------------------


def _tokens(case: _Case, job: Job) -> Iterator[str]:
    for token, times in Counter(claim.token for claim in case.claims).items():
        if times > 1:
            yield f"claimed twice under one token: {token}"
    for token, times in Counter(run.token for run in case.runs).items():
        if times > 1:
            yield f"run twice under one token: {token}"
    if any(claim.token > job.lease_token for claim in case.claims):
        yield "claimed under a token that the store has forgotten"
    claimed = {(claim.owner, claim.token) for claim in case.claims}
    for run in case.runs:
        if (run.owner, run.token) not in claimed:
            yield f"run without a claim: {run.token}"


def _attempts(case: _Case, plan: Plan, job: Job) -> Iterator[str]:
    most = max([job.attempts, *(claim.attempts for claim in case.claims)])
    if most > plan.attempts:
        yield f"attempt {most} of {plan.attempts}"
    tokens = {run.token for run in case.runs}
    if len(tokens) > job.attempts:
        yield f"run {len(tokens)} times in {job.attempts} attempts"


# --- what the store accepted and refused ------------------------------------------------------------------------------


def _accepted(case: _Case, job: Job) -> Iterator[str]:
    applied = [saying for saying in case.sayings if saying.answer == "applied"]
    if sum(saying.kind == "ack" for saying in applied) > 1:
        yield "acknowledged twice"
    if sum(saying.kind in ("ack", "fail") for saying in applied) > 1:
        yield "finished twice"
    for (token, owner), times in Counter((saying.token, saying.owner) for saying in applied).items():
        if times > 1:
            yield f"settled twice under one token: {token} by {owner}"
    for saying in applied:
        # A claim's time is in whole milliseconds: only what came a whole one later certainly came later.
        if any(claim.token > saying.token and (claim.at_ms + 1) * 1000 <= saying.asked for claim in case.claims):
            yield f"stale {saying.kind} accepted: {saying.token}"
        elif saying.kind in ("ack", "fail") and saying.token != job.lease_token:
            yield f"claimed again after its end: {saying.token}"


def _refused(case: _Case, job: Job) -> Iterator[str]:
    for saying in case.sayings:
        if saying.answer != "stale" or job.lease_token > saying.token:
            continue
        # Under the last token there are two reasons: the lease ended the last attempt, or it was settled already.
        others = [other for other in case.sayings if other.token == saying.token and other.answer != "stale"]
        if job.last_error != EXPIRED and not others:
            yield f"{saying.kind} refused without cause: {saying.token}"


# --- how it ended -----------------------------------------------------------------------------------------------------


def _success(case: _Case, plan: Plan, job: Job) -> Iterator[str]:
    acks = [saying for saying in case.sayings if saying.kind == "ack" and saying.token == job.lease_token]
    if all(saying.answer == "stale" for saying in acks):
        yield "succeeded without an acknowledgment"
    if not any(run.token == job.lease_token and run.outcome == "done" for run in case.runs):
        yield "succeeded without having been done"
    if job.result != {"token": job.lease_token}:
        yield f"the result is of another attempt: {job.result}"
    if plan.do == "always":
        yield "succeeded though it always fails"


def _failure(case: _Case, plan: Plan, job: Job) -> Iterator[str]:
    if job.attempts < plan.attempts:
        yield "failed with attempts left"
    words = [saying for saying in case.sayings if saying.kind == "fail" and saying.token == job.lease_token]
    if job.last_error != EXPIRED and all(saying.answer == "stale" for saying in words):
        yield "failed, but nobody said so"
    if any(saying.kind == "ack" and saying.answer == "applied" for saying in case.sayings):
        yield "acknowledged, yet failed"


def _history(case: _Case, job: Job, causes: Iterable[Disturbance]) -> Iterator[str]:
    expected = job.attempts - (job.state is not JobState.FAILED)
    if job.is_finished and len(job.failures) != min(expected, HISTORY):
        yield f"{len(job.failures)} failures in {job.attempts} attempts"
    told = Counter(saying.owner for saying in case.sayings if saying.kind in ("retry", "fail"))
    for failure in job.failures:
        if failure.error == EXPIRED:
            start, end = failure.started_ms * 1000, (failure.ended_ms + 1) * 1000
            if not any(cause.hits(failure.worker, start, end) for cause in causes):
                yield f"a lease of {failure.worker} ended without cause, in attempt {failure.number}"
        elif not told[failure.worker]:
            yield f"a failure that {failure.worker} did not report, in attempt {failure.number}"


def _runs(case: _Case, plan: Plan, causes: list[Disturbance]) -> Iterator[str]:
    in_order = sorted(case.runs, key=lambda run: run.token)
    claimed = {claim.token: claim.at_ms * 1000 for claim in case.claims}
    for first, second in combinations(in_order, 2):
        if first.end is not None and first.end <= second.start:
            continue
        # A stop may also fall between the claim and the first line of the handler, which then comes after the next's.
        start, end = claimed.get(first.token, first.start), max(first.start, second.start)
        if not any(cause.hits(first.owner, start, end) for cause in causes):
            yield f"still at work when the next began: {first.token}"
    killed = {cause.owner for cause in causes if cause.kind == "kill"}
    for run in case.runs:
        if run.end is None and run.owner not in killed:
            yield f"begun and never ended: {run.token}"
        if run.outcome != "cancelled" or plan.do == "slow":
            continue
        if not any(cause.hits(run.owner, claimed.get(run.token, run.start), run.end) for cause in causes):
            yield f"cancelled without cause: {run.token}"
