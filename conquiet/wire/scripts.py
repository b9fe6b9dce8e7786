"""Lua by name: each script is a file in ``lua/``, sent by its hash, and whole only to a server that lacks it."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

from conquiet.errors import QueueError
from conquiet.kit.chunks import by_number
from conquiet.wire.address import Endpoint
from conquiet.wire.capabilities import is_noscript
from conquiet.wire.connections import Connections
from conquiet.wire.parser import Reply
from conquiet.wire.streams import pack

__all__ = ["Call", "Script", "run", "run_everywhere", "run_many"]

_TOGETHER: Final = 128
"""Calls that are written together: not so many that they would go over the connection for large writes."""
_INCLUDE: Final = re.compile(r"^--#include (\w+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Script:
    """One script: its text, with the fragments that it includes, and its hash."""

    name: str
    text: str
    sha: str

    @staticmethod
    @cache
    def named(name: str) -> Script:
        """The script in ``lua/<name>.lua``."""
        text = _INCLUDE.sub(lambda match: _text(match[1]), _text(name))
        return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())

    def __call__(self, keys: Sequence[str], *args: str | bytes | int) -> Call:
        """A call with all its keys, which are in one slot."""
        return Call(self, (len(keys), *keys, *args))


@dataclass(frozen=True, slots=True)
class Call:
    """A script and what it is called with."""

    script: Script
    words: tuple[str | bytes | int, ...]

    def by_hash(self) -> bytes:
        """The short form."""
        return pack("EVALSHA", self.script.sha, *self.words)

    def whole(self) -> bytes:
        """The form that a server understands which has never seen the script."""
        return pack("EVAL", self.script.text, *self.words)


async def run(link: Connections, key: str, call: Call) -> Reply:
    """The reply to one call on ``key``; an error reply is raised as a ``QueueError``."""
    [reply] = await run_many(link, key, (call,))
    if isinstance(reply, Exception):
        link.refuse(key, reply)
    return reply


async def run_many(link: Connections, key: str, calls: Sequence[Call]) -> list[Reply]:
    """The replies to calls that all belong to the node of ``key``, in one write; error replies as values.

    A server that does not know a script has not run it: those calls, and only those, are sent again, whole.
    """
    replies = await link.call_many(key, [call.by_hash() for call in calls])
    unknown = [at for at, reply in enumerate(replies) if is_noscript(reply)]
    if unknown:
        again = await link.call_many(key, [calls[at].whole() for at in unknown])
        for at, reply in zip(unknown, again, strict=True):
            replies[at] = reply
    return replies


async def run_everywhere(link: Connections, calls: Sequence[tuple[str, Call]]) -> list[Reply]:
    """The replies to calls, each with one of its keys, in one write a node; what went wrong with one is its reply."""
    places: defaultdict[Endpoint, list[int]] = defaultdict(list)
    for at, (key, _) in enumerate(calls):
        places[await link.home(key)].append(at)
    replies: list[Reply] = [None] * len(calls)

    async def ask(some: Sequence[int]) -> None:
        found: list[Reply]
        try:
            found = await run_many(link, calls[some[0]][0], [calls[at][1] for at in some])
        except QueueError as error:
            found = [error.__cause__ or error] * len(some)
        for at, reply in zip(some, found, strict=True):
            replies[at] = reply

    await asyncio.gather(*(ask(some) for there in places.values() for some in by_number(there, _TOGETHER)))
    return replies


def _text(name: str) -> str:
    return files("conquiet.wire").joinpath("lua", f"{name}.lua").read_text("utf-8")
