"""The owners of streams in Redis: typed calls of the scripts of a service, and their typed replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from conquiet.errors import AlreadyClaimedError, ConfigError, PayloadError, StreamNotOwnedError
from conquiet.kit import codec
from conquiet.kit.chunks import by_number
from conquiet.kit.clock import Clock
from conquiet.wire.capabilities import is_group_lost
from conquiet.wire.connections import Connections
from conquiet.wire.groups import create_group
from conquiet.wire.keys import BalanceKeys
from conquiet.wire.parser import Reply
from conquiet.wire.scripts import Call, Script, run
from conquiet.wire.streams import pack

__all__ = ["Given", "Late", "Ledger", "Renewed", "Swept", "Taken"]

_LONGEST: Final = 1 << 20
"""Bytes of an entry of the input: the scripts decode no longer ones."""
_FEW: Final = 200
"""How many streams one call gives or takes back: a server does nothing else meanwhile."""
_CHUNK: Final = 500
"""How many any other call looks at."""
_ADD: Final = Script.named("balance_add")
_TAKE: Final = Script.named("balance_take")
_SWEEP: Final = Script.named("balance_sweep")
_CLAIM: Final = Script.named("balance_claim")
_REGRANT: Final = Script.named("balance_regrant")
_RECOVER: Final = Script.named("balance_recover")
_RENEW: Final = Script.named("balance_renew")
_FINISH: Final = Script.named("balance_finish")
_RELEASE: Final = Script.named("balance_release")
_POSITION: Final = Script.named("balance_position")


@dataclass(frozen=True, slots=True)
class Given:
    """A stream that the caller owns from now on."""

    stream: str
    info: Mapping[str, Any]
    epoch: int
    entry_id: str
    before: str = ""
    """The owner that was lost, if there was one."""


@dataclass(frozen=True, slots=True)
class Late:
    """A stream that has lost its owner."""

    stream: str
    info: Mapping[str, Any]
    epoch: int
    owner: str


@dataclass(frozen=True, slots=True)
class Taken:
    """New streams. ``deferred``: there may be more, which are left to other consumers."""

    given: Sequence[Given]
    set_aside: int
    merged: int
    deferred: bool
    last_id: str


@dataclass(frozen=True, slots=True)
class Swept:
    """Streams found without an owner; ``next_ms`` is when the next lease runs out if it is not renewed."""

    given: Sequence[Given]
    late: Sequence[Late]
    lag_ms: int
    next_ms: int | None
    staying: int
    """How many of those that were seen will be seen again."""
    is_last: bool
    """Whether there were no more to see."""


@dataclass(frozen=True, slots=True)
class Renewed:
    """The answer to a renewal."""

    lost: frozenset[str]
    alive: int
    """Consumers that were heard of lately."""
    total: int
    """Streams that were given out and are not finished."""
    room: int
    """How many more streams the others would take over."""


class Ledger:
    """The scripts of one service, for one consumer, over one link. Every change is fenced by owner and epoch."""

    def __init__(self, link: Connections, keys: BalanceKeys, owner: str, ttl: float, clock: Clock) -> None:
        self.link = link
        self.keys = keys
        self.owner = owner
        self.ttl = ttl
        self.clock = clock
        self._ttl_ms = max(1, round(ttl * 1000))

    async def open(self) -> None:
        """Make sure that the group exists; it begins with the first stream that was ever handed in."""
        keys = self.keys
        refusal = await create_group(self.link, keys.input, keys.group, "0")
        if refusal is not None and "maxmemory" not in str(refusal):  # the next read tells that it is not there
            self.link.refuse(keys.input, refusal)

    async def add(self, stream: str, info: Mapping[str, Any]) -> tuple[str, bool]:
        """Add a stream; returns the ID of its entry, and whether it is new."""
        entry = codec.encode_object({"DataStreamName": stream, "Info": dict(info)})
        if len(entry) > _LONGEST:
            raise PayloadError("$", f"is {len(entry)} bytes as JSON with its stream, and may have {_LONGEST}")
        id, is_new = await self._run(_ADD([self.keys.input, self.keys.owners], stream, entry))
        return id.decode(), is_new == 1

    async def take(self, most: int, has: int, *, hungry: bool) -> Taken:
        """Own up to ``most`` new streams; its fair share only, unless it is ``hungry``.

        A call looks at so many entries, and so long ones, that there may be more.
        """
        keys = self.keys
        names = [keys.input, keys.owners, keys.leases, keys.epochs, keys.members]
        given, aside, merged, deferred, last = await self._run(
            _TAKE(names, keys.group, *self._terms(), keys.mutex, keys.bad, _FEW, most, has, int(hungry))
        )
        return Taken([_given(row) for row in given], aside, merged, deferred == 1, last.decode())

    async def sweep(self, most: int, has: int, *, hungry: bool, skip: int = 0) -> Swept:
        """Own up to ``most`` streams that another has left; tell of the others. Looks at a page after ``skip``."""
        keys = self.keys
        names = [keys.input, keys.owners, keys.leases, keys.epochs, keys.positions, keys.members]
        given, late, lag, following, staying, more = await self._run(
            _SWEEP(names, keys.group, *self._terms(), keys.mutex, skip, _FEW, most, has, int(hungry))
        )
        left = [Late(name.decode(), _info(entry), int(epoch), owner.decode()) for name, entry, epoch, owner in late]
        after = following if following >= 0 else None
        return Swept([_given(row) for row in given], left, lag, after, staying, more == 0)

    async def recover(self, after: str) -> tuple[str, int]:
        """Make claimable what is pending without a lease, a page at a time from ``"-"`` on.

        Where to go on, empty after the last page, and how many entries were set aside.
        """
        keys = self.keys
        names = [keys.input, keys.owners, keys.leases, keys.members]
        following, aside, _ = await self._run(_RECOVER(names, keys.group, self._ttl_ms, keys.bad, after, _CHUNK))
        return following.decode(), aside

    async def claim(self, stream: str, known: int | None = None) -> Given:
        """Own one stream without an owner, or one that the caller owns in another epoch than it knows of."""
        keys = self.keys
        names = [keys.input, keys.owners, keys.leases, keys.epochs]
        mine = "" if known is None else known
        status, *rest = await self._run(_CLAIM(names, keys.group, *self._terms(), keys.mutex, stream, mine))
        if status == b"UNKNOWN":
            raise ConfigError(f"service {keys.service!r} has no unfinished stream {stream!r}")
        if status == b"HELD":
            raise AlreadyClaimedError(f"{rest[0].decode()!r} owns stream {stream!r} of service {keys.service!r}")
        entry, epoch, id = rest
        return Given(stream, _info(entry), int(epoch), id.decode())

    async def pending(self, after: str) -> tuple[list[str], str]:
        """IDs of entries that are the caller's, as the server knows it, a page at a time from ``"-"`` on.

        Also where to go on, empty after the last page.
        """
        keys = self.keys
        first = after if after == "-" else f"({after}"
        command = pack("XPENDING", keys.input, keys.group, first, "+", _CHUNK, self.owner)
        [reply] = await self.link.call_many(keys.input, [command])
        if isinstance(reply, Exception):
            if is_group_lost(reply):
                return [], ""
            self.link.refuse(keys.input, reply)
        ids = [id.decode() for id, *_ in reply]
        return ids, ids[-1] if len(ids) == _CHUNK else ""

    async def regrant(self, entry_ids: Sequence[str]) -> list[Given]:
        """Own, in new epochs, those of these streams that the caller owns as the server knows it."""
        keys = self.keys
        names = [keys.input, keys.owners, keys.leases, keys.epochs]
        given: list[Given] = []
        at = 0
        while at < len(entry_ids):
            page = entry_ids[at : at + _FEW]
            rows, seen = await self._run(_REGRANT(names, *self._terms(), keys.mutex, *page))
            given += [_given(row) for row in rows]
            at += seen
        return given

    async def renew(self, held: Sequence[tuple[str, int]], room: int = 0) -> Renewed:
        """Say that the consumer is alive, and renew the leases that it holds, if any.

        ``room`` is how many more streams of others it would take over.
        """
        keys = self.keys
        names = [keys.owners, keys.leases, keys.members, keys.rooms]
        terms = (*self._terms(), max(room, 0), keys.positions, keys.news, keys.mutex)
        lost: set[str] = set()
        alive = total = elsewhere = 0
        for page in list(by_number(held, _CHUNK)) or [held]:
            words = [word for pair in page for word in pair]
            gone, alive, total, elsewhere = await self._run(_RENEW(names, *terms, *words))
            lost.update(name.decode() for name in gone)
        return Renewed(frozenset(lost), alive, total, elsewhere)

    async def finish(self, stream: str, epoch: int, entry_id: str, *, again: bool = False) -> None:
        """Forget a finished stream. ``again``: the call was made before, and no answer came."""
        keys = self.keys
        names = [keys.input, keys.owners, keys.leases, keys.positions]
        reply = await self._run(_FINISH(names, keys.group, self.owner, epoch, keys.mutex, stream, entry_id))
        if not (again and reply == -1):
            self._check(stream, reply)

    async def release(self, held: Sequence[tuple[str, int]], *, leaving: bool = False) -> list[bool]:
        """Release unfinished streams; false for each that the caller no longer owned."""
        keys = self.keys
        names = [keys.owners, keys.leases, keys.members, keys.rooms]
        done: list[bool] = []
        pages = list(by_number(held, _FEW)) or [held]
        for page in pages:
            words = [word for pair in page for word in pair]
            terms = (self.owner, int(leaving and page is pages[-1]), keys.news, keys.mutex)
            reply = await self._run(_RELEASE(names, *terms, *words))
            done += [one == 1 for one in reply]
        return done

    async def move(self, stream: str, epoch: int, id: str) -> None:
        """Note that a stream was read up to ``id``."""
        names = [self.keys.owners, self.keys.positions]
        self._check(stream, await self._run(_POSITION(names, self.owner, epoch, stream, id)))

    async def position(self, stream: str) -> str:
        """The ID up to which a stream was read; ``0-0`` if it was not."""
        key = self.keys.positions
        found = await self.link.call(key, pack("HGET", key, stream))
        return found.decode() if found else "0-0"

    def _terms(self) -> tuple[str, int, int]:
        return self.owner, self._ttl_ms, self.clock.offset_ms

    def _check(self, stream: str, reply: Reply) -> None:
        if reply != 1:
            raise StreamNotOwnedError(
                f"stream {stream!r} of service {self.keys.service!r} is not the caller's any more"
            )

    async def _run(self, call: Call) -> Any:
        return await run(self.link, self.keys.input, call)


def _given(row: Sequence[bytes]) -> Given:
    name, entry, epoch, id, *before = row
    return Given(name.decode(), _info(entry), int(epoch), id.decode(), before[0].decode() if before else "")


def _info(entry: bytes) -> Mapping[str, Any]:
    """What was handed in along with a stream; nothing if a foreign writer's JSON is more than Lua minded."""
    try:
        found = codec.decode(entry)
    except codec.UNREADABLE:
        return {}
    info = cast("dict[str, Any]", found).get("Info") if isinstance(found, dict) else None
    return cast("dict[str, Any]", info) if isinstance(info, dict) else {}
