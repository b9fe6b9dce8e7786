"""Which keys the scripts touch: those that they are given, and a few that are named here, all in the same slot."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot

from tests.rigs.waiting import eventually
from tests.security import test_least_rights as flows

UNDECLARED: Final = {
    "topics": r"(?!)",
    "balanced streams": r"(?:mutex|news|bad|pos):\{[^}]+-input\}(?::.+)?",
    "jobs": r"conquiet:jobs:\{[^}]+\}:news:\w+",
}
"""Keys that scripts touch beyond KEYS. In balance they may be at the other node while a slot moves, where a key that is
missing would stop the script; in jobs only the script knows whom it wakes."""
_END: Final = "the work is done"


@dataclass
class Touched:
    """What scripts were given, and what they touched besides."""

    declared: set[str] = field(default_factory=set)
    undeclared: set[str] = field(default_factory=set)
    strangers: set[str] = field(default_factory=set)
    """Those of the undeclared that are in another slot."""
    _keys: set[str] = field(default_factory=set)

    def note(self, words: list[str], by_script: bool) -> None:
        if not by_script:
            is_call = words[0].upper() in ("EVALSHA", "EVAL")
            self._keys = set(words[3 : 3 + int(words[2])]) if is_call and words[0].upper() == "EVALSHA" else set()
            self.declared |= self._keys
            return
        if not self._keys:  # of a script that was sent whole: its text has too many words to tell its keys
            return
        for key in _keys_of(words):
            if key not in self._keys:
                self.undeclared.add(key)
                if key_slot(key.encode()) != key_slot(next(iter(self._keys)).encode()):
                    self.strangers.add(key)


def _keys_of(words: list[str]) -> list[str]:
    name = words[0].upper()
    if name == "TIME":
        return []
    if name in ("XREADGROUP", "XREAD"):
        names = words[[word.upper() for word in words].index("STREAMS") + 1 :]
        return names[: len(names) // 2]
    if name in ("XGROUP", "XINFO"):
        return words[2:3]
    return words[1:] if name in ("DEL", "UNLINK", "EXISTS") else words[1:2]


@asynccontextmanager
async def watched(url: str) -> AsyncGenerator[Touched]:
    touched, is_over = Touched(), asyncio.Event()
    async with Redis.from_url(url, decode_responses=True) as client, client.monitor() as monitor:

        async def note() -> None:
            async for line in monitor.listen():
                if _END in line["command"]:
                    is_over.set()
                    return
                touched.note(line["command"].split(" "), line["client_type"] == "lua")

        noting = asyncio.create_task(note())
        try:
            yield touched
            await client.echo(_END)
            await eventually(is_over.is_set, "the server to tell all")
        finally:
            noting.cancel()
            await asyncio.gather(noting, return_exceptions=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("room", "flow"),
    [("topics", flows.test_topics), ("balanced streams", flows.test_balanced_streams), ("jobs", flows.test_jobs)],
)
async def test_a_script_touches_what_it_is_given(
    url: str, room: str, flow: Callable[..., Coroutine[Any, Any, None]]
) -> None:
    await flow(url, ())  # so that the server knows the scripts
    async with watched(url) as touched:
        await flow(url, ())
    assert len(touched.declared) > 3
    assert [key for key in touched.undeclared if not re.fullmatch(UNDECLARED[room], key)] == []
    assert touched.strangers == set(), "not in the slot of its keys: a Cluster would refuse it"
