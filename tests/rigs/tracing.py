"""A proxy that knows the library's commands by name, keeps their trace, and strikes at one of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any, Final, Literal, TypeAlias

import hiredis

from conquiet.wire.scripts import Script
from tests.rigs.proxy import Proxy

__all__ = ["SCRIPTS", "Tracer", "Way"]

Way: TypeAlias = Literal["unsent", "unanswered", "held"]

SCRIPTS: Final = {
    script.sha.encode(): script
    for script in (
        Script.named(file.name.removesuffix(".lua"))
        for file in files("conquiet.wire").joinpath("lua").iterdir()
        if file.name.endswith(".lua") and not file.read_text("utf-8").startswith("-- Fragment")
    )
}
"""Every script by its hash."""

_TEXTS: Final = {script.text.encode(): script for script in SCRIPTS.values()}
_ROLES: Final = (
    (re.compile(r":generation$"), "generation"),
    (re.compile(r"streaming:mq:topics:(registry)$"), ""),
    (re.compile(r"streaming:mq:topic:[^:]+:(\w+)$"), ""),
    (re.compile(r"stream:topic:[^:]+:(dlq)$"), ""),
    (re.compile(r"(?:^|:)stream:topic:[^:]+:p:\d+$"), "stream"),
    (re.compile(r"streaming:mq:(\w+):"), ""),
)


class Tracer(Proxy):
    """Passes everything on, but for one command that it was told to strike at.

    A command has one name or several, by what it does: the script or the command with the role of its first key,
    and where one script does different things, those. ``trace`` has all names in the order of the answers.
    """

    def __init__(self, upstream: str = "") -> None:
        super().__init__(upstream)
        self.trace: list[str] = []
        self._target = ""
        self._awaited: list[str] = []
        self._way: Way = "unsent"
        self._for_good = False
        self._armed = True
        self._struck = asyncio.Event()
        self._keep = asyncio.Event()

    def strike(
        self, target: str, after: Sequence[str], way: Way, *, for_good: bool = False, armed: bool = True
    ) -> asyncio.Event:
        """Once, when ``target`` comes and ``after`` were answered, one after the other: end the connection.

        ``unsent`` ends it before the command, ``unanswered`` before its answer; ``held`` keeps the answer and the
        connection. ``for_good`` shuts the proxy too. The event tells that it has happened. Unless ``armed``, nothing
        counts before :meth:`arm`.
        """
        self._target, self._awaited, self._way, self._for_good = target, list(after), way, for_good
        self._armed = armed
        return self._struck

    def arm(self) -> None:
        """From now on it counts, and is traced, what is sent."""
        self.trace.clear()
        self._armed = True

    def _may_arrive(self, command: bytes) -> bool:
        is_it = self._way == "unsent" and self._is_due() and self._target in set(_requested(_words(command)))
        return not (is_it and self._hit())

    async def _may_return(self, command: bytes, reply: bytes) -> bool:
        if not command:
            return True
        names = list(_done(_words(command), _value(reply)))
        is_it = self._way != "unsent" and self._is_due() and self._target in names
        self.trace += names
        for name in names:
            if self._armed and self._awaited[:1] == [name]:
                del self._awaited[0]
        if not is_it:
            return True
        self._hit()
        if self._way == "held":
            await self._keep.wait()
        return False

    def _is_due(self) -> bool:
        return self._armed and bool(self._target) and not self._awaited and not self._struck.is_set()

    def _hit(self) -> bool:
        self._struck.set()
        if self._for_good:
            self.shut()
        return True


def _value(frame: bytes) -> Any:
    reader = hiredis.Reader()
    reader.feed(frame)
    return reader.gets()


def _words(command: bytes) -> list[bytes]:
    words: list[bytes] = _value(command)
    return words


def _script(words: Sequence[bytes]) -> Script | None:
    known = {b"EVALSHA": SCRIPTS, b"EVAL": _TEXTS}.get(words[0].upper())
    return None if known is None else known.get(words[1])


def _requested(words: Sequence[bytes]) -> Iterator[str]:
    """What a command may turn out to have done."""
    script = _script(words)
    if script is None:
        yield _plain(words)
        return
    args = _args(words)
    if script.name == "take":
        if args[8:]:
            yield "ack"
        if args[4:6] != [b"0", b"0"]:
            yield from ("take new", "take due", "take nothing")
    elif script.name == "forward":
        yield "forward: claim" if args[3] else "forward: append" if args[7:] else "forward: end"
    elif script.name == "takeover":
        yield from ("takeover", "takeover: entries")
    elif script.name == "trim":
        yield from ("trim: more", "trim: last")
    else:
        yield script.name


def _done(words: Sequence[bytes], reply: Any) -> Iterator[str]:
    """What a command has done."""
    script, possible = _script(words), list(_requested(words))
    if script is None or isinstance(reply, Exception):
        yield from possible[:1]
    elif script.name == "take" and reply[0]:
        done = {"ack": True, "take new": reply[2], "take due": reply[3], "take nothing": not reply[2] and not reply[3]}
        yield from (name for name in possible if done[name])
    elif script.name == "takeover" and reply[0]:
        yield "takeover: entries" if reply[2] else "takeover"
    elif script.name == "trim":
        yield "trim: more" if reply[2] else "trim: last"
    else:
        yield possible[0]


def _args(words: Sequence[bytes]) -> list[bytes]:
    return list(words[3 + int(words[2]) :])


def _plain(words: Sequence[bytes]) -> str:
    name = words[0].decode().upper()
    if name == "XREAD":
        return name
    keyed = words[2:] if name in ("XGROUP", "XINFO") else words[1:]
    return f"{name} {_role(keyed[0].decode(errors='replace'))}".strip() if keyed else name


def _role(key: str) -> str:
    for pattern, role in _ROLES:
        if found := pattern.search(key):
            return role or found[1]
    return ""
