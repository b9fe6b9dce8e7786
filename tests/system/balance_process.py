"""A consumer of balanced streams in a process of its own, which notes what it is told; ends with code 0 on SIGTERM.

Every ``--pace`` seconds it notes which streams it knows to be its own. When the file ``--gate`` appears, it tries to
write through every lease that it ever had. ``--suspended`` makes it live by a clock that stands while it is stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from conquiet import StreamAdded, StreamBalancer, StreamDisowned, StreamExpired, StreamLease, StreamNotOwnedError
from conquiet.kit.clock import Clock
from tests.system.balance_log import Pen
from tests.system.topics_process import ServerTime, SuspendedClock


class Consumer:
    """What one process does with its streams."""

    def __init__(self, balancer: StreamBalancer, pen: Pen, now: Callable[[], int]) -> None:
        self._balancer = balancer
        self._pen = pen
        self._now = now
        self._leases: list[StreamLease] = []

    async def consume(self) -> None:
        async for event in self._balancer.events():
            if isinstance(event, StreamAdded):
                if (lease := self._balancer.owned.get(event.stream)) is not None:
                    self._leases.append(lease)
                self._pen.note("added", self._now(), event.stream, event.epoch)
            elif isinstance(event, StreamDisowned):
                self._pen.note("disowned", self._now(), event.stream, event.epoch, event.reason)
            elif isinstance(event, StreamExpired):
                self._pen.note("expired", self._now(), event.stream, event.epoch, event.owner)
            else:
                self._pen.note("terminated", self._now(), detail=event.reason)

    async def act(self, pace: float) -> None:
        """Note what it owns. Owned after the time was asked for is owned at that time."""
        while True:
            at = self._now()
            acts = {stream: lease.epoch for stream, lease in self._balancer.owned.items() if lease.owned}
            self._pen.note("acts", at, detail=acts)
            await asyncio.sleep(pace)

    async def write(self, gate: Path) -> None:
        """Once the gate is there, try to move the position of every stream, and to finish it."""
        while not gate.exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.005)
        for lease in list(self._leases):
            await self._try("commit", lease)
        for lease in list(self._leases):
            await self._try("done", lease)

    async def _try(self, verb: str, lease: StreamLease) -> None:
        try:
            if verb == "commit":
                await lease.commit("999-0")
            else:
                await self._balancer.done_stream(lease.stream)
            outcome = "accepted"
        except StreamNotOwnedError:
            outcome = "refused"
        self._pen.note(outcome, self._now(), lease.stream, lease.epoch, verb)


async def consume(arguments: argparse.Namespace, pen: Pen, now: Callable[[], int]) -> None:
    async with StreamBalancer.connect(
        arguments.url,
        service=arguments.service,
        consumer=arguments.name,
        lease_ttl=arguments.lease_ttl,
        max_streams=arguments.max_streams,
        sweep_interval=arguments.sweep_interval,
        auto_claim=True,
        rebalance=arguments.share,
        clock=SuspendedClock() if arguments.suspended else Clock(),
    ) as balancer:
        consumer = Consumer(balancer, pen, now)
        beside = [asyncio.create_task(consumer.act(arguments.pace))] if arguments.pace else []
        if arguments.gate:
            beside.append(asyncio.create_task(consumer.write(Path(arguments.gate))))
        pen.note("ready", now(), detail=balancer.consumer)
        await consumer.consume()
        for task in beside:
            task.cancel()


def arguments_of(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for required in ("url", "clock-url", "service", "name", "log"):
        parser.add_argument(f"--{required}", required=True)
    parser.add_argument("--lease-ttl", type=float, default=2.0)
    parser.add_argument("--sweep-interval", type=float, default=None)
    parser.add_argument("--max-streams", type=int, default=1000)
    parser.add_argument("--pace", type=float, default=0.05)
    parser.add_argument("--gate", default="")
    parser.add_argument("--share", action="store_true", help="give away what is more than its share")
    parser.add_argument("--suspended", action="store_true")
    return parser.parse_args(words)


def main() -> None:
    arguments = arguments_of(sys.argv[1:])
    logging.basicConfig(level=logging.ERROR)
    pen = Pen(arguments.log, arguments.name)
    with closing(ServerTime(arguments.clock_url)) as now:
        asyncio.run(consume(arguments, pen, now))
        pen.note("ended", now())


if __name__ == "__main__":
    main()
