"""What only the store knows of the jobs in a queue, collected when somebody scrapes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from conquiet.errors import ConfigError
from conquiet.jobs.store import JobStore
from conquiet.kit import rules
from conquiet.kit.loopthread import PRIVATE_LOOP
from conquiet.metrics import JobGauges, JobsCollector

__all__ = ["Collector"]

_PATIENCE: Final = 5.0


class Collector(JobsCollector):
    """Shows how many jobs of ``queues`` are in each state, at each scrape, until ``close``.

    Asks the store over connections of its own; ``store`` itself stays the caller's and need not be open.
    """

    def __init__(self, store: JobStore, queues: Sequence[str]) -> None:
        if isinstance(queues, str):
            raise ConfigError(f"queues must be a sequence of names, not {queues!r}")
        self._observation = _Observation(store, [rules.name("queue", queue) for queue in queues])
        super().__init__(self._observation.read)

    def close(self) -> None:
        """Show nothing more, and close the connections. May be called again."""
        super().close()
        self._observation.close()


class _Observation:
    """Counts jobs, and gives up after a few seconds: a scrape that waits for a store shows nothing else either."""

    def __init__(self, store: JobStore, queues: Sequence[str]) -> None:
        self._store = store.apart()
        self._queues = queues
        self._opening = asyncio.Lock()  # scrapes may overlap
        self._is_open = False

    def read(self) -> Sequence[JobGauges]:
        """Everything there is to tell now; called from the thread that scrapes."""
        work = asyncio.run_coroutine_threadsafe(self._read(), PRIVATE_LOOP.loop())
        try:
            return work.result(_PATIENCE)
        finally:
            work.cancel()

    def close(self) -> None:
        """Close its connections."""
        asyncio.run_coroutine_threadsafe(self._store.aclose(), PRIVATE_LOOP.loop()).result(_PATIENCE)

    async def _read(self) -> list[JobGauges]:
        await self._open()
        return [
            JobGauges(queue, state, count)
            for queue in self._queues
            for state, count in (await self._store.counts(queue)).items()
        ]

    async def _open(self) -> None:
        async with self._opening:
            if not self._is_open:
                await self._store.open()
                self._is_open = True
