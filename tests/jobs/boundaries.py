"""Calls of the room, each with every script or statement that it sends: what is there before, and what holds after."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from conquiet import Backoff, Job, JobQueue, JobRetention, JobState, QueueError, RetryPolicy
from conquiet.errors import ConfigError, DuplicateJobError, UnknownJobError
from conquiet.jobs.store import JobStore
from conquiet.jobs.stores.postgres import PostgresStore
from conquiet.jobs.stores.postgres.looking import Looks, Place
from conquiet.jobs.stores.postgres.statements import migrations
from conquiet.kit.clock import ManualClock
from tests.contracts.jobs_flavours import TTL, tally
from tests.rigs.calling import Check, Path
from tests.rigs.tracing import Striker
from tests.rigs.waiting import eventually

__all__ = ["BACKGROUND", "BEAT", "PATHS", "Kind", "Scene"]

Kind: TypeAlias = Literal["redis", "postgres"]
BEAT: Final = TTL / 3

BACKGROUND: Final[dict[Kind, set[str]]] = {
    # What a connection begins with; the wait for news, where a path does not name it; and that nobody waits any more.
    "redis": {"CLIENT", "HELLO", "jobs_part"},
    "postgres": {"LISTEN", "DEALLOCATE", "listeners"},
}
"""What comes whenever it comes, and changes nothing."""


@dataclass
class Scene:
    """A queue that nobody else has, reached through a proxy by ``jobs`` and past it by ``eye``."""

    proxy: Striker
    store: JobStore
    jobs: JobQueue
    eye: JobQueue
    clock: ManualClock
    kept: list[Job] = field(default_factory=list)
    """Jobs that the preparation claimed."""
    migrate: Callable[[], Awaitable[int]] | None = None

    @property
    def job(self) -> Job:
        return self.kept[0]

    async def state(self, id: str) -> Job:
        job = await self.eye.get(id)
        assert job is not None
        return job


def queue_of(store: JobStore, name: str) -> JobQueue:
    retry = RetryPolicy(max_retries=3, backoff=Backoff(base=10.0, cap=10.0, kind="fixed"))
    keep = JobRetention(age=None, count=0)
    return JobQueue(store, name, lease_ttl=TTL, retry=retry, keep=keep, keep_failed=keep)


# --- before ---------------------------------------------------------------------------------------------------------


async def three_jobs(scene: Scene) -> None:
    for id in ("a", "b", "c"):
        await scene.eye.enqueue(id, job_id=id)


async def claimed(scene: Scene) -> None:
    """By the walker, and so long ago that a heartbeat shows."""
    await three_jobs(scene)
    scene.kept = await scene.jobs.claim(3)
    scene.clock.advance(5.0)


async def lost_claim(scene: Scene) -> None:
    await three_jobs(scene)
    await _lose(scene, scene.jobs.claim(3))


async def lost_ack(scene: Scene) -> None:
    await claimed(scene)
    await _lose(scene, scene.jobs.ack(*scene.kept))


async def _lose(scene: Scene, call: Awaitable[Any]) -> None:
    """Have the store do it, and not answer."""
    names = ("jobs_claim", "jobs_settle") if hasattr(scene.proxy, "url") else ("claim", "settle")
    name = names[1] if scene.kept else names[0]
    struck = scene.proxy.strike(name, (), "unanswered")
    with suppress(QueueError):
        await call
    assert struck.is_set()


async def failed(scene: Scene) -> None:
    await three_jobs(scene)
    await scene.eye.cancel("a")


async def slow_table(scene: Scene) -> None:
    """Claims go on from where the last one stopped, before all that is in line."""
    await three_jobs(scene)
    assert isinstance(scene.store, PostgresStore)
    looks = scene.store._claiming._looks[scene.jobs.name] = Looks()
    looks._last, looks._until = Place(-(2**31), 0, 0), scene.clock.monotonic() + TTL


async def run_out(scene: Scene) -> None:
    """One lease has run out, one job has fallen due."""
    await scene.eye.enqueue("a", job_id="a")
    await scene.eye.claim()
    await scene.eye.enqueue("b", job_id="b", delay=1.0)
    scene.clock.advance(TTL + 1)


async def finished(scene: Scene) -> None:
    await three_jobs(scene)
    await scene.eye.ack(*await scene.eye.claim(2))


# --- what is asked for ----------------------------------------------------------------------------------------------


async def enqueue_named(scene: Scene) -> str:
    try:
        return await scene.jobs.enqueue(1, job_id="mine")
    except DuplicateJobError:
        return "it is there"


async def replay(scene: Scene) -> None:
    with suppress(ConfigError):  # it is ready already
        await scene.jobs.replay("a")


async def delete(scene: Scene) -> None:
    with suppress(UnknownJobError):
        await scene.jobs.delete("a")


async def wait_for_news(scene: Scene) -> list[Job]:
    """A claim that finds nothing, and waits; a job comes."""
    asking = asyncio.ensure_future(scene.jobs.claim(timeout=TTL))
    claims = {"jobs_claim", "claim"}
    await eventually(lambda: asking.done() or not claims.isdisjoint(scene.proxy.trace), "the first claim")
    if not asking.done():
        await scene.eye.enqueue("news")
    return await asking


async def wait_for_end(scene: Scene) -> Job:
    """A job that ends while it is waited for."""
    waiting = asyncio.ensure_future(scene.jobs.wait("a"))
    finds = {"jobs_find", "find"}
    await eventually(lambda: waiting.done() or not finds.isdisjoint(scene.proxy.trace), "the first look")
    if not waiting.done() and not (await scene.state("a")).is_finished:
        await scene.eye.ack(*await scene.eye.claim())
    return await waiting


# --- after ----------------------------------------------------------------------------------------------------------


async def nothing_is_changed(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert await tally(scene.eye) == (3, 0, 0, 0)


async def it_answers(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert second is None


async def is_there_once_more(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    """A second call adds a second job: whoever wants one only gives it an ID."""
    assert (await scene.state(second)).payload == 1
    assert await tally(scene.eye) == (1 + done, 0, 0, 0)


async def is_there_once(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert second == ("it is there" if done else "mine")
    assert await tally(scene.eye) == (1, 0, 0, 0)


async def is_still_there_once(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert second == "it is there"
    assert await tally(scene.eye) == (1, 0, 0, 0)


async def all_or_none_were_added(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert list(first.entry_ids) == [None] * 3
    assert await tally(scene.eye) == (3 + 3 * done, 0, 0, 0)


async def all_are_mine(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    """What the first call had leased is not stranded: no time has passed, and it has cost no attempt."""
    assert [(job.id, job.attempts) for job in second] == [("a", 1), ("b", 1), ("c", 1)]
    await scene.jobs.ack(*second)
    assert await tally(scene.eye) == (0, 0, 3, 0)


async def both_are_mine(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    """The lease that ran out has cost its attempt, the lost claim none."""
    found = {job.id: job.attempts for job in second}
    assert found == {"a": 2, "b": 1}


async def the_news_are_mine(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert [(job.payload, job.attempts) for job in second] == [("news", 1)]


async def leases_are_longer(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    scene.clock.advance(TTL - 1)
    assert await scene.eye.claim() == [], "they were leased anew five seconds after the claim"


async def all_are_done(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert await tally(scene.eye) == (0, 0, 3, 0)


async def one_has_failed_once(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert await tally(scene.eye) == (1, 2, 0, 0)
    job = await scene.state(scene.job.id)
    assert (job.attempts, len(job.failures), job.last_error) == (1, 1, "why")


async def one_is_given_back(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert await tally(scene.eye) == (1, 2, 0, 0)
    assert (await scene.state(scene.job.id)).attempts == 0


async def one_is_cancelled(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    """Whoever asks again is told that it has ended."""
    assert await tally(scene.eye) == (2, 0, 0, 1)
    assert second is not (done and at == 1)


async def one_is_replayed(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert await tally(scene.eye) == (3, 0, 0, 0)
    assert (await scene.state("a")).attempts == 0


async def one_is_deleted(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert await tally(scene.eye) == (2, 0, 0, 0)


async def finished_ones_are_gone(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert await tally(scene.eye) == (1, 0, 0, 0)


async def its_end_is_known(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert second.state is JobState.SUCCEEDED


async def the_tables_are_there(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    await scene.store.open()
    await three_jobs(scene)
    assert len(await scene.eye.claim(3)) == 3


# --- the paths ------------------------------------------------------------------------------------------------------

_Call: TypeAlias = Callable[[Scene], Awaitable[Any]]


async def _nothing(scene: Scene) -> None:
    """No preparation."""


def _both(
    redis: tuple[str, ...],
    postgres: tuple[str, ...],
    call: _Call,
    check: Check[Scene],
    before: _Call = _nothing,
    *,
    may_repeat: bool = False,
    together: bool = False,
) -> dict[Kind, Path[Scene]]:
    how = (call, check, before, may_repeat, together)
    return {"redis": Path(redis, *how), "postgres": Path(postgres, *how)}


async def _migrate(scene: Scene) -> int:
    assert scene.migrate is not None
    return await scene.migrate()


_ALL: Final[dict[str, dict[Kind, Path[Scene]]]] = {
    "open": _both(
        ("PING", "CONFIG", "CONFIG"),
        ("schema_exists", "migrations_version"),
        lambda s: s.store.open(),
        it_answers,
        together=True,
    ),
    "enqueue": _both(("jobs_add",), ("add",), lambda s: s.jobs.enqueue(1), is_there_once_more),
    "enqueue by ID": _both(("jobs_add",), ("add",), enqueue_named, is_there_once),
    "enqueue what is there": _both(
        ("jobs_add",), ("add", "taken"), enqueue_named, is_still_there_once, lambda s: s.eye.enqueue(1, job_id="mine")
    ),
    "enqueue many": _both(("jobs_add",), ("add",), lambda s: s.jobs.enqueue_many([1, 2, 3]), all_or_none_were_added),
    "claim": _both(("jobs_claim",), ("claim",), lambda s: s.jobs.claim(3), all_are_mine, three_jobs),
    "claim again": _both(
        ("jobs_leased", "jobs_settle", "jobs_claim"),
        ("leased", "settle", "claim"),
        lambda s: s.jobs.claim(3),
        all_are_mine,
        lost_claim,
    ),
    "claim what has run out": _both(
        ("jobs_claim",), ("claim", "expire", "promote", "claim"), lambda s: s.jobs.claim(3), both_are_mine, run_out
    ),
    "claim and wait": _both(
        ("jobs_claim", "XREAD", "jobs_claim"), ("claim", "claim"), wait_for_news, the_news_are_mine, may_repeat=True
    ),
    "heartbeat": _both(("jobs_renew",), ("renew",), lambda s: s.jobs.heartbeat(*s.kept), leases_are_longer, claimed),
    "ack": _both(("jobs_settle",), ("settle",), lambda s: s.jobs.ack(*s.kept, result=7), all_are_done, claimed),
    "ack again": _both(("jobs_find",), ("find",), lambda s: s.jobs.ack(*s.kept), all_are_done, lost_ack),
    "nack": _both(
        ("jobs_settle",), ("settle",), lambda s: s.jobs.nack(s.job, error="why"), one_has_failed_once, claimed
    ),
    "release": _both(("jobs_settle",), ("settle",), lambda s: s.jobs.release(s.job), one_is_given_back, claimed),
    "get": _both(("jobs_find",), ("find",), lambda s: s.jobs.get("a"), nothing_is_changed, three_jobs),
    "counts": _both(("jobs_count",), ("counts",), lambda s: s.jobs.counts(), nothing_is_changed, three_jobs),
    "list": _both(
        ("jobs_page",), ("page",), lambda s: s.jobs.list_jobs(JobState.READY), nothing_is_changed, three_jobs
    ),
    "cancel": _both(
        ("jobs_find", "jobs_cancel"), ("find", "cancel"), lambda s: s.jobs.cancel("a"), one_is_cancelled, three_jobs
    ),
    "replay": _both(("jobs_replay",), ("replay",), replay, one_is_replayed, failed),
    "delete": _both(("jobs_delete",), ("delete",), delete, one_is_deleted, failed),
    "purge": _both(
        ("jobs_purge",) * 3,
        ("surplus", "purge", "surplus", "purge", "surplus", "purge"),
        lambda s: s.jobs.purge(),
        finished_ones_are_gone,
        finished,
    ),
    "wait": _both(
        ("jobs_watch", "jobs_find", "XREAD", "jobs_find"),
        ("watch", "find", "watch", "find"),
        wait_for_end,
        its_end_is_known,
        three_jobs,
        may_repeat=True,
    ),
}

_MIGRATING: Final = (
    *("BEGIN", "migrations_lock", "schema_exists", "schema_exists", "schema_create", "migrations_table"),
    *(name for step in migrations() for name in (step.name, "migrations_add")),
    "COMMIT",
)

PATHS: Final[dict[Kind, dict[str, Path[Scene]]]] = {
    "redis": {name: both["redis"] for name, both in _ALL.items()},
    "postgres": {
        **{name: both["postgres"] for name, both in _ALL.items()},
        "claim on": Path(("claim_on",), lambda s: s.jobs.claim(3), all_are_mine, slow_table),
        "migrate": Path(_MIGRATING, _migrate, the_tables_are_there),
    },
}
"""The commands of each call, in order."""
