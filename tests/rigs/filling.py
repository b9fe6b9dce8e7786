"""A proxy behind which every command finds the server's memory full, and which looks at what comes of that.

Each command is first sent while ``maxmemory`` leaves no room. What goes on then has to be of a kind that frees or
keeps, and what is refused of a kind that adds: that has changed nothing, and is sent again as soon as there is room. So
whoever is behind the proxy notices nothing, and any scene can be played there.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, Literal, Self, TypeAlias

import hiredis
from redis.asyncio import Redis

from tests.rigs.asking import ask
from tests.rigs.lua_reading import kind_of
from tests.rigs.proxy import Proxy, _frames
from tests.rigs.tracing import SCRIPTS

__all__ = ["CONNECTION", "PLAIN", "Filling", "Outcome", "empty", "everything", "fill", "wanted"]

Outcome: TypeAlias = Literal["refused", "same", "changed", "smaller"]

PLAIN: Final = {
    **dict.fromkeys(("XADD", "XGROUP", "SADD"), "adds"),
    **dict.fromkeys(("XACK", "XDEL", "HDEL", "SREM", "UNLINK"), "frees"),
    **dict.fromkeys(("XCLAIM", "XREADGROUP", "PEXPIRE"), "keeps"),
    **dict.fromkeys(("XREAD", "XRANGE", "XREVRANGE", "XLEN", "XINFO", "XPENDING"), "reads"),
    **dict.fromkeys(("EXISTS", "GET", "HGET", "MGET", "PTTL", "SCARD", "SISMEMBER", "SMEMBERS", "TYPE"), "reads"),
}
"""The commands that the library sends by themselves. Of ``XGROUP`` it is ``CREATE`` alone."""
CONNECTION: Final = frozenset(
    ["ASKING", "AUTH", "CLIENT", "CLUSTER", "CONFIG", "HELLO", "INFO", "PING", "SELECT", "SENTINEL", "TIME"]
)
"""Those that are about no key."""

_CHUNK: Final = 1 << 16


async def fill(url: str) -> None:
    """From now on nothing may be written at this server that takes memory."""
    await ask(url, "CONFIG", "SET", "maxmemory", "1")


async def empty(url: str) -> None:
    """There is room again."""
    await ask(url, "CONFIG", "SET", "maxmemory", "0")


async def everything(client: Redis) -> dict[bytes, tuple[Any, bool]]:
    """What every key holds, whatever the order in which a server happens to keep it, and whether it runs out."""
    names: list[Any] = await client.keys()
    async with client.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.type(name)
        kinds = await pipeline.execute()
        for name, kind in zip(names, kinds, strict=True):
            {b"hash": pipeline.hgetall, b"set": pipeline.smembers}.get(kind, pipeline.dump)(name)
            pipeline.pttl(name)
        found = await pipeline.execute()
    rows = zip(names, found[::2], found[1::2], strict=True)
    return {name: (held, left > 0) for name, held, left in rows if held}


def wanted(name: str) -> Outcome:
    """What has to come, at least once, of a script or a command in a full memory."""
    kind = PLAIN.get(name) or kind_of(name)
    outcomes: dict[str, Outcome] = {"adds": "refused", "frees": "smaller", "keeps": "changed", "reads": "same"}
    return outcomes[kind]


class Filling(Proxy):
    """Passes commands on one by one, each at first into a full memory.

    A scene must not wait in an ``XREADGROUP``: nobody else could write.
    """

    def __init__(self, upstream: str, *, after: int | None = None) -> None:
        """With ``after``, memory is full from so many commands on, for good; what is refused then stays refused."""
        super().__init__(upstream)
        self.refused: list[str] = []
        """With ``after``: which commands were refused."""
        self.commands = 0
        """How many commands there were so far."""
        self._after = after
        self.outcomes: dict[str, set[Outcome]] = defaultdict(set)
        """What came, in a full memory, of the scripts and commands that were sent."""
        self.wrong: list[str] = []
        """What is not as the kinds say."""
        self._redis = Redis.from_url(upstream)
        self._one_at_a_time = asyncio.Lock()

    async def __aenter__(self) -> Self:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for script in SCRIPTS.values():  # so that no call is made twice because the server lacks its script
                pipeline.script_load(script.text)
            await pipeline.execute()
        return await super().__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        await super().__aexit__(*error)
        await self._redis.aclose()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server, back = await asyncio.open_connection(*self._upstream)
        try:
            replies = _each(server)
            async for command in _each(reader):
                writer.write(await self._answer(command, back, replies))
                await writer.drain()
        finally:
            back.transport.abort()

    async def _answer(self, command: bytes, back: asyncio.StreamWriter, replies: AsyncIterator[bytes]) -> bytes:
        words = _words(command)
        name = _name(words)
        if name in CONNECTION or name == "XREAD":  # who only waits must not keep others from writing
            back.write(command)
            return await anext(replies)
        async with self._one_at_a_time:
            if self._after is not None:
                return await self._answer_as_it_is(name, command, back, replies)
            before = await everything(self._redis)
            await self._redis.config_set("maxmemory", 1)
            back.write(command)
            reply = await anext(replies)
            await self._redis.config_set("maxmemory", 0)
            after = await everything(self._redis)
            self._judge(name, _is_refused(reply), before, after)
            if _is_refused(reply):
                back.write(command)
                reply = await anext(replies)
        return reply

    async def _answer_as_it_is(
        self, name: str, command: bytes, back: asyncio.StreamWriter, replies: AsyncIterator[bytes]
    ) -> bytes:
        if self.commands == self._after:
            await self._redis.config_set("maxmemory", 1)
        self.commands += 1
        back.write(command)
        reply = await anext(replies)
        if _is_refused(reply):
            self.refused.append(name)
        return reply

    def _judge(self, name: str, is_refused: bool, before: dict[bytes, Any], after: dict[bytes, Any]) -> None:
        expired = {key for key, (_, runs_out) in before.items() if runs_out and key not in after}
        there = {key: held for key, held in before.items() if key not in expired}
        outcome: Outcome = "refused" if is_refused else "same"
        if after != there and is_refused:
            self.wrong.append(f"{name} was refused and changed something")
        elif after != there:
            outcome = "smaller" if _size(after) < _size(there) else "changed"
        self.outcomes[name].add(outcome)
        if outcome == "smaller":
            self.outcomes[name].add("changed")
        kind = PLAIN.get(name) or kind_of(name)
        allowed = {"adds": {"refused", "same"}, "reads": {"same"}}.get(kind, {"same", "changed", "smaller"})
        if outcome not in allowed:
            self.wrong.append(f"{name}, which {kind}: {outcome}")


def _is_refused(reply: bytes) -> bool:
    return reply.startswith(b"-") and b"OOM " in reply


def _size(held: dict[bytes, Any]) -> int:
    """About how much there is."""
    return sum(len(what) if isinstance(what, bytes) else len(repr(what)) for what, _ in held.values())


async def _each(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The commands or replies that arrive."""
    buffer = bytearray()
    while data := await reader.read(_CHUNK):
        buffer += data
        for frame in list(_frames(buffer)):
            yield frame


def _words(command: bytes) -> list[bytes]:
    reader = hiredis.Reader()
    reader.feed(command)
    words: list[bytes] = reader.gets()
    return words


def _name(words: Sequence[bytes]) -> str:
    command = words[0].decode().upper()
    return SCRIPTS[words[1]].name if command == "EVALSHA" else command
