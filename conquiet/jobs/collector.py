"""Gauges of the jobs in a queue, which the store is asked for at each scrape."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from conquiet.errors import ConfigError
from conquiet.jobs.store import JobStore
from conquiet.kit import rules
from conquiet.kit.loopthread import result_from_private_loop
from conquiet.metrics import JobGauges, JobsCollector

__all__ = ["Collector"]

_PATIENCE: Final = 5.0


class Collector(JobsCollector):
    """Shows how many jobs of ``queues`` are in each state, at each scrape, until ``close``.

    Asks the store over connections of its own; ``store`` itself stays the caller's and need not be open. Gives up
    after a few seconds: a scrape that waits for a store shows nothing else either.
    """

    def __init__(self, store: JobStore, queues: Sequence[str]) -> None:
        if isinstance(queues, str):
            raise ConfigError(f"queues must be a sequence of names, not {queues!r}")
        self._queues = [rules.name("queue", queue) for queue in queues]
        self._store = store.clone()
        self._opening = asyncio.Lock()  # scrapes may overlap
        self._is_open = False
        super().__init__(lambda: result_from_private_loop(self._read(), _PATIENCE))

    def close(self) -> None:
        """Show nothing more, and close the connections. May be called again."""
        super().close()
        result_from_private_loop(self._store.aclose(), _PATIENCE)

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
