"""Measuring works side by side: several rounds in turn, the median of each."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

ROUNDS = 5

Work = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Measured:
    rate: float
    cpu_us: float


async def measure(count: int, works: Mapping[str, Work], rounds: int = ROUNDS) -> dict[str, Measured]:
    """Each work handles ``count`` messages a round; in turn, so that a noisy minute hits all of them alike."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            wall, cpu = time.perf_counter(), time.process_time()
            await work()
            taken[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {
        name: Measured(
            count / statistics.median(wall for wall, _ in times),
            statistics.median(cpu for _, cpu in times) / count * 1e6,
        )
        for name, times in taken.items()
    }


def pin(server: int, *, together: bool) -> None:
    """Give this process a core, and the server another or, for single round trips, the same one.

    Otherwise the scheduler's choice of cores, which changes from second to second, is the largest number here.
    """
    cores = sorted(os.sched_getaffinity(server) | os.sched_getaffinity(0))
    if len(os.sched_getaffinity(0)) == 1:
        cores = sorted(set(range(os.cpu_count() or 1)))
    os.sched_setaffinity(0, {cores[0]})
    os.sched_setaffinity(server, {cores[0] if together else cores[-1]})
