"""Jobs in Redis: one script an operation, one slot a queue."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self, Unpack

from conquiet.errors import ConfigError, DuplicateJobError, QueueError
from conquiet.jobs.chunks import MOST, chunks
from conquiet.jobs.heartbeat_store import HeartbeatStore, SharesHeartbeats
from conquiet.jobs.job import CANCELLED, EXPIRED, HISTORY, Event, Job, JobState, NewJob, Settlement
from conquiet.jobs.options import RedisStoreKeywords, RedisStoreOptions
from conquiet.jobs.store import MOST_BYTES, Claim, Claimed, Expired, JobPage, JobRetention, Lease, Wanted
from conquiet.jobs.stores._gathering import Gathering
from conquiet.jobs.stores._redis_records import LETTERS, added, claimed_jobs, known_jobs, settled, token_of
from conquiet.jobs.stores._redis_watch import NOW, Watch
from conquiet.kit.clock import Clock
from conquiet.kit.ids import nonce
from conquiet.kit.loopthread import forks
from conquiet.kit.opened import Opened
from conquiet.kit.options import takes
from conquiet.kit.service import MOMENT, to_its_end
from conquiet.wire.address import Address, AddressLike
from conquiet.wire.connections import Connections
from conquiet.wire.keys import JobKeys
from conquiet.wire.parser import Reply
from conquiet.wire.scripts import Script, run
from conquiet.wire.streams import pack

__all__ = ["RedisStore"]

_log = logging.getLogger("conquiet.jobs")

_ADD: Final = Script.named("jobs_add")
_CLAIM: Final = Script.named("jobs_claim")
_LEASED: Final = Script.named("jobs_leased")
_RENEW: Final = Script.named("jobs_renew")
_SETTLE: Final = Script.named("jobs_settle")
_FIND: Final = Script.named("jobs_find")
_COUNT: Final = Script.named("jobs_count")
_PAGE: Final = Script.named("jobs_page")
_REPLAY: Final = Script.named("jobs_replay")
_CANCEL: Final = Script.named("jobs_cancel")
_DELETE: Final = Script.named("jobs_delete")
_PURGE: Final = Script.named("jobs_purge")

_LONG: Final = 3600.0
_FULL: Final = "used memory > 'maxmemory'"
"""What a server says when it has no memory for more."""
_CURSORS: Final = {
    JobState.READY: re.compile(r"\d{37}[01].+", re.DOTALL | re.ASCII),
    JobState.IN_FLIGHT: re.compile(r"\d{1,15}", re.ASCII),
    JobState.SUCCEEDED: re.compile(r"\d{15}.+", re.DOTALL | re.ASCII),
    JobState.FAILED: re.compile(r"\d{15}.+", re.DOTALL | re.ASCII),
}


class RedisStore(SharesHeartbeats, Opened):
    """Keeps jobs in Redis, where they are as safe as the server's own persistence makes them.

    ``client`` is a URL, an address or a ``redis.asyncio`` client, of which only the settings are used. Stores of
    different ``namespace`` on one server know nothing of each other. In a Cluster each queue lies on one node.

    A claim lets at most 500 leases run out and 1,000 delayed jobs fall due; where more had to, it says that there is
    more at once. Belongs to the event loop on which it was used first: :meth:`clone` makes one for another.
    """

    @takes(RedisStoreOptions)
    def __init__(self, client: AddressLike, **options: Unpack[RedisStoreKeywords]) -> None:
        taken = RedisStoreOptions(**options)
        self._address = Address.of(client)
        self._namespace = taken.namespace or ""
        self._clock = taken.clock
        self._link = Connections(self._address)
        self._keys: dict[str, list[str]] = {}
        self._watches: dict[str, Watch] = {}
        self._gathering = Gathering(self._add)
        self._has_looked = False
        self._named = (forks(), nonce())
        self.heartbeats = HeartbeatStore(self)

    @classmethod
    @takes(RedisStoreOptions)
    def connect(cls, url: str, **options: Unpack[RedisStoreKeywords]) -> Self:
        """A store at ``url``; the first call connects."""
        return cls(url, **options)

    @property
    def clock(self) -> Clock:
        """Moves time in tests."""
        return self._clock

    async def open(self) -> None:
        """Make sure that the server answers; warn, once, if it would lose all jobs when it ends."""
        key = JobKeys("any", self._namespace).jobs
        commands = [pack("PING"), pack("CONFIG", "GET", "appendonly"), pack("CONFIG", "GET", "save")]
        pong, *settings = await self._link.call_many(key, commands[:1] if self._has_looked else commands)
        if isinstance(pong, Exception):
            self._link.refuse(key, pong)
        if not self._has_looked and settings == [[b"appendonly", b"no"], [b"save", b""]]:
            _log.warning("the Redis at %s persists nothing: when it ends, all jobs are lost", self._address)
        self._has_looked = True

    async def aclose(self) -> None:
        """Close all connections; calls that still wait get a ``QueueError``.

        A call that is cancelled closes them all the same. Takes a second at most.
        """
        await to_its_end(self._close(), "close", MOMENT)

    async def _close(self) -> None:
        here = [watch for watch in self._watches.values() if watch.loop is asyncio.get_running_loop()]
        try:
            await asyncio.gather(self._gathering.aclose(), *(watch.aclose() for watch in here))
        finally:  # also when there is no time left
            self._watches.clear()
            await self._link.aclose()

    def clone(self) -> RedisStore:
        """The same store over connections of its own."""
        store = RedisStore(self._address, namespace=self._namespace, clock=self._clock)
        store._has_looked = self._has_looked
        return store

    # --- the life of a job ------------------------------------------------------------------------------------

    def apart(self) -> RedisStore:
        """The former name of :meth:`clone`."""
        return self.clone()

    async def add(self, queue: str, jobs: Sequence[NewJob], connection: Any = None) -> None:
        """Add all of ``jobs`` or none, in one round trip; single ones of callers at the same time share it."""
        if connection is not None:
            raise ConfigError("a RedisStore cannot write in a transaction of yours: connection must be None")
        if len(jobs) == 1:
            await self._gathering.add(queue, jobs[0])
        elif jobs:
            await self._add(queue, jobs)

    async def _add(self, queue: str, jobs: Sequence[NewJob]) -> None:
        ids = [job.id for job in jobs]
        if len(set(ids)) < len(ids):
            raise DuplicateJobError(queue, await self._taken(queue, ids))
        taken = await self._run(queue, _ADD, self._clock.offset_ms, len(ids), *added(jobs))
        if taken:
            raise DuplicateJobError(queue, [id.decode() for id in taken])

    async def _taken(self, queue: str, ids: Sequence[str]) -> list[str]:
        """Which IDs are given twice or there already, in the order given."""
        given = Counter(ids)
        known = await self._known(queue, list(given))
        pairs = zip(given.items(), known, strict=True)
        return [id for (id, times), job in pairs if times > 1 or job is not None]

    async def claim(self, queue: str, wanted: Wanted) -> Claimed:
        """Give up leases that have run out, then lease what is wanted, in one round trip.

        What is in line but is no job, because something else wrote there, is taken out of line and logged.
        """
        wanted = wanted.bounded()
        shares = (wanted.count, wanted.retries, wanted.oldest, MOST_BYTES)
        claim = Claim(queue, wanted.worker, wanted.ttl_ms, wanted.claim_id or nonce())
        words = (HISTORY, EXPIRED, wanted.worker, claim.id, wanted.ttl_ms, wanted.max_retries, *shares)
        reply = await self._asked_for_jobs(queue, wanted, words)
        now, token, next_ms, mark, expired, broken, claimed = reply
        for id in broken:
            _log.error("job %r of queue %r cannot be read and is left out", id.decode(errors="replace"), queue)
        jobs: list[Job] = []
        for _, job in claimed_jobs(claim, int(now), token, claimed):
            if isinstance(job, Job):
                jobs.append(job)
            else:
                _log.error("%s", job)
        pairs = zip(expired[::2], expired[1::2], strict=True)
        return Claimed(
            jobs,
            [Expired(id.decode(), has_failed == 1) for id, has_failed in pairs],
            None if next_ms < 0 else next_ms,
            mark.decode(),
        )

    async def _asked_for_jobs(self, queue: str, wanted: Wanted, words: Sequence[str | bytes | int]) -> Reply:
        """The reply to a claim, whose caller is known to the server as waiting if it says that it will."""
        watch = self._watch(queue) if wanted.waits else self._watches.get(queue)
        is_shared = False
        if watch is not None:
            is_shared = watch.is_awaited
            watch.settle()
        about = (self._name(), int(wanted.waits), int(is_shared))
        try:
            reply = await self._run(queue, _CLAIM, self._clock.offset_ms, *words, *about)
        except asyncio.CancelledError:
            if watch is not None:
                watch.owe()
            raise
        if wanted.waits and watch is not None and reply[3] != NOW.encode():
            watch.owe()
        return reply

    async def leased(self, queue: str, claim_ids: Sequence[str], left_ms: int) -> list[Lease]:
        """What these claims have leased."""
        rows = await self._run(queue, _LEASED, self._clock.offset_ms, left_ms, *claim_ids)
        found: list[Lease] = []
        for id, token in rows:
            number, _, claim_id = token.decode().partition(".")
            found.append(Lease(id.decode(), int(number), claim_id))
        return found

    async def renew(self, queue: str, leases: Sequence[Lease], ttl_ms: int) -> list[bool]:
        """Extend leases; false for each that is stale."""
        renewed: list[bool] = []
        for some in chunks(leases, lambda _: 0):
            words = [word for lease in some for word in (lease.job_id, token_of(lease))]
            reply = await self._run(queue, _RENEW, self._clock.offset_ms, ttl_ms, *words)
            renewed += [done == 1 for done in reply]
        return renewed

    async def settle(self, queue: str, settlements: Sequence[Settlement]) -> list[bool]:
        """Apply each settlement; false for each that is stale."""
        applied: list[bool] = []
        for some in chunks(settlements, Settlement.size, Settlement.words):
            reply = await self._run(queue, _SETTLE, self._clock.offset_ms, HISTORY, *settled(some))
            applied += [done == 1 for done in reply]
        return applied

    async def replay(self, queue: str, id: str) -> Job | None:
        """Make a failed job ready again."""
        return self._changed(queue, id, "replay", await self._run(queue, _REPLAY, self._clock.offset_ms, id))

    async def cancel(self, queue: str, id: str) -> Job | None:
        """Fail a job that is not finished."""
        words = (self._clock.offset_ms, HISTORY, CANCELLED, id)
        return self._changed(queue, id, None, await self._run(queue, _CANCEL, *words))

    async def delete(self, queue: str, id: str) -> Job | None:
        """Remove a finished job."""
        return self._changed(queue, id, "delete", await self._run(queue, _DELETE, id))

    async def purge(self, queue: str, state: JobState, keep: JobRetention) -> int:
        """Remove finished jobs that are not to be kept."""
        if state not in (JobState.SUCCEEDED, JobState.FAILED):
            return 0
        age = "" if keep.age is None else f"{keep.age * 1000:.3f}"
        count = "" if keep.count is None else keep.count
        return int(await self._run(queue, _PURGE, self._clock.offset_ms, LETTERS[state], age, count))

    # --- looking ----------------------------------------------------------------------------------------------

    async def find(self, queue: str, ids: Sequence[str]) -> list[Job | None]:
        """The jobs of these IDs; ``QueueError`` if one of them is there but cannot be read."""
        return [_readable(job) for job in await self._known(queue, ids)]

    async def _known(self, queue: str, ids: Sequence[str]) -> list[Job | QueueError | None]:
        """As many at a time as the server gives."""
        found: list[Job | QueueError | None] = []
        while len(found) < len(ids):
            some = ids[len(found) : len(found) + MOST]
            reply = await self._run(queue, _FIND, *some)
            found += known_jobs(queue, some[: len(reply[0])], reply)
        return found

    async def counts(self, queue: str) -> Mapping[JobState, int]:
        """How many jobs are in each state."""
        numbers = await self._run(queue, _COUNT)
        return dict(zip(LETTERS, map(int, numbers), strict=True))

    async def page(self, queue: str, state: JobState, count: int, cursor: str | None) -> JobPage:
        """Jobs in ``state``: ready ones in claim order, those in flight as enqueued, finished ones as they finished.

        A thousand at most, and fewer if they are large. What cannot be read is left out and logged.
        """
        if cursor is not None and not (isinstance(cursor, str) and _CURSORS[state].fullmatch(cursor)):
            raise ConfigError(f"cursor must be one that a page gave, not {cursor!r}")
        after, raw_ids, *known = await self._run(queue, _PAGE, LETTERS[state], min(count, MOST), cursor or "")
        jobs: list[Job] = []
        for job in known_jobs(queue, [id.decode() for id in raw_ids], known):
            if isinstance(job, Job):
                jobs.append(job)
            elif job is not None:
                _log.error("%s", job)
        return JobPage(jobs, after.decode() or None)

    # --- waiting ----------------------------------------------------------------------------------------------

    async def news(self, queue: str, mark: str, seconds: float) -> None:
        """Return once something may be claimable, or after ``seconds``; ``QueueError`` if the server fails meanwhile.

        All who wait for a queue in this store share one connection.
        """
        watch = self._watch(queue)
        waiter = await watch.listen(mark)
        if waiter is None:
            return
        try:
            await self._clock.wait(waiter.event, seconds)
            waiter.check()
        finally:
            watch.leave(waiter)

    async def finished(self, queue: str, id: str, seconds: float | None) -> Job | None:
        """The job once it is finished; ``QueueError`` if the server fails meanwhile."""
        deadline = None if seconds is None else self._clock.monotonic() + seconds
        watch = self._watch(queue)
        waiter = await watch.expect(id)
        try:
            while True:
                waiter.event.clear()
                [job] = await self.find(queue, [id])
                left = _LONG if deadline is None else deadline - self._clock.monotonic()
                waiter.check()
                if job is None or job.is_finished or left <= 0:
                    return job if job is not None and job.is_finished else None
                await self._clock.wait(waiter.event, min(left, _LONG))
        finally:
            watch.leave(waiter, id)

    # --- the server -------------------------------------------------------------------------------------------

    async def _run(self, queue: str, script: Script, *words: str | bytes | int) -> Reply:
        keys = self._keys.get(queue)
        if keys is None:
            keys = self._keys[queue] = JobKeys(queue, self._namespace).all()
        try:
            return await run(self._link, keys[0], script(keys, *words))
        except QueueError as error:
            if _FULL in str(error):
                raise QueueError(f"queue {queue!r}: the server's memory is full: {error}") from error.__cause__
            raise

    def _changed(self, queue: str, id: str, event: Event | None, reply: Reply) -> Job | None:
        is_done, *known = reply
        [found] = known_jobs(queue, [id], known)
        job = _readable(found)
        if job is not None and event is not None and not is_done:
            job.check(event)
        return job

    def _watch(self, queue: str) -> Watch:
        watch = self._watches.get(queue)
        if watch is None or watch.is_over or watch.loop is not asyncio.get_running_loop():
            keys = JobKeys(queue, self._namespace)
            watch = Watch(self._link, keys, self._name(), lambda: self._clock.offset_ms, self._forget)
            self._watches[queue] = watch
        return watch

    def _name(self) -> str:
        """By which the server knows this store in this process."""
        if self._named[0] != forks():
            self._named = (forks(), nonce())
        return self._named[1]

    def _forget(self, watch: Watch) -> None:
        self._watches = {queue: one for queue, one in self._watches.items() if one is not watch}


def _readable(found: Job | QueueError | None) -> Job | None:
    if isinstance(found, QueueError):
        raise found
    return found
