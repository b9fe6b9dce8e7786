"""Claims whose answer was lost: the jobs that the store may have leased by them are given back."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from conquiet.errors import ConfigError
from conquiet.jobs.job import Settlement
from conquiet.jobs.store import JobStore
from conquiet.kit.recent import Recent

__all__ = ["Unanswered"]

_log = logging.getLogger("conquiet.jobs")
_LOOKS: Final = 2
"""A claim whose connection broke may reach the store after the next call: a second look follows."""
_MOST: Final = 100
"""How many claims are remembered; of those before them the leases run out."""
_SLACK_MS: Final = 1000
"""By how much the store's clock may have gone another way than ours since the claim."""


@dataclass(slots=True)
class _Doubt:
    asked: float
    due: float
    looks: int = _LOOKS


class Unanswered:
    """Every claim is made within :meth:`asking`.

    What was leased by a claim that failed is looked for, by the claim's own ID, before the next one, and a second time
    as long after that as a heartbeat takes.

    The jobs are released then: they are claimable at once, and it has cost them nothing. Without a failure nothing is
    looked for.
    """

    def __init__(self, store: JobStore, queue: str, ttl: float) -> None:
        self._store = store
        self._queue = queue
        self._ttl = ttl
        self._doubts: Recent[str, _Doubt] = Recent(_MOST)

    @property
    def pause(self) -> float:
        """Seconds until the next look."""
        if not self._doubts:
            return math.inf
        return max(0.0, min(doubt.due for doubt in self._doubts.values()) - self._store.clock.monotonic())

    @contextmanager
    def asking(self, claim_id: str) -> Generator[None]:
        """Claim under that ID within the block."""
        asked = self._store.clock.monotonic()
        try:
            yield
        except ConfigError:
            raise  # nothing was sent, or the store has said that it did nothing
        except BaseException:
            self.doubt([claim_id], asked)
            raise

    def doubt(self, claim_ids: Iterable[str], asked: float) -> None:
        """No worker holds what these claims may have leased; the first was asked for at local time ``asked``."""
        for id in claim_ids:
            self._doubts.keep(id, _Doubt(asked, -math.inf))

    async def give_back(self) -> None:
        """Look, if it is time to, and release what is found."""
        if not self._doubts:
            return
        now = self._store.clock.monotonic()
        due = {id: doubt for id, doubt in self._doubts.items() if doubt.due <= now}
        live = {id: doubt.asked for id, doubt in due.items() if now - doubt.asked < self._ttl}  # the others ran out
        if live:
            left = round((self._ttl - (now - min(live.values()))) * 1000) - _SLACK_MS
            leases = await self._store.leased(self._queue, list(live), left)
            if leases:
                _log.warning("queue %r: %d jobs of a claim without an answer are given back", self._queue, len(leases))
                given = [Settlement(one.job_id, one.token, "release", claim_id=one.claim_id) for one in leases]
                await self._store.settle(self._queue, given)
        for id, doubt in due.items():
            doubt.looks -= 1
            doubt.due = now + self._ttl / 3
            if (doubt.looks <= 0 or id not in live) and self._doubts.get(id) is doubt:
                del self._doubts[id]
