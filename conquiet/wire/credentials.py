"""Credentials that change: asked for when a connection is made, and again while it lives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final, Protocol, TypeAlias, cast
from weakref import WeakSet, WeakValueDictionary

from redis.asyncio.connection import AbstractConnection
from redis.credentials import CredentialProvider, StreamingCredentialProvider
from redis.exceptions import RedisError

from conquiet.errors import ConfigError
from conquiet.kit.loopthread import Threads, forks, new_lock
from conquiet.wire.parser import Replies
from conquiet.wire.streams import pack

__all__ = ["Credentials", "CredentialsError", "ProviderLike", "credentials_of"]

ProviderLike: TypeAlias = CredentialProvider | Callable[[], CredentialProvider]
"""A provider, or a function or class of a module that makes one: pickled by its import path, called in each process."""

_log = logging.getLogger("conquiet.wire")
RENEWED_AFTER: Final = 3600.0
"""Seconds after which a connection logs in again if its provider does not say when: services close those that have
not for hours."""
TRIED_AGAIN_AFTER: Final = 60.0
"""Seconds until the next try where that failed."""


class CredentialsError(RedisError):
    """A provider raised, or gave no credentials; what it raised is the ``__cause__``."""


class _Follower(Protocol):
    """A connection that is told of new credentials."""

    loop: asyncio.AbstractEventLoop

    def renew_login(self) -> None:
        """Log in again before the next command."""


class Credentials(CredentialProvider):
    """What connections are given instead of the user's provider: whatever that one does wrong is a ``RedisError``.

    There is one for each provider. A provider without ``get_credentials_async`` is asked in a thread. A streaming one
    is listened to: its word may come from any thread, and all open connections log in again before their next command.
    """

    _made: ClassVar[WeakValueDictionary[int, Credentials]] = WeakValueDictionary()

    def __init__(self, given: ProviderLike) -> None:
        self._given = given
        self._is_provider = hasattr(given, "get_credentials") and not isinstance(given, type)
        if not self._is_provider and not callable(given):
            raise ConfigError(f"a credential provider has get_credentials, or is a function that makes one: {given!r}")
        self._provider: CredentialProvider | None = None
        self._forks = -1
        self._lock = new_lock()
        self._followers: WeakSet[Any] = WeakSet()

    @classmethod
    def of(cls, given: ProviderLike) -> Credentials:
        """The one of this provider: some providers tell only one listener."""
        known = cls._made.get(id(given))  # which it keeps alive, so no other object has that number
        if known is None:
            known = cls._made[id(given)] = cls(given)
        return known

    @property
    def renewed_after(self) -> float | None:
        """Seconds after which a connection is to log in again unasked; ``None`` if the provider says when."""
        return None if isinstance(self._provider, StreamingCredentialProvider) else RENEWED_AFTER

    def follow(self, follower: _Follower) -> None:
        """Tell it when there are new credentials, for as long as it is there."""
        with self._lock:
            self._followers.add(follower)

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Never: connections here ask the other way."""
        raise NotImplementedError

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """A password, or a user and a password."""
        try:
            found = await _asked(self._here())
        except Exception as error:
            raise CredentialsError(f"the credential provider failed: {type(error).__name__}") from error
        words = [*cast("Sequence[object]", found)] if isinstance(found, tuple | list) else []
        if len(words) not in (1, 2) or not all(isinstance(word, str) for word in words):
            raise CredentialsError("the credential provider gave neither (password,) nor (user, password)")
        return cast("tuple[str] | tuple[str, str]", tuple(words))

    async def log_in(self, connection: AbstractConnection, replies: Replies) -> bool:
        """Log in on a connection that is open and quiet; where that fails, it stays logged in as it was."""
        try:
            words = await self.get_credentials_async()
            await connection.send_packed_command([pack("AUTH", *words)], check_health=False)
            [refusal] = await replies.read_replies(1)
        except CredentialsError as error:
            refusal = error
        if isinstance(refusal, Exception):
            _log.warning("cannot renew the login of a connection, which goes on with the former: %s", refusal)
        return not isinstance(refusal, Exception)

    def _here(self) -> CredentialProvider:
        """The provider in this process: a function makes another in a forked child."""
        with self._lock:
            if self._provider is None or (self._forks != forks() and not self._is_provider):
                given = self._given
                provider = cast("CredentialProvider", given if self._is_provider else cast("Any", given)())
                if isinstance(provider, StreamingCredentialProvider):
                    provider.on_next(cast("Any", self._heard))
                    provider.on_error(cast("Any", _not_renewed))
                self._provider, self._forks = provider, forks()
            return self._provider

    def _heard(self, token: object) -> _Done:
        with self._lock:
            followers: list[_Follower] = list(self._followers)
        for follower in followers:
            if follower.loop is _loop_here():
                follower.renew_login()
                continue
            with suppress(RuntimeError):  # its loop has been closed, and so has it
                follower.loop.call_soon_threadsafe(follower.renew_login)
        return _Done()


class _Done:
    """For providers that await what they call, and those that do not."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


def credentials_of(connection: AbstractConnection) -> Credentials | None:
    """The credentials of a connection, if they may change."""
    found = getattr(connection, "credential_provider", None)
    return found if isinstance(found, Credentials) else None


async def _asked(provider: CredentialProvider) -> object:
    way: Any = getattr(type(provider), "get_credentials_async", None)
    if way is not None and way is not CredentialProvider.get_credentials_async:
        return await provider.get_credentials_async()
    threads = Threads(1, "conquiet-credentials")
    try:
        return await threads.run(provider.get_credentials)
    finally:
        threads.close()


def _loop_here() -> asyncio.AbstractEventLoop | None:
    with suppress(RuntimeError):
        return asyncio.get_running_loop()
    return None


def _not_renewed(error: Exception) -> _Done:
    _log.warning("the credential provider gives no new credentials: %s", type(error).__name__)
    return _Done()
