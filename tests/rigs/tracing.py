"""A proxy that knows the library's commands by name, keeps their trace, and strikes at one of them."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from importlib.resources import files
from typing import Any, Final, Literal, TypeAlias

import hiredis

from conquiet.wire.scripts import Script
from tests.rigs.proxy import Proxy

__all__ = ["SCRIPTS", "Striker", "Tracer", "Way", "script_in"]

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

_NAMES: Final = {script.name for script in SCRIPTS.values()}
_TEXTS: Final = {script.text.encode(): script for script in SCRIPTS.values()}
_GIVING: Final = ("balance_take", "balance_sweep")
"""Scripts that have a second name when they give something to the caller."""
_ROLES: Final = (
    (re.compile(r":generation$"), "generation"),
    (re.compile(r"streaming:mq:topics:(registry)$"), ""),
    (re.compile(r"streaming:mq:topic:[^:]+:(\w+)$"), ""),
    (re.compile(r"stream:topic:[^:]+:(dlq)$"), ""),
    (re.compile(r"(?:^|:)stream:topic:[^:]+:p:\d+$"), "stream"),
    (re.compile(r"streaming:mq:(\w+):"), ""),
)


class Striker:
    """What was answered so far, by name, and the one command at which the connection is to end.

    For proxies, which tell it of each command before the server gets it, and before the client gets the answer.
    """

    def __init__(self) -> None:
        self.trace: list[str] = []
        """All names in the order of the answers."""
        self._target = ""
        self._awaited: list[str] = []
        self._way: Way = "unsent"
        self._for_good = False
        self._armed = True
        self._struck = asyncio.Event()
        self._following: deque[tuple[str, Way, asyncio.Event]] = deque()
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
        self._struck = asyncio.Event()
        return self._struck

    def strike_again(self, target: str, way: Way) -> asyncio.Event:
        """As :meth:`strike`, at the first ``target`` after the last strike that was asked for has happened."""
        event = asyncio.Event()
        self._following.append((target, way, event))
        return event

    def arm(self) -> None:
        """From now on it counts, and is traced, what is sent."""
        self.trace.clear()
        self._armed = True

    def shut(self) -> None:
        """Close every connection that is open now, and each that is opened from now on."""
        raise NotImplementedError

    def _may_be_sent(self, names: Collection[str]) -> bool:
        """Whether the server may get a command that has these names; if not, its connection is to end."""
        return not (self._way == "unsent" and self._is_meant(names) and self._hit())

    async def _may_be_answered(self, names: Sequence[str]) -> bool:
        """Whether the client may get the answer to a command that has done this; if not, its connection is to end."""
        is_it = self._way != "unsent" and self._is_meant(names)
        self.trace += names
        for name in names:
            if self._armed and self._awaited[:1] == [name]:
                del self._awaited[0]
        if not is_it:
            return True
        is_held = self._way == "held"
        self._hit()
        if is_held:
            await self._keep.wait()
        return False

    def _is_meant(self, names: Collection[str]) -> bool:
        """Whether a command that has these names is the target, and its time has come."""
        is_due = self._armed and bool(self._target) and not self._awaited and not self._struck.is_set()
        return is_due and self._target in names

    def _hit(self) -> bool:
        self._struck.set()
        if self._for_good:
            self.shut()
        if self._following:
            self._target, self._way, self._struck = self._following.popleft()
        return True


class Tracer(Striker, Proxy):
    """Passes everything on, but for one command that it was told to strike at.

    A command has one name or several, by what it does: the script or the command with the role of its first key,
    and where one script does different things, those.
    """

    def __init__(self, upstream: str = "") -> None:
        Proxy.__init__(self, upstream)
        Striker.__init__(self)

    def shut(self) -> None:
        """Close every connection that is open now, and each that is opened from now on."""
        Proxy.shut(self)

    def _may_arrive(self, command: bytes) -> bool:
        return self._may_be_sent(self._names(command))

    async def _may_return(self, command: bytes, reply: bytes) -> bool:
        return not command or await self._may_be_answered(list(_done(_words(command), _value(reply))))

    def _names(self, command: bytes) -> set[str]:
        """What a command may turn out to do that has not been answered yet."""
        return set(_requested(_words(command)))


def script_in(name: str) -> str:
    """The script that is called where a trace has ``name``; empty if that is a plain command."""
    found = "take" if name == "ack" else name.partition(":")[0]
    found = found if found in _NAMES else found.partition(" ")[0]
    return found if found in _NAMES else ""


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
        if script.name in _GIVING:
            yield f"{script.name}: given"


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
        if script.name in _GIVING and reply[0]:
            yield f"{script.name}: given"


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
