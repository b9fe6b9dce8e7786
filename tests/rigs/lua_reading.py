"""What a script writes, and in which order, as far as its text tells: enough to see what decides when memory is full.

A server whose memory is full refuses a script at its first write, if that is one that may need memory, and at no later
one. So the first write counts. A call of a function counts as what the function does; a block that ends with ``return``
is a way of its own, and does not count for what comes after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Final

__all__ = ["ALLOWED", "FRAGMENTS", "KINDS", "REFUSED", "SCRIPTS", "TEXTS", "kind_of", "writes_of"]

KINDS: Final = ("frees", "keeps", "adds", "reads")
"""What a script can be when memory is full; the first two go on, the third is refused, the last writes nothing."""

TEXTS: Final = {
    file.name.removesuffix(".lua"): file.read_text("utf-8")
    for file in files("conquiet.wire").joinpath("lua").iterdir()
    if file.name.endswith(".lua")
}
FRAGMENTS: Final = {name for name, text in TEXTS.items() if text.startswith("-- Fragment: ")}
SCRIPTS: Final = sorted(TEXTS.keys() - FRAGMENTS)

REFUSED: Final = frozenset(
    ["HINCRBY", "HSET", "HSETNX", "INCR", "INCRBY", "SADD", "SET", "SETRANGE", "XADD", "XGROUP CREATE", "ZADD"]
)
"""The writes of our scripts that a full server refuses."""
ALLOWED: Final = frozenset(
    [
        *("DEL", "HDEL", "PERSIST", "PEXPIRE", "UNLINK", "XACK", "XCLAIM", "XDEL", "XREADGROUP", "XTRIM", "ZREM"),
        "ZREMRANGEBYSCORE",
    ]
)
"""Those that it does not."""
_DEPENDS: Final = frozenset(["XGROUP DELCONSUMER", "XGROUP DESTROY", "XGROUP SETID"])
"""Those that a server refuses before 7.0 only."""
_READS: Final = frozenset(
    (
        *("EXISTS", "GET", "HEXISTS", "HGET", "HGETALL", "HKEYS", "HLEN", "HMGET", "HSTRLEN", "HVALS", "PTTL"),
        *("SISMEMBER", "TIME", "TYPE", "XINFO CONSUMERS", "XINFO GROUPS", "XINFO STREAM", "XLEN", "XPENDING"),
        *("XRANGE", "XREVRANGE", "ZCARD", "ZCOUNT", "ZLEXCOUNT", "ZMSCORE", "ZRANGE", "ZRANGEBYLEX"),
        *("ZRANGEBYSCORE", "ZREVRANGEBYSCORE", "ZSCORE"),
    )
)

_HEAD: Final = re.compile(r"^-- MEMORY (\w+)(?:$|: \S)", re.MULTILINE)
_FUNCTION: Final = re.compile(r"^local function (\w+)\(.*?\n((?:  .*\n|\n)*)end$", re.MULTILINE)
_INCLUDE: Final = re.compile(r"^--#include (\w+)$", re.MULTILINE)
_COMMENT: Final = re.compile(r"--.*$", re.MULTILINE)
_STEP: Final = re.compile(r"(?:redis\.p?call|in_pieces)\(\s*'(\w+)'(?:, *'([A-Z]+)')?|\b(\w+)\(")


def kind_of(name: str) -> str:
    """The kind that a script's head states."""
    [kind] = _HEAD.findall(TEXTS[name])
    return str(kind)


@cache
def writes_of(name: str) -> tuple[str, ...]:
    """All writes of a script in their order, with ``go_on_when_full`` and ``stop_when_full`` among them by name."""
    included = [_COMMENT.sub("", TEXTS[part]) for part in _INCLUDE.findall(TEXTS[name])]
    own = _COMMENT.sub("", TEXTS[name])
    functions = {found[1]: found[2] for text in (*included, own) for found in _FUNCTION.finditer(text)}
    return tuple(_steps(_without_ends(_FUNCTION.sub("", own)), functions))


def _steps(text: str, functions: Mapping[str, str]) -> Iterator[str]:
    for found in _STEP.finditer(text):
        command, word, function = found.groups()
        if function is not None:
            if function.startswith(("go_on_when_full", "stop_when_full")):
                yield function
            elif function in functions:
                others = {other: body for other, body in functions.items() if other != function}
                yield from _steps(_without_ends(functions[function]), others)
            continue
        name = f"{command} {word}" if command in ("XGROUP", "XINFO") else command
        if name not in _READS:
            assert name in REFUSED | ALLOWED | _DEPENDS, f"{name} is neither known as a read nor as a write"
            yield name


def _without_ends(text: str) -> str:
    """The text without blocks that end with a ``return`` inside of another block."""
    kept: list[str] = []
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if indent > 2 and line.lstrip().startswith("return"):
            while kept and (not kept[-1].strip() or len(kept[-1]) - len(kept[-1].lstrip()) >= indent):
                kept.pop()
            continue
        kept.append(line)
    return "\n".join(kept)
