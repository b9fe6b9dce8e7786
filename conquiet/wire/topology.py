"""Which node holds a key: one server, the master that the Sentinels name, or the owner of a Cluster slot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from redis.asyncio.connection import AbstractConnection
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.crc import key_slot
from redis.exceptions import RedisError

from conquiet.kit.service import Background
from conquiet.wire.address import Address, Endpoint
from conquiet.wire.parser import Reply
from conquiet.wire.shared_connection import SharedConnection
from conquiet.wire.streams import pack

__all__ = ["Topology", "topology_of"]

_T = TypeVar("_T")
_SILENCE: Final = 0.3
"""Seconds after which the next server is asked too, while one that was asked is silent."""


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
        self._seeds = address.seeds
        self._master: Endpoint | None = None

    def locate(self, key: str) -> Endpoint | None:
        return self._master

    async def discover(self) -> None:
        guide, self._master = await _first_answer(self._seeds, self._ask)
        self._seeds = (guide, *(seed for seed in self._seeds if seed != guide))

    def forget(self) -> None:
        self._master = None

    async def _ask(self, seed: Endpoint) -> Endpoint:
        # Of redis-py: it does not believe a Sentinel that has lost sight of the master, as one that is cut off with it.
        sentinel: Any = Sentinel([seed], sentinel_kwargs=self._address.for_sentinels())  # type: ignore[no-untyped-call]
        try:
            host, port = await sentinel.discover_master(self._address.service)
        except MasterNotFoundError as error:
            reason = str(error).partition(" : ")[2].rpartition(" - ")[2] or "it knows none, or has lost sight of it"
            where = f"the Sentinel at {seed[0]}:{seed[1]} names no master of {self._address.service!r}"
            raise MasterNotFoundError(f"{where}: {reason}") from error
        finally:
            await sentinel.aclose()
        return str(host), int(port)


class _Cluster(Topology):
    def __init__(self, address: Address) -> None:
        self._address = address
        self._guide: tuple[Endpoint, ...] = ()
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
        guides = (*self._guide, *self._address.seeds, *(owner for _, _, owner in self._owners))
        guide, self._owners = await _first_answer(tuple(dict.fromkeys(guides)), self._ask)
        self._guide = (guide,)
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


async def _first_answer(
    seeds: Sequence[Endpoint], ask: Callable[[Endpoint], Coroutine[Any, Any, _T]]
) -> tuple[Endpoint, _T]:
    """Who answers first, and what: each is asked when the one before has failed, or is silent."""
    asked, others = Background(), list(seeds)
    asking: dict[asyncio.Task[_T], Endpoint] = {}
    failure: Exception | None = None
    try:
        while others or asking:
            if others:
                seed = others.pop(0)
                asking[asked.start(ask(seed), "ask-the-way")] = seed
            done, _ = await asyncio.wait(
                asking, timeout=_SILENCE if others else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                seed = asking.pop(task)
                try:
                    return seed, task.result()
                except (RedisError, OSError) as error:
                    failure = error
    finally:
        await asked.aclose()
    raise failure or RedisError("the address names no node")
