"""What the tests of pauses share: consumers that run in the test's own process, and note what others note, too."""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

from conquiet import Backoff, Broker, RetryPolicy, StreamLease, SubscribeOptions, Subscription
from tests.rigs.waiting import LONG, eventually
from tests.system.jobs_log import now
from tests.system.topics_crew import GROUP, TOPIC, Team
from tests.system.topics_log import Pen
from tests.system.topics_process import Work

__all__ = ["Streams", "consumer_here", "stays"]


def consumer_here(broker: Broker, team: Team, name: str, lease: float, mode: str, gate: Path) -> Subscription:
    """A consumer that is not entered; it does as messages say, and no handler of it ends before there is a gate."""
    how = Namespace(work=0.0, gate=str(gate), heed=True, fail=0)
    work = Work(how, Pen(str(team.log.path), name), now)
    retry = RetryPolicy(max_retries=3, backoff=Backoff(base=0.02, cap=0.2), mode=cast("Any", mode))
    options = SubscribeOptions(
        lease_ttl=lease, retry=retry, consumer=name, poll_timeout=0.2, handle_signals=False, drain_timeout=LONG
    )
    consumer = broker.subscribe(TOPIC, group=GROUP, handler=work.handle, options=options)
    work.owner = consumer.consumer
    return consumer


class Streams:
    """Handlers of streams, of several consumers, that remember who was at work when."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, str, int]] = []
        """Consumer, stream and epoch of each call."""
        self.at_work: dict[str, set[str]] = {}
        """Who is at work on each stream now."""
        self.together: list[tuple[str, str, str]] = []
        """Streams on which somebody began while another was at work."""
        self.done: set[str] = set()
        """Streams whose handlers return."""
        self.finished: list[str] = []

    def of(self, name: str) -> Callable[[str, StreamLease], Awaitable[None]]:
        """The handler of one consumer."""

        async def handle(stream: str, lease: StreamLease) -> None:
            at_work = self.at_work.setdefault(stream, set())
            self.together += [(stream, name, other) for other in at_work]
            self.begun.append((name, stream, lease.epoch))
            at_work.add(name)
            try:
                while stream not in self.done:  # noqa: ASYNC110 - the test decides
                    await asyncio.sleep(0.01)
                self.finished.append(stream)
            finally:
                at_work.discard(name)

        return handle

    def owners(self) -> dict[str, str]:
        """Who is at work on which stream."""
        return {stream: next(iter(names)) for stream, names in self.at_work.items() if names}


async def stays(look: Callable[[], Awaitable[Any]], seconds: float, what: str) -> None:
    """Fail if what ``look`` gives changes within ``seconds``."""
    until, first = time.monotonic() + seconds, await look()

    async def is_over() -> bool:
        found = await look()
        assert found == first, f"{what}: {found}, and {first} before"
        return time.monotonic() >= until

    await eventually(is_over, what, seconds + LONG)
