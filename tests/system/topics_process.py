"""A consumer of a topic in a process of its own, which notes what it does; ends with code 0 on SIGTERM.

Without further options every message is handled with success, after ``--work`` seconds. ``--fail N`` fails each one N
times. With ``--heed`` a message decides for itself: its payload's ``do`` is ``done``, ``fail`` (the first time),
``reject`` or ``exit``. With ``--gate`` nothing ends before that file exists.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from urllib.parse import urlsplit

from prometheus_client import REGISTRY

from conquiet import Backoff, Broker, Message, Reject, RetryPolicy, SubscribeOptions, Subscription
from conquiet.kit.clock import Clock
from tests.system.topics_log import Pen, Record

_FROZEN = 1.0
"""Seconds between two looks at the clock from which on the process was stopped: it looks several times a second."""


class ServerTime:
    """``TIME`` of a server, asked for without giving up the loop: a handler's first line must be its first act."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname or "", parts.port or 0))
        self._replies = self._socket.makefile("rb")

    def close(self) -> None:
        self._replies.close()
        self._socket.close()

    def __call__(self) -> int:
        self._socket.sendall(b"*1\r\n$4\r\nTIME\r\n")
        _, _, seconds, _, micros = (self._replies.readline() for _ in range(5))
        return int(seconds) * 1_000_000 + int(micros)


class SuspendedClock(Clock):
    """The clock of a machine that sleeps while the process is stopped, so that no deadline seems to have passed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._frozen = 0.0
        self._looked = time.monotonic()

    def monotonic(self) -> float:
        with self._lock:
            now = time.monotonic()
            if now - self._looked > _FROZEN:
                self._frozen += now - self._looked
            self._looked = now
            return now - self._frozen

    async def sleep(self, seconds: float) -> None:
        await self.wait(asyncio.Event(), seconds)

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        deadline = self.monotonic() + seconds
        while not event.is_set() and (left := deadline - self.monotonic()) > 0:
            await super().wait(event, left)
        return event.is_set()


class Work:
    """The handler."""

    def __init__(self, arguments: argparse.Namespace, pen: Pen, now: Callable[[], int]) -> None:
        self._arguments = arguments
        self._pen = pen
        self._now = now
        self.owner = ""

    async def handle(self, message: Message) -> None:
        start = self._now()
        seq = int(message.payload["seq"])
        record = Record(
            self.owner,
            message.partition,
            message.epoch,
            message.id,
            message.key or "-",
            seq,
            message.retry_count,
            start,
        )
        token = self._pen.begin(record)
        try:
            await self._work(message)
        except asyncio.CancelledError:
            raise
        except Exception:
            self._pen.end(token, "failed", self._now())
            raise
        self._pen.end(token, "done", self._now())

    async def _work(self, message: Message) -> None:
        arguments = self._arguments
        if arguments.work:
            await asyncio.sleep(random.random() * 2 * arguments.work)
        while arguments.gate and not os.path.exists(arguments.gate):  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.005)
        do = message.payload.get("do", "done") if arguments.heed else "done"
        if do == "exit":
            os._exit(3)
        if do == "reject":
            raise Reject("as it was asked to")
        if message.retry_count < arguments.fail or (do == "fail" and message.retry_count == 0):
            raise RuntimeError("as it was asked to")


async def watch(subscription: Subscription, topic: str, pen: Pen, now: Callable[[], int]) -> None:
    """Note each change of what is owned."""
    before: tuple[int, ...] | None = None
    while True:
        owned = subscription.owned.get(topic, ())
        if owned != before:
            pen.note("owned", now(), owned)
            before = owned
        await asyncio.sleep(0.005)


def refusals() -> dict[str, float]:
    """What was refused to this process, by operation."""
    found: Counter[str] = Counter()
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name == "conquiet_topics_fenced_total":
                found[sample.labels["operation"]] += int(sample.value)
    return dict(found)


async def consume(arguments: argparse.Namespace, pen: Pen, now: Callable[[], int]) -> None:
    options = SubscribeOptions(
        lease_ttl=arguments.lease_ttl,
        max_inflight=arguments.max_inflight,
        retry=RetryPolicy(max_retries=3, backoff=Backoff(base=0.02, cap=0.2), mode=arguments.retry),
        consumer=arguments.name,
    )
    clock = SuspendedClock() if arguments.suspended else Clock()
    work = Work(arguments, pen, now)
    async with Broker.connect(arguments.url, namespace=arguments.namespace, clock=clock) as broker:
        subscription = broker.subscribe(arguments.topic, group=arguments.group, handler=work.handle, options=options)
        work.owner = subscription.consumer
        async with subscription:
            watching = asyncio.create_task(watch(subscription, arguments.topic, pen, now))
            pen.note("ready", now(), subscription.consumer)
            await subscription.wait()
        watching.cancel()
    pen.note("refused", now(), refusals())


def arguments_of(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for required in ("url", "clock-url", "namespace", "topic", "group", "name", "log"):
        parser.add_argument(f"--{required}", required=True)
    parser.add_argument("--lease-ttl", type=float, default=2.0)
    parser.add_argument("--max-inflight", type=int, default=20)
    parser.add_argument("--work", type=float, default=0.0)
    parser.add_argument("--fail", type=int, default=0)
    parser.add_argument("--retry", choices=["park", "requeue"], default="park")
    parser.add_argument("--heed", action="store_true")
    parser.add_argument("--gate", default="")
    parser.add_argument("--suspended", action="store_true", help="live by a clock that stands while it is stopped")
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
