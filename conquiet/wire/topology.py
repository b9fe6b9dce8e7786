"""Which node holds a key: one server, the master that the Sentinels name, or the owner of a Cluster slot."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from redis.asyncio.connection import AbstractConnection
from redis.crc import key_slot
from redis.exceptions import RedisError

from conquiet.wire.address import Address, Endpoint
from conquiet.wire.parser import Reply
from conquiet.wire.shared_connection import SharedConnection
from conquiet.wire.streams import pack

__all__ = ["Topology", "topology_of"]

_T = TypeVar("_T")


class Topology:
    """What is known of the nodes; asking the servers happens only in ``discover``."""

    def locate(self, key: str) -> Endpoint | None:
        """The node that holds ``key``, or ``None`` if that must be discovered first."""
        raise NotImplementedError

    async def discover(self) -> None:
        """Ask the servers. One answer of one of them is enough; if none answers, the last error is raised."""

    def moved(self, slot: int, endpoint: Endpoint) -> None:
        """Learn from a server that ``slot`` lives at ``endpoint``."""

    def forget(self) -> None:
        """A node was lost or demoted: discover again before the next call."""


def topology_of(address: Address) -> Topology:
    """The topology that ``address`` describes."""
    if address.kind == "sentinel":
        return _Sentinels(address)
    if address.kind == "cluster":
        return _Cluster(address)
    return _Single(address.seeds[0])


class _Single(Topology):
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def locate(self, key: str) -> Endpoint | None:
        return self._endpoint


class _Sentinels(Topology):
    def __init__(self, address: Address) -> None:
        self._address = address
        self._master: Endpoint | None = None

    def locate(self, key: str) -> Endpoint | None:
        return self._master

    async def discover(self) -> None:
        self._master = await _first_answer(self._address.seeds, self._ask)

    def forget(self) -> None:
        self._master = None

    async def _ask(self, seed: Endpoint) -> Endpoint:
        service = self._address.service
        command = pack("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)
        reply = await _ask_once(lambda: self._address.sentinel(seed), command, self._address.timeout)
        if reply is None:
            raise RedisError(f"the Sentinel at {seed[0]}:{seed[1]} knows no service {service!r}")
        host, port = reply
        return host.decode(), int(port)


class _Cluster(Topology):
    def __init__(self, address: Address) -> None:
        self._address = address
        self._owners: list[tuple[int, int, Endpoint]] = []
        self._moves: dict[int, Endpoint] = {}
        self._stale = True

    def locate(self, key: str) -> Endpoint | None:
        if self._stale:
            return None
        slot = key_slot(key.encode())
        if slot in self._moves:
            return self._moves[slot]
        return next((owner for first, last, owner in self._owners if first <= slot <= last), None)

    async def discover(self) -> None:
        known = dict.fromkeys((*self._address.seeds, *(owner for _, _, owner in self._owners)))
        self._owners = await _first_answer(tuple(known), self._ask)
        self._moves.clear()
        self._stale = False

    def moved(self, slot: int, endpoint: Endpoint) -> None:
        self._moves[slot] = endpoint

    def forget(self) -> None:
        self._stale = True  # the owners stay known, as servers to ask

    async def _ask(self, seed: Endpoint) -> list[tuple[int, int, Endpoint]]:
        command = pack("CLUSTER", "SLOTS")
        reply = await _ask_once(lambda: self._address.connection(seed), command, self._address.timeout)
        # An empty host means: the one that you asked.
        ranges = [
            (int(first), int(last), self._address.reached_at(((master[0] or b"").decode() or seed[0], int(master[1]))))
            for first, last, master, *_ in reply
        ]
        if not ranges:
            raise RedisError(f"the node at {seed[0]}:{seed[1]} knows of no slots yet")
        return ranges


async def _ask_once(dial: Callable[[], AbstractConnection], command: bytes, timeout: float | None) -> Reply:
    lane = SharedConnection(dial, timeout)
    try:
        [reply] = await lane.call((command,), len(command))
    finally:
        await lane.aclose()
    if isinstance(reply, Exception):
        raise reply
    return reply


async def _first_answer(seeds: Sequence[Endpoint], ask: Callable[[Endpoint], Awaitable[_T]]) -> _T:
    failure: Exception | None = None
    for seed in seeds:
        try:
            return await ask(seed)
        except (RedisError, OSError) as error:
            failure = error
    raise failure or RedisError("the address names no node")
