"""Hearing that keys have expired: a hint that may come late or never, so nothing may depend on it."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, cast

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError

from conquiet.errors import QueueError
from conquiet.kit.policy import Backoff
from conquiet.kit.retrying import Lines, Retrying
from conquiet.wire.address import Endpoint
from conquiet.wire.connections import Connections
from conquiet.wire.parser import Replies, Reply
from conquiet.wire.shared_connection import SharedConnection
from conquiet.wire.streams import pack

__all__ = ["Expiry", "merged"]

_log = logging.getLogger("conquiet.wire")
_SETTING: Final = "notify-keyspace-events"
_SPECIAL: Final = re.compile(r"[*?\[\]\\^]")
_AGAIN: Final = Backoff(base=0.1, cap=30.0)
_BEAT: Final = 5.0
"""Seconds of silence after which the server is asked whether it is still there, and still the right one."""
_GATHER: Final = 0.02
"""Seconds for which more is waited for: keys that were set together expire together."""


class Expiry:
    """Calls ``heard`` when keys that begin with ``prefix``, all of one slot, have expired, and may have unnoticed.

    It listens at the node that holds them, on a connection of its own, and goes on by itself when that is lost or the
    keys move. ``enable`` has the server tell of such events, if it may be asked to: what else it tells of stays.
    """

    def __init__(self, link: Connections, prefix: str, heard: Callable[[], None], *, enable: bool = False) -> None:
        self._link = link
        self._prefix = prefix
        self._heard = heard
        self._enable = enable
        self._retrying = Retrying(Lines(_log, math.inf), backoff=_AGAIN)
        database = link.address.settings.get("db") or 0
        self._pattern = f"__keyspace@{database}__:" + _SPECIAL.sub(r"\\\g<0>", prefix) + "*"

    async def listen(self) -> None:
        """For as long as this runs."""
        while True:
            try:
                await self._listen_at(await self._link.home(self._prefix))  # until the keys have moved
            except QueueError as error:
                await self._retrying.failed("cannot listen for expired keys", error)

    async def _listen_at(self, endpoint: Endpoint) -> None:
        address = self._link.address
        lane = SharedConnection(partial(address.connection, endpoint), address.timeout)
        try:
            connection, parser = await lane.connected()
            async with asyncio.timeout(address.timeout):
                if self._enable:
                    await self._have_them_told(connection, parser)
                await _ask(connection, parser, "PSUBSCRIBE", self._pattern)
            self._retrying.succeeded()
            self._heard()  # of what has expired before
            await self._follow(endpoint, connection, parser)
        except (RedisError, OSError) as error:
            self._link.refuse(self._prefix, error)
        finally:
            await lane.aclose()

    async def _follow(self, endpoint: Endpoint, connection: AbstractConnection, parser: Replies) -> None:
        """Until the keys are elsewhere."""
        is_asked = False
        while True:
            try:
                async with asyncio.timeout(_BEAT):
                    [news] = await parser.read_replies(1)
            except TimeoutError:
                if is_asked:
                    raise TimeoutError(f"no answer within {_BEAT:g} s") from None
                if await self._link.home(self._prefix) != endpoint:
                    return
                await connection.send_packed_command([pack("PING")], check_health=False)
                is_asked = True
            else:
                is_asked = False
                if _is_expiry(news):
                    await _gather(parser)
                    self._heard()

    async def _have_them_told(self, connection: AbstractConnection, parser: Replies) -> None:
        try:
            [_, flags] = await _ask(connection, parser, "CONFIG", "GET", _SETTING)
            wanted = merged(flags.decode())
            if wanted is not None:
                await _ask(connection, parser, "CONFIG", "SET", _SETTING, wanted)
        except (RedisError, ValueError) as error:
            self._enable = False
            _log.warning("the server cannot be asked to tell of expired keys, they are found without: %s", error)


def merged(flags: str) -> str | None:
    """``notify-keyspace-events`` with what is needed here added to it; ``None`` if that is there already."""
    missing = ("" if "K" in flags else "K") + ("" if {"x", "A"} & {*flags} else "x")
    return flags + missing if missing else None


async def _ask(connection: AbstractConnection, parser: Replies, *command: str) -> Any:
    await connection.send_packed_command([pack(*command)], check_health=False)
    [reply] = await parser.read_replies(1)
    if isinstance(reply, Exception):
        raise reply
    return reply


async def _gather(parser: Replies) -> None:
    """Take in what comes within a moment."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_GATHER):
            while True:
                await parser.read_replies(1)


def _is_expiry(news: Reply) -> bool:
    return isinstance(news, list) and [*cast("list[object]", news)][::3] == [b"pmessage", b"expired"]
