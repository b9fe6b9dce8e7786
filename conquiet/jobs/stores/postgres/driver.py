"""The driver, psycopg 3: what conquiet adds to it, and its errors as conquiet's. Imported only when a store is made."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final, TypeVar, cast

import anyio
from psycopg import (
    AsyncConnection,
    DataError,
    Error,
    IntegrityError,
    ProgrammingError,
    adapt,
    conninfo,
    errors,
    pq,
    waiting,
)
from psycopg.abc import PQGen
from psycopg.types.numeric import Int8BinaryDumper

from conquiet.errors import ConfigError, ConquietError, QueueError
from conquiet.jobs.stores.postgres.arrays import Array, Blobs, Integers, Texts
from conquiet.kit.service import Background

__all__ = [
    "CROSSED",
    "FAILURES",
    "GOODBYE",
    "HARMLESS",
    "HELD",
    "Connection",
    "connection_string",
    "is_about_options",
    "refused",
    "teach",
    "with_plans",
]

_R = TypeVar("_R")

FAILURES: Final = (Error, OSError, UnicodeError)
"""What the driver raises."""

CROSSED: Final = (errors.UniqueViolation, errors.SerializationFailure, errors.DeadlockDetected)
"""A key is taken; a job of that key was just removed; two add the same keys in different orders. Nothing was done."""

HELD: Final = errors.LockNotAvailable
"""Another transaction holds the lock, and the wait for it has ended. Nothing was done."""

HARMLESS: Final = (
    DataError,
    IntegrityError,
    ProgrammingError,
    errors.SerializationFailure,
    errors.DeadlockDetected,
    errors.LockNotAvailable,
)
"""The server refused one statement; the connection is as good as before."""

_MISSING: Final = (errors.UndefinedTable, errors.InvalidSchemaName, errors.UndefinedColumn)

# A peer that is gone without a word is noticed within half a minute rather than after hours.
_DEFAULTS: Final = {
    "connect_timeout": "10",
    "fallback_application_name": "conquiet",
    "keepalives_idle": "15",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}


# How the statements of a store are planned. Each has exactly one good plan, by its index; a plan that was made while
# the table was small and kept when it has grown must be that one too. They come with the connection and are never set
# in a session: a pooler gives sessions to others.
_PLANS: Final = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_sort": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
    "default_transaction_isolation": r"read\ committed",
}

_INTERVAL: Final = 0.1
"""How often the driver looks up from a wait, in seconds; its own number."""
GOODBYE: Final = 1.0
"""Seconds that a server has to say that it has called off what a cancelled caller had asked for."""


class Connection(AsyncConnection[tuple[Any, ...]]):
    """The driver's connection, whose calls end soon when they are cancelled.

    The driver itself asks the server to call the statement off, and waits five seconds for that and five for the end,
    unless it is cancelled again meanwhile, as a cancelled scope does at once. Here it is one second, whatever comes.
    """

    @classmethod
    async def opened(cls, dsn: str) -> Connection:
        """A connection that commits each statement; none if the call is cancelled meanwhile.

        The driver leaves one that was not finished to the garbage collector, and a reference to the cancelled task, or
        to its error, keeps the server's process for it as well. In a task of its own it ends with that task, to which
        nothing here may refer then.
        """
        connecting, ended = Background().start(cls.connect(dsn, autocommit=True), "connect"), asyncio.Event()
        connecting.add_done_callback(lambda _: ended.set())
        try:
            await ended.wait()
            return cast("Connection", connecting.result())
        except asyncio.CancelledError:
            connecting.add_done_callback(_unwanted)
            connecting.cancel()
            raise
        finally:
            del connecting

    async def wait(self, gen: PQGen[_R], interval: float = _INTERVAL, timeout: float | None = None) -> _R:
        """What ``gen`` comes to; the connection is of no use after a cancellation."""
        try:
            return await waiting.wait_async(gen, self.pgconn.socket, interval=interval, timeout=timeout)
        except asyncio.CancelledError:
            if self.pgconn.transaction_status == pq.TransactionStatus.ACTIVE:
                with anyio.move_on_after(GOODBYE, shield=True), suppress(*FAILURES):
                    await self.cancel_safe(timeout=GOODBYE)
                    await waiting.wait_async(gen, self.pgconn.socket, interval=interval)
            raise


def _unwanted(connecting: asyncio.Task[AsyncConnection[tuple[Any, ...]]]) -> None:
    """Close a connection that was there in the moment in which its caller went."""
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().pgconn.finish()


class _ArrayDumper(adapt.Dumper):
    format = pq.Format.BINARY

    def dump(self, obj: Array) -> bytes:
        return obj.data


def teach(adapters: adapt.AdaptersMap) -> None:
    """Let a connection or a cursor send what the statements of a store take."""
    for kind in (Texts, Blobs, Integers):
        adapters.register_dumper(kind, type(f"{kind.__name__}Dumper", (_ArrayDumper,), {"oid": kind.oid}))
    # Else each magnitude is a type of its own, and each mixture of them a statement to be prepared.
    adapters.register_dumper(int, Int8BinaryDumper)


def connection_string(dsn: object) -> str:
    """``dsn`` with what it leaves open; ``ConfigError`` if it is none."""
    # Neither the error's text nor its cause quotes it: it may hold a password.
    if isinstance(dsn, str) and dsn.strip():
        try:
            given: dict[str, Any] = conninfo.conninfo_to_dict(dsn)
            return conninfo.make_conninfo(**{**_DEFAULTS, **given})
        except (Error, UnicodeError):
            pass
    kind = "an empty string" if isinstance(dsn, str) and not dsn.strip() else f"this {type(dsn).__name__}"
    raise ConfigError(
        f"dsn must be like 'postgresql://user:password@host:5432/database', which {kind} is not"
    ) from None


def with_plans(dsn: str) -> str:
    """``dsn`` with the settings by which the statements of a store are planned, after its own.

    Those of the environment (``PGOPTIONS``) would not hold beside them, so they are among them.
    """
    given = conninfo.conninfo_to_dict(dsn).get("options") or _default("options")
    ours = [f"-c {name}={value}" for name, value in _PLANS.items()]
    return conninfo.make_conninfo(dsn, options=" ".join([str(given), *ours]).strip())


def _default(keyword: str) -> str:
    """What holds for connections that say nothing of it."""
    values = (one.val for one in pq.Conninfo.get_defaults() if one.keyword == keyword.encode())
    return (next(values, None) or b"").decode()


def is_about_options(error: BaseException) -> bool:
    """Whether a connection was refused because it brought settings along: by a pooler."""
    text = str(error)
    return "startup parameter" in text or "options" in text


def refused(what: str, schema: str, error: BaseException) -> ConquietError:
    """What to raise for a failure of the driver, from it."""
    if isinstance(error, _MISSING):
        return ConfigError(f"{what}: schema {schema!r} lacks the tables of this version: run `await store.migrate()`")
    # Values out of range or with a NUL; sent nowhere, or refused as a whole.
    if isinstance(error, UnicodeError | DataError):
        return ConfigError(f"{what}: PostgreSQL cannot keep what was given: {_brief(error)}")
    return QueueError(f"{what}: PostgreSQL failed: {_brief(error)}")


def _brief(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
