"""The scripts of the one lease, at a partition that only one test has."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import pytest

from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.keys import Keys
from conquiet.wire.lease import Lease
from conquiet.wire.scripts import Script, run
from conquiet.wire.streams import pack

__all__ = ["ACQUIRE", "DELETE", "RELEASE", "RENEW", "SUSPECT", "TTL", "A", "B", "Desk", "desk", "lease"]

TTL: Final = 15_000
A: Final = "worker-1#a"
B: Final = "worker-2#b"
ACQUIRE: Final = Script.named("partition_acquire")
RENEW: Final = Script.named("lease_renew")
RELEASE: Final = Script.named("partition_release")
SUSPECT: Final = Script.named("lease_suspect")
DELETE: Final = Script.named("group_delete")


@dataclass
class Desk:
    """One partition and group, by script and by command; ``later`` ms are added to the server's time."""

    link: Connections
    stream: str
    later: int = 0
    group: str = "billing"

    @property
    def key(self) -> str:
        return Keys().lease(self.stream, self.group)

    async def acquire(self, owner: str, *, since: int = 2**53, known: str = "0", lost: str = "fail") -> Any:
        call = ACQUIRE([self.key, self.stream], owner, TTL, self.later, self.group, "0-0", since, known, lost)
        return await run(self.link, self.stream, call)

    async def hold(self, owner: str) -> int:
        """The epoch in which ``owner`` takes the lease, which is to be had."""
        status, epoch, *_ = await self.acquire(owner)
        assert status == b"OK"
        return int(epoch)

    async def renew(self, owner: str, epoch: int) -> Any:
        return await run(self.link, self.stream, RENEW([self.key], owner, epoch, TTL, self.later))

    async def release(self, owner: str, epoch: int) -> Any:
        return await run(self.link, self.stream, RELEASE([self.key, self.stream], owner, epoch, self.group))

    async def suspect(self, owner: str, epoch: int, id: str) -> Any:
        return await run(self.link, self.stream, SUSPECT([self.key], owner, epoch, id))

    async def delete_group(self) -> None:
        keys = Keys()
        lease, retry, attempts, outbox = keys.of_group(self.stream, self.group)
        names = [lease, self.stream, retry, attempts, outbox, keys.trim(self.stream)]
        await run(self.link, self.stream, DELETE(names, self.later, self.group, 100))

    async def call(self, *words: str | bytes | int) -> Any:
        return await self.link.call(self.stream, pack(*words))

    async def fields(self) -> dict[str, str]:
        flat = [word.decode() for word in await self.call("HGETALL", self.key)]
        return dict(zip(flat[::2], flat[1::2], strict=True))

    async def now(self) -> int:
        seconds, micros = await self.call("TIME")
        return int(seconds) * 1000 + int(micros) // 1000 + self.later


@pytest.fixture
async def desk(url: str) -> AsyncIterator[Desk]:
    link = Connections(Address.of(url))
    yield Desk(link, f"t:{secrets.token_hex(6)}")
    await link.aclose()


def lease(asked: float = 100.0) -> Lease:
    return Lease.acquired("key", A, 1, 10.0, asked)
