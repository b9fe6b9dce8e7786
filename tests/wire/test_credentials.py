"""Credentials that change: a provider of the user's is asked, believed, and never lets its own errors out."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.credentials import CredentialProvider, StreamingCredentialProvider

from conquiet import Address, ConfigError, QueueConfig, QueueError, RedisStreamsQueue
from conquiet.wire import credentials
from conquiet.wire.connections import Connections
from conquiet.wire.credentials import CredentialsError
from conquiet.wire.expiry import Expiry
from conquiet.wire.streams import pack
from tests.rigs.asking import ask
from tests.rigs.waiting import LONG, eventually

pytestmark = pytest.mark.any_server

WHO = pack("ACL", "WHOAMI")


class Changing(CredentialProvider):
    """Logs in as the user that ``now`` is, or raises it."""

    def __init__(self, now: Any) -> None:
        self.now = now
        self.asked = 0

    async def get_credentials_async(self) -> Any:
        self.asked += 1
        if isinstance(self.now, BaseException):
            raise self.now
        return self.now


class Plain(CredentialProvider):
    """One without ``async``, as most are."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def get_credentials(self) -> Any:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()  # it may take long, and would hold up all that runs here
        return self.words


class Streaming(StreamingCredentialProvider):
    """Tells of new credentials, to one listener alone."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self.tell: Callable[[Any], Any] | None = None
        self.err: Callable[[Exception], Any] | None = None

    def get_credentials(self) -> Any:
        return self.words

    async def get_credentials_async(self) -> Any:
        return self.words

    def on_next(self, callback: Callable[[Any], Any]) -> None:
        self.tell = callback

    def on_error(self, callback: Callable[[Exception], Any]) -> None:
        self.err = callback

    def is_streaming(self) -> bool:
        return True


@pytest.fixture
async def users(url: str) -> AsyncIterator[list[tuple[str, str]]]:
    """Two users that may do everything."""
    names = [f"u{secrets.token_hex(4)}" for _ in range(2)]
    for name in names:
        await ask(url, "ACL", "SETUSER", name, "reset", "on", ">secret", "allkeys", "allchannels", "+@all")
    yield [(name, "secret") for name in names]
    for name in names:
        await ask(url, "ACL", "DELUSER", name)


def address_of(url: str, provider: Any, **settings: Any) -> Address:
    host, _, port = url.rpartition("@")[2].rpartition("//")[2].partition(":")
    return Address("single", ((host, int(port)),), credential_provider=provider, **settings)


@asynccontextmanager
async def linked(url: str, provider: Any, **settings: Any) -> AsyncIterator[Connections]:
    async with aclosing(Connections(address_of(url, provider, **settings))) as link:
        yield link


# --- logging in ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Changing, lambda words: Plain(*words), lambda words: Streaming(*words)])
async def test_a_provider_logs_connections_in(
    url: str, users: list[tuple[str, str]], kind: Callable[[Any], CredentialProvider], caplog: pytest.LogCaptureFixture
) -> None:
    async with linked(url, kind(users[0])) as link:
        assert await link.call("any", WHO) == users[0][0].encode()
    assert caplog.messages == []


async def test_a_provider_of_a_client_is_taken_over(url: str, users: list[tuple[str, str]]) -> None:
    [seed] = address_of(url, None).seeds
    client = Redis(host=seed[0], port=seed[1], credential_provider=Changing(users[0]))
    async with aclosing(Connections(Address.of(client))) as link:
        assert await link.call("any", WHO) == users[0][0].encode()


async def test_each_new_connection_asks_anew(url: str, users: list[tuple[str, str]]) -> None:
    provider = Changing(users[0])
    async with linked(url, provider) as link:
        await link.call("any", PING := pack("PING"))
        provider.now = users[1]
        await ask(url, "CLIENT", "KILL", "USER", users[0][0])

        async def answers() -> bool:
            with suppress(QueueError):
                return bool(await link.call("any", PING) == b"PONG")
            return False

        await eventually(answers, "there is another connection")
        assert await link.call("any", WHO) == users[1][0].encode()


def test_a_url_holds_no_provider() -> None:
    for url in ("redis://a?credential_provider=os:system", "redis+sentinel://a/m?sentinel_credential_provider=x"):
        with pytest.raises(ConfigError, match="credential_provider is no text"):
            Address.of(url)


def test_what_is_no_provider_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="get_credentials"):
        Address.of("redis://a", credential_provider=7)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="credential_provider"):
        Address.of("redis://user:password@a", credential_provider=Changing(("a", "b")))


# --- whatever goes wrong there --------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [5.0, None])
@pytest.mark.parametrize(
    "failure",
    [ValueError("no token"), TimeoutError("of its own"), OSError("no way"), None, (), ("a", 1), ("a", "b", "c"), 7],
    ids=repr,
)
async def test_every_failure_of_a_provider_is_a_queue_error(
    url: str, config: QueueConfig, failure: Any, timeout: float | None
) -> None:
    address = address_of(url, Changing(failure), timeout=timeout)
    async with aclosing(RedisStreamsQueue(address, config)) as queue:
        for call in (lambda: queue.enqueue({"n": 1}), lambda: queue.read(1000)):
            with pytest.raises(QueueError, match="credential provider") as caught:
                await call()
            assert isinstance(caught.value.__cause__, CredentialsError)
            if isinstance(failure, Exception):
                assert caught.value.__cause__.__cause__ is failure


async def test_what_a_provider_says_of_its_failure_is_not_repeated(url: str, config: QueueConfig) -> None:
    address = address_of(url, Changing(ValueError("the token hunter2 is bad")))
    async with aclosing(RedisStreamsQueue(address, config)) as queue:
        with pytest.raises(QueueError) as caught:
            await queue.enqueue({"n": 1})
        assert "hunter2" not in str(caught.value)


async def test_a_provider_that_fails_for_a_while_does_not_end_the_hint_of_expired_keys(
    url: str, users: list[tuple[str, str]]
) -> None:
    provider, heard = Changing(ValueError("not yet")), asyncio.Event()
    async with linked(url, provider) as link:
        listening = asyncio.create_task(Expiry(link, "t:hint", heard.set).listen())
        try:
            await eventually(lambda: provider.asked > 1, "it tries again")
            provider.now = users[0]
            async with asyncio.timeout(LONG):
                await heard.wait()
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)


# --- logging in again -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["awaited", "called", "in a thread"])
async def test_open_connections_log_in_again_when_there_are_new_credentials(
    url: str, users: list[tuple[str, str]], config: QueueConfig, how: str
) -> None:
    provider = Streaming(*users[0])
    async with RedisStreamsQueue(address_of(url, provider), config) as queue:
        await queue.read(1)
        before = await logins(url, users)
        assert {user for _, user in before} == {users[0][0]}
        provider.words = users[1]
        assert provider.tell is not None
        if how == "in a thread":
            await asyncio.to_thread(provider.tell, object())
        elif (awaited := provider.tell(object())) is not None and how == "awaited":
            await awaited
        await queue.enqueue({"n": 1})
        await queue.read(1)
        after = await logins(url, users)
        assert {user for _, user in after} == {users[1][0]}
        assert {id for id, _ in after} == {id for id, _ in before}, "they are the same connections"


async def logins(url: str, users: list[tuple[str, str]]) -> set[tuple[str, str]]:
    rows = await ask(url, "CLIENT LIST")
    return {(row["id"], row["user"]) for row in rows if row["user"] in {name for name, _ in users}}


async def test_two_addresses_of_one_provider_are_both_told(url: str, users: list[tuple[str, str]]) -> None:
    provider = Streaming(*users[0])
    async with linked(url, provider) as one, linked(url, provider) as other:
        for link in (one, other):
            await link.call("any", WHO)
        provider.words = users[1]
        assert provider.tell is not None
        await provider.tell(object())
        assert {await link.call("any", WHO) for link in (one, other)} == {users[1][0].encode()}


async def test_a_connection_logs_in_again_from_time_to_time(
    url: str, users: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "RENEWED_AFTER", 0.01)
    provider = Changing(users[0])
    async with linked(url, provider) as link:
        await link.call("any", WHO)
        provider.now = users[1]

        async def is_another() -> bool:
            return bool(await link.call("any", WHO) == users[1][0].encode())

        await eventually(is_another, "it has logged in again")
        [endpoint] = link.address.seeds
        assert link.opened(endpoint) == 1


@pytest.mark.parametrize("trouble", [ValueError("no token"), ("nobody", "wrong")], ids=["provider", "server"])
async def test_a_login_that_cannot_be_renewed_ends_no_connection(
    url: str, users: list[tuple[str, str]], caplog: pytest.LogCaptureFixture, trouble: Any
) -> None:
    provider = Streaming(*users[0])
    async with linked(url, provider) as link:
        await link.call("any", WHO)
        provider.get_credentials_async = Changing(trouble).get_credentials_async  # type: ignore[method-assign]
        assert provider.tell is not None
        await provider.tell(object())
        with caplog.at_level(logging.WARNING, "conquiet.wire"):
            assert await link.call("any", WHO) == users[0][0].encode()
        assert "cannot renew the login" in caplog.text


async def test_a_provider_that_cannot_renew_is_told_of(url: str, caplog: pytest.LogCaptureFixture) -> None:
    provider = Streaming("x")
    async with linked(url, provider) as link:
        with suppress(QueueError):
            await link.call("any", WHO)
        assert provider.err is not None
        await provider.err(ValueError("hunter2"))
        assert "no new credentials: ValueError" in caplog.text
        assert "hunter2" not in caplog.text


# --- in other processes ---------------------------------------------------------------------------------------


def from_environment() -> CredentialProvider:
    """What a worker's process makes of the function's import path."""
    return Changing(tuple(os.environ["TEST_LOGIN"].split(":")))


def test_an_address_travels_with_a_function_that_makes_its_provider() -> None:
    address = Address.of("redis://a:7", credential_provider=from_environment)
    assert pickle.loads(pickle.dumps(address)) == address
    assert b"from_environment" in pickle.dumps(address)


def test_a_provider_that_cannot_travel_says_what_can() -> None:
    provider = Changing(("a", "b"))
    provider.now = (lock := __import__("threading").Lock())
    assert lock
    with pytest.raises(ConfigError, match="import path"):
        pickle.dumps(Address.of("redis://a", credential_provider=provider))


@pytest.mark.slow
async def test_another_process_makes_a_provider_of_its_own(url: str, users: list[tuple[str, str]]) -> None:
    address = address_of(url, from_environment)
    program = (
        "import asyncio, pickle, sys; from conquiet.wire.connections import Connections\n"
        "from conquiet.wire.streams import pack\n"
        "link = Connections(pickle.loads(bytes.fromhex(sys.argv[1])))\n"
        "print(asyncio.run(link.call('any', pack('ACL', 'WHOAMI'))).decode())"
    )
    words = [sys.executable, "-c", program, pickle.dumps(address).hex()]
    environ = {**os.environ, "TEST_LOGIN": ":".join(users[0]), "PYTHONPATH": os.getcwd()}
    done = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, env=environ, check=False)
    assert done.stdout.strip() == users[0][0], done.stderr
