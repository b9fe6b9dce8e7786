"""Consumers of one topic as processes, to be stopped, killed and told to leave."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

from conquiet import Broker, Outgoing, QueueError
from conquiet.wire.keys import Keys
from tests.rigs.asking import ask, nodes_of
from tests.rigs.waiting import LONG, eventually
from tests.system.topics_log import Disturbance, Log

__all__ = ["GROUP", "TOPIC", "Producer", "Source", "Team", "numbered"]

TOPIC: Final = "orders"
GROUP: Final = "billing"
_ROOT: Final = Path(__file__).parents[2]


def numbered(count: int, keys: int, *, first: int = 0, do: str = "done") -> list[Outgoing]:
    """Messages with a number each; those of a key are in the order of their numbers."""
    return [Outgoing({"seq": seq, "do": do}, key=f"k{seq % keys}") for seq in range(first, first + count)]


class Team:
    """Consumer processes with one log; the broker is the test's own."""

    def __init__(self, url: str, log: Path, clock_url: str | None, namespace: str | None, group: str) -> None:
        self.url = url
        self.group = group
        self.namespace = namespace or f"t{secrets.token_hex(6)}"
        self.keys = Keys(self.namespace)
        self.log = Log(log)
        self.disturbances: list[Disturbance] = []
        self._clock_url = nodes_of(clock_url or url)[0]  # all nodes have one clock here
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @classmethod
    @contextmanager
    def hired(
        cls,
        url: str,
        directory: Path,
        clock_url: str | None = None,
        namespace: str | None = None,
        group: str = GROUP,
    ) -> Iterator[Team]:
        """A team of which nobody outlives the block."""
        team = cls(url, directory / f"log-{group}", clock_url, namespace, group)
        try:
            yield team
        finally:
            for process in team._processes.values():
                process.kill()
                process.wait()

    def broker(self) -> Broker:
        return Broker.connect(self.url, namespace=self.namespace)

    # --- the processes ------------------------------------------------------------------------------------------

    def launch(self, name: str, *more: str, url: str | None = None) -> None:
        """Start one without waiting for it; a name may be used again after its process has ended."""
        words = ["--url", url or self.url, "--clock-url", self._clock_url, "--namespace", self.namespace]
        words += ["--topic", TOPIC, "--group", self.group, "--name", name, "--log", str(self.log.path), *more]
        self._processes[name] = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.system.topics_process", *words],
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
            cwd=_ROOT,
        )

    async def start(self, name: str, *more: str, url: str | None = None) -> str:
        """Start one; the name that it has in Redis, once it is a member."""
        before = len(self.log.noted(name, "ready"))
        self.launch(name, *more, url=url)
        await eventually(
            lambda: len(self.log.noted(name, "ready")) > before or self.code(name) is not None, f"{name} is ready"
        )
        assert self.code(name) is None
        return self.owner(name)

    def owner(self, name: str) -> str:
        """The name in Redis of the last process that was started under ``name``."""
        return str(self.log.noted(name, "ready")[-1].detail)

    def signal(self, name: str, number: int) -> None:
        self._processes[name].send_signal(number)

    def code(self, name: str) -> int | None:
        """The exit code, or ``None`` while it runs."""
        return self._processes[name].poll()

    async def ended(self, name: str) -> int:
        """The exit code, once there is one."""
        await eventually(lambda: self.code(name) is not None, f"{name} has ended")
        code = self.code(name)
        assert code is not None
        return code

    async def freeze(self, name: str) -> int:
        """Stop one; the server's time after which it did nothing more."""
        self.signal(name, signal.SIGSTOP)
        process = psutil.Process(self._processes[name].pid)
        await eventually(lambda: process.status() == psutil.STATUS_STOPPED, f"{name} stands still")
        return await self.now()

    async def kill(self, name: str) -> Disturbance:
        """kill -9; noted with what it held."""
        at = await self.freeze(name)  # so that what it holds can be counted
        found = Disturbance("kill", self.owner(name), at, await self.held(self.owner(name)))
        self.signal(name, signal.SIGKILL)
        self.disturbances.append(found)
        await self.ended(name)
        return found

    async def stop(self, name: str) -> Disturbance:
        """SIGSTOP, to be continued after its leases; noted with what it held."""
        at = await self.freeze(name)
        found = Disturbance("stop", self.owner(name), at, await self.held(self.owner(name)))
        self.disturbances.append(found)
        return found

    async def dismiss(self, *names: str) -> None:
        """SIGTERM; returns when they have ended, as they should."""
        for name in names:
            self.signal(name, signal.SIGTERM)
        for name in names:
            assert await self.ended(name) == 0
            assert self.log.noted(name, "ended")

    # --- what the server knows -------------------------------------------------------------------------------------

    async def now(self) -> int:
        """The server's time in microseconds."""
        seconds, micros = await ask(self._clock_url, "TIME")
        return int(seconds) * 1_000_000 + int(micros)

    async def partitions(self) -> Sequence[str]:
        count = await ask(self.url, "SCARD", self.keys.partitions(TOPIC))
        return [self.keys.partition(TOPIC, index) for index in range(count)]

    async def held(self, owner: str) -> frozenset[tuple[int, str]]:
        """The entries that are pending for one consumer."""
        found: set[tuple[int, str]] = set()
        for index, stream in enumerate(await self.partitions()):
            rows = await ask(self.url, "XPENDING", stream, self.group, "-", "+", 10_000, owner, parse_detail=True)
            found.update((index, row["message_id"]) for row in rows)
        return frozenset(found)

    async def owners(self) -> list[str]:
        """Who holds the lease of each partition, by configured name; empty for nobody."""
        leases = [self.keys.lease(stream, self.group) for stream in await self.partitions()]
        found = [await ask(self.url, "HGET", lease, "owner") for lease in leases]
        return [(owner or "").partition("#")[0] for owner in found]

    async def owns_all(self, name: str) -> None:
        """Return once one consumer has every partition."""

        async def has_all() -> bool:
            return set(await self.owners()) == {name}

        await eventually(has_all, f"{name} owns every partition")

    async def all_is_done(self, broker: Broker, sent: set[tuple[str, int]], seconds: float = LONG) -> None:
        """Return once everything was handled with success and acknowledged."""

        async def is_done() -> bool:
            if not self.log.done() >= sent:
                return False
            info = await broker.admin.describe_group(TOPIC, self.group)
            return (info.lag, info.pending) == (0, 0)

        await eventually(is_done, "everything is handled and acknowledged", seconds)


class Source:
    """Sends numbered messages, about as fast as they are handled."""

    def __init__(self, team: Team, broker: Broker, keys: int = 50, fail_every: int = 0) -> None:
        self._team = team
        self._broker = broker
        self._keys = keys
        self._fail_every = fail_every
        self._seq = 0
        self.going = True
        self.sent: set[tuple[str, int]] = set()

    async def send(self, count: int) -> None:
        messages = numbered(count, self._keys, first=self._seq)
        for message in messages:
            if self._fail_every and message.payload["seq"] % self._fail_every == 0:
                message.payload["do"] = "fail"
        self._seq += count
        await self._broker.send_batch(TOPIC, messages)
        self.sent.update((message.key or "-", message.payload["seq"]) for message in messages)

    async def flow(self, total: int | None = None, backlog: int = 400) -> None:
        """Until so many are sent, or until ``going`` is set to false."""
        while self.going and (total is None or len(self.sent) < total):
            if len(self.sent) - len(self._team.log.done()) < backlog:
                await self.send(50)
            else:
                await asyncio.sleep(0.005)  # the pace, not a wait for anything


class Producer:
    """Sends one message after the other, and remembers which of them Redis has confirmed."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.tried: set[tuple[str, int]] = set()
        self.confirmed: set[tuple[str, int]] = set()
        self.failures = 0
        self.going = True

    async def run(self) -> None:
        while self.going:
            seq = len(self.tried)
            key = f"k{seq % 20}"
            self.tried.add((key, seq))
            try:
                await self._broker.send(TOPIC, {"seq": seq}, key=key)
                self.confirmed.add((key, seq))
            except QueueError:
                self.failures += 1
                await asyncio.sleep(0.02)  # the pace, not a wait for anything

    async def confirms(self, more: int) -> None:
        """Return once so many more are confirmed."""
        enough = len(self.confirmed) + more
        await eventually(lambda: len(self.confirmed) >= enough, f"{more} more messages are sent")
