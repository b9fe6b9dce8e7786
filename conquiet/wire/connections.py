"""All the connections that one object has to its Redis, and how a command finds its node."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn, cast

from redis.exceptions import AskError, MovedError, RedisError, TryAgainError

from conquiet.errors import QueueError
from conquiet.kit.service import MOMENT, Background, to_its_end
from conquiet.wire.address import Address, Endpoint
from conquiet.wire.blocking_connection import Blocking, BlockingConnection
from conquiet.wire.blocking_pool import BlockingPool
from conquiet.wire.capabilities import Capabilities, is_full, node_in_doubt
from conquiet.wire.interrupt import Interrupt
from conquiet.wire.line import LARGE
from conquiet.wire.parser import Reply
from conquiet.wire.shared_connection import SharedConnection, running_loop
from conquiet.wire.shared_read import SharedRead
from conquiet.wire.streams import pack
from conquiet.wire.topology import topology_of

__all__ = ["Connections", "is_for_want_of_memory"]

_CLOSED: Final = "closed: no command can be sent any more"
_MOST_REDIRECTS: Final = 5
_TRY_AGAIN: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.2, 0.2, 0.2)
"""Seconds between two tries of a command on keys that are at two nodes of a Cluster until their slot has moved."""
_ASKING: Final = pack("ASKING")
_FAILURES: Final = (RedisError, OSError)  # a TimeoutError is an OSError


def is_for_want_of_memory(error: QueueError) -> bool:
    """Whether a server refused a command because its memory is full."""
    return is_full(error.__cause__)


class Connections:
    """One shared connection a node for commands that answer at once, one for large writes, and some that block.

    So neither a blocked read nor a large write keeps an acknowledgment waiting. Every failure is a ``QueueError``, at
    once, and nothing is sent a second time that may have been run: a Cluster that redirects a command, or says to try
    again while a slot moves, has not run it. After a failure the next call opens a new connection.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self._topology = topology_of(address)
        self._lanes: dict[Endpoint, SharedConnection] = {}
        self._wide_lanes: dict[Endpoint, SharedConnection] = {}
        self._waiting: dict[Endpoint, BlockingPool] = {}
        self._capabilities: defaultdict[Endpoint, Capabilities] = defaultdict(Capabilities)
        self._closed = False
        self._shared = SharedRead(self)
        self._background = Background()
        self._discovery: asyncio.Task[None] | None = None

    async def call(self, key: str, command: bytes) -> Reply:
        """The reply to one packed command on ``key``; an error reply is raised."""
        [reply] = await self.call_many(key, (command,))
        if isinstance(reply, Exception):
            self.refuse(key, reply)
        return reply

    async def call_many(self, key: str, commands: Sequence[bytes]) -> list[Reply]:
        """The replies to packed commands on ``key``, sent in one write; error replies come as values."""
        try:
            endpoint = self._known(key) or await self._locate(key)
            size = len(commands[0]) if len(commands) == 1 else sum(map(len, commands))
            replies = await self._lane(endpoint, size).call(commands, size)
            if self.address.kind == "cluster":
                await self._follow_redirects(endpoint, commands, replies)
            if self.address.kind != "single":
                for reply in replies:
                    self._doubt(reply)
        except _FAILURES as error:
            self.refuse(key, error)
        return replies

    async def home(self, key: str) -> Endpoint:
        """The node that holds ``key`` now; what lives there can share a write and a wait."""
        try:
            return await self._locate(key)
        except _FAILURES as error:
            self.refuse(key, error)

    def opened(self, endpoint: Endpoint) -> int:
        """How many connections for commands a node has had so far; more than before means that one was lost."""
        lane = self._lanes.get(endpoint)
        return 0 if lane is None else lane.opened

    def read(
        self, after: Mapping[str, str], count: int, seconds: float, interrupt: Interrupt | None = None
    ) -> Coroutine[Any, Any, Reply | None]:
        """As :meth:`SharedRead.read`: all who read so share one blocked connection a node."""
        return self._shared.read(after, count, seconds, interrupt)

    async def wait(
        self,
        key: str,
        command: bytes,
        seconds: float,
        interrupt: Interrupt,
        unsent: Reply | None = None,
        *,
        harmless: bool = False,
    ) -> Reply | None:
        """The reply to a command that blocks for up to ``seconds``; ``None`` also when interrupted.

        ``unsent`` if the interrupt was requested before the command was sent: then nothing was asked. Also if the
        server is silent for a second after the request: then it is not known what it did. A ``harmless`` command
        changes nothing on the server, and may be torn off.
        """
        how = Blocking(seconds, interrupt, unsent, harmless)
        try:
            if unsent is not None and self._known(key) is None and not await interrupt.ends(partial(self._locate, key)):
                return unsent
            endpoint = await self._locate(key)
            reply = await self._waiting_at(endpoint).call((command,), how)
            for _ in range(_MOST_REDIRECTS):
                if not isinstance(reply, Exception) or (there := self._redirect(endpoint, reply)) is None:
                    break
                endpoint, first = there
                reply = await self._waiting_at(endpoint).call((*first, command), how)
        except _FAILURES as error:
            self.refuse(key, error)
        if isinstance(reply, Exception):
            self.refuse(key, reply)
        return reply

    def refuse(self, key: str, error: Exception) -> NoReturn:
        """Raise ``error`` as the ``QueueError`` that it means for a command on ``key``."""
        self._doubt(error)
        hint = ""
        if isinstance(error, MovedError) and self.address.kind != "cluster":
            hint = " (this server is part of a Cluster: use a redis+cluster:// URL or a RedisCluster client)"
        text = str(error) or type(error).__name__
        raise QueueError(f"{key!r} at {self.address}: {text}{hint}") from error

    def _doubt(self, reply: Reply) -> None:
        """Ask anew where the master is, if ``reply`` says that it is not where it was."""
        if node_in_doubt(reply):
            self._topology.forget()

    async def aclose(self) -> None:
        """Close every connection; calls after this are refused. Cancelled, it closes all of them nevertheless.

        Takes a second at most: it waits for nothing but tasks that were cancelled.
        """
        self._closed = True
        await to_its_end(self._close(), "close", MOMENT)

    async def _close(self) -> None:
        # Side by side: if one does not end in time, the others are closed all the same.
        await asyncio.gather(
            self._background.aclose(),
            self._shared.aclose(),
            *(pool.aclose() for pool in self._waiting.values()),
            *(lane.aclose() for lane in (*self._lanes.values(), *self._wide_lanes.values())),
        )
        self._waiting.clear()
        self._lanes.clear()
        self._wide_lanes.clear()

    def _known(self, key: str) -> Endpoint | None:
        if self._closed:
            raise RedisError(_CLOSED)
        return self._topology.locate(key)

    async def _locate(self, key: str) -> Endpoint:
        endpoint = self._known(key) or await self._discover(key)
        if endpoint is None:
            raise RedisError("no node of the Cluster holds this key's slot")
        return endpoint

    async def _discover(self, key: str) -> Endpoint | None:
        """Ask the servers, once for all who need to know; they share the answer, and the failure."""
        loop, asking = running_loop(), self._discovery
        if asking is None or asking.done() or asking.get_loop() is not loop:
            asking = self._discovery = self._background.start(self._topology.discover(), "discovery")
        await asyncio.wait([asking])
        if self._closed:
            raise RedisError(_CLOSED)
        if asking.cancelled():  # but not this caller
            return await self._discover(key)
        asking.result()
        return self._topology.locate(key)

    def _lane(self, endpoint: Endpoint, size: int = 0) -> SharedConnection:
        lanes = self._lanes if size <= LARGE else self._wide_lanes
        lane = lanes.get(endpoint)
        if lane is None:
            lane = lanes[endpoint] = SharedConnection(partial(self.address.connection, endpoint), self.address.timeout)
        return lane

    async def _follow_redirects(self, endpoint: Endpoint, commands: Sequence[bytes], replies: list[Reply]) -> None:
        for index, command in enumerate(commands):
            replies[index] = await self._redirected(endpoint, command, replies[index])
            for pause in _TRY_AGAIN:
                if not isinstance(replies[index], TryAgainError):
                    break
                await asyncio.sleep(pause)
                [reply] = await self._lane(endpoint, len(command)).call((command,), len(command))
                replies[index] = await self._redirected(endpoint, command, reply)

    async def _redirected(self, here: Endpoint, command: bytes, reply: Reply) -> Reply:
        """The reply to a command from where ``reply``, which came from ``here``, sends it."""
        for _ in range(_MOST_REDIRECTS):
            if not isinstance(reply, Exception) or (there := self._redirect(here, reply)) is None:
                break
            here, first = there
            size = len(_ASKING) + len(command)
            reply = (await self._lane(here, size).call((*first, command), size))[-1]
        return reply

    def _redirect(self, asked: Endpoint, reply: Exception) -> tuple[Endpoint, tuple[bytes, ...]] | None:
        """Where to send a command that a Cluster node refused to run, and what to say there first."""
        if self.address.kind != "cluster" or not isinstance(reply, AskError):
            return None
        there = self.address.reached_at((cast("str", reply.host) or asked[0], reply.port))
        if not isinstance(reply, MovedError):
            return there, (_ASKING,)
        self._topology.moved(reply.slot_id, there)
        return there, ()

    def _waiting_at(self, endpoint: Endpoint) -> BlockingPool:
        pool = self._waiting.get(endpoint)
        if pool is None:
            pool = self._waiting[endpoint] = BlockingPool(partial(self._waiting_lane, endpoint))
        return pool

    def _waiting_lane(self, endpoint: Endpoint) -> BlockingConnection:
        dial = partial(self.address.connection, endpoint)
        return BlockingConnection(dial, self.address.timeout, self._lane(endpoint), self._capabilities[endpoint])
