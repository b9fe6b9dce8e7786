"""Where a Redis is and how to talk to it: a recipe that can be pickled, compared and printed.

The one place that makes connections. Whatever the recipe came from, a URL or a client of the user's, they
all speak RESP2, decode nothing, retry nothing and have no read time-out of their own: the object that holds
one decides how long an answer may take.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from inspect import Parameter, signature
from typing import Any, Final, Literal, TypeAlias, cast
from urllib.parse import ParseResult, unquote, urlencode, urlparse

from redis import DriverInfo
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.connection import (
    AbstractConnection,
    BlockingConnectionPool,
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
    parse_url,
)
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool, SentinelManagedConnection
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from conquiet.errors import ConfigError
from conquiet.kit import rules
from conquiet.wire.credentials import Credentials, ProviderLike
from conquiet.wire.internals import remap_of, seeds_of, sentinels_of

__all__ = ["Address", "AddressLike", "Endpoint"]

Endpoint: TypeAlias = tuple[str, int]
"""Host and port of a node; for a Unix socket its path and 0."""

_SCHEMES: Final = (
    "redis://, rediss://, unix://, redis+sentinel://, rediss+sentinel://, redis+cluster:// or rediss+cluster://"
)
_PORTS: Final = {"": 6379, "cluster": 6379, "sentinel": 26379}
_DEFAULT_TIMEOUT: Final = 5.0

_WANTED: Final = frozenset(
    {
        *("client_name", "credential_provider", "db", "password", "redis_connect_func", "socket_connect_timeout"),
        *("socket_keepalive", "socket_keepalive_options", "socket_type", "username"),
    }
)
"""What is taken over of the settings that every connection of redis-py takes: who connects to what, and over what.
How replies are read, what is retried and who is told of maintenance is decided here."""
_WHERE: Final = frozenset({"host", "path", "port"})
_OBJECTS: Final = frozenset({"credential_provider", "redis_connect_func"})
"""Settings that no URL can hold."""


@dataclass(frozen=True, slots=True)
class Address:
    """A Redis: one server, the master behind Sentinels, or a Cluster.

    ``Address.of`` takes a URL, another address or a ``redis.asyncio`` client, of which only the settings are
    used: its own connections stay untouched and open.

    ``credential_provider`` is asked for each new connection, and open ones log in again: when a streaming provider has
    new credentials, else every hour. Pass a provider, or a function or class of a module that makes one: an address
    with it can be pickled, by its import path, and each process makes a provider of its own.
    """

    kind: Literal["single", "sentinel", "cluster"]
    seeds: tuple[Endpoint, ...]
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    connection_class: type[AbstractConnection] = Connection
    service: str = ""
    sentinel_settings: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    """How the Sentinels are reached. ``ssl`` says whether by TLS; without it, they are as their master is."""
    timeout: float | None = _DEFAULT_TIMEOUT
    remap: Callable[[Endpoint], Endpoint] | None = None
    """Where a Cluster node is reached that announces itself under another address."""

    credential_provider: ProviderLike | None = field(default=None, repr=False)

    @classmethod
    def of(cls, source: AddressLike, *, credential_provider: ProviderLike | None = None) -> Address:
        """The address behind ``source``; ``ConfigError`` says what to pass instead if there is none."""
        if credential_provider is not None:
            return _checked(replace(cls.of(source), credential_provider=credential_provider))
        if isinstance(source, Address):
            return source
        if isinstance(source, str):
            return _from_url(source)
        if isinstance(source, Redis):
            return _from_client(source)
        if isinstance(source, RedisCluster):
            return _from_cluster(source)
        raise ConfigError(
            f"expected a URL, a redis.asyncio.Redis or a redis.asyncio.RedisCluster, not {type(source)!r}"
        )

    def connection(self, endpoint: Endpoint) -> AbstractConnection:
        """A new connection to ``endpoint``, not yet open."""
        settings = self.settings
        if self.credential_provider is not None:
            settings = {**settings, "credential_provider": self.credential_provider}
        return _build(self.connection_class, endpoint, settings)

    def answering_within(self, seconds: float) -> Address:
        """The same Redis, for connections that are given up after ``seconds`` of silence, if that is sooner."""
        return replace(self, timeout=seconds if self.timeout is None else min(self.timeout, seconds))

    def sentinel(self, endpoint: Endpoint) -> AbstractConnection:
        """A new connection to the Sentinel at ``endpoint``, not yet open."""
        settings = {name: value for name, value in self.sentinel_settings.items() if name != "ssl"}
        return _build(SSLConnection if self._sentinels_use_tls else Connection, endpoint, settings)

    def for_sentinels(self) -> dict[str, Any]:
        """What a client of redis-py for a Sentinel is made with."""
        patience = {"socket_timeout": self.timeout, "socket_connect_timeout": self.timeout}
        settings = {**patience, **_wrapped(self.sentinel_settings), "ssl": self._sentinels_use_tls}
        settings.pop("socket_type", None)  # which a client does not take
        return {**settings, "protocol": 2, "retry": Retry(NoBackoff(), 0), "driver_info": _driver()}

    @property
    def _sentinels_use_tls(self) -> bool:
        return bool(self.sentinel_settings.get("ssl", issubclass(self.connection_class, SSLConnection)))

    def reached_at(self, endpoint: Endpoint) -> Endpoint:
        """Where the node is reached that announces itself as ``endpoint``."""
        return self.remap(endpoint) if self.remap else endpoint

    def __reduce__(self) -> tuple[type[Address], tuple[Any, ...]]:
        if self.credential_provider is not None:
            _checked_to_travel(self.credential_provider)
        return Address, tuple(getattr(self, each.name) for each in fields(self))

    def __str__(self) -> str:
        """For people and logs: never a user name or a password."""
        nodes = ",".join(host if not port else f"{host}:{port}" for host, port in self.seeds)
        return {"single": nodes, "sentinel": f"Sentinel {nodes}/{self.service}", "cluster": f"Cluster {nodes}"}[
            self.kind
        ]


AddressLike: TypeAlias = str | Address | Redis | RedisCluster
"""Whatever tells where a Redis is."""


def _checked_to_travel(provider: ProviderLike) -> None:
    try:
        pickle.dumps(provider)
    except Exception as error:  # whatever its own methods raise
        advice = "pass a function of a module that makes it, which is pickled by its import path"
        raise ConfigError(f"a {type(provider).__name__} of credentials cannot be pickled: {advice}") from error


def _build(
    connection_class: type[AbstractConnection], endpoint: Endpoint, settings: Mapping[str, Any]
) -> AbstractConnection:
    host, port = endpoint
    unix = issubclass(connection_class, UnixDomainSocketConnection)
    where: dict[str, Any] = {"path": host} if unix else {"host": host, "port": port}
    ours: dict[str, Any] = {
        "socket_timeout": None,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "driver_info": _driver(),
    }
    return connection_class(**{**_wrapped(settings), **where, **ours})


def _wrapped(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings whose provider of credentials, if there is one, fails as Redis fails."""
    provider = settings.get("credential_provider")
    return {**settings} if provider is None else {**settings, "credential_provider": Credentials.of(provider)}


@cache
def _driver() -> DriverInfo:
    """How ``CLIENT LIST`` shows the library."""
    try:
        return DriverInfo().add_upstream_driver("conquiet", version("conquiet"))
    except PackageNotFoundError:  # shipped as bare files, as Spark's --py-files does
        return DriverInfo()


def _checked(address: Address) -> Address:
    """``address``, if redis-py accepts its settings: a misspelt option is found now, not at the first call."""
    if address.timeout is not None:
        rules.seconds("socket_timeout", address.timeout)
    unix = issubclass(address.connection_class, UnixDomainSocketConnection)
    if not unix and not all(0 < port < 65536 for _, port in address.seeds):
        raise ConfigError(f"a port is from 1 to 65535: {address.seeds!r}")
    if not all(host for host, _ in address.seeds):
        raise ConfigError(f"an address names a host or a socket's path, but {address.seeds!r} does not")
    try:
        for seed in address.seeds:
            (address.sentinel if address.kind == "sentinel" else address.connection)(seed)
        address.connection(address.seeds[0])
    except (TypeError, ValueError, RedisError) as error:
        raise ConfigError(f"cannot make a connection to {address}: {error}") from error
    return address


# --- from a URL --------------------------------------------------------------------------------------


def _from_url(url: str) -> Address:
    # No error here quotes more of the URL than its scheme, or chains to one that does: it may hold a password.
    prefix, separator, _ = url.partition("://")
    scheme, _, kind = prefix.partition("+")
    if not separator or not url.isascii():
        raise ConfigError(f"a Redis URL is a non-empty text in ASCII (percent-encoded) that starts with {_SCHEMES}")
    if scheme not in ("redis", "rediss", "unix") or kind not in _PORTS or (scheme == "unix" and kind):
        raise ConfigError(f"a Redis URL starts with {_SCHEMES}, not {prefix!r}")
    try:
        parsed = urlparse(url)
        hosts = _hosts(parsed, _PORTS[kind])
        settings: dict[str, Any] = dict(parse_url(_for_redis_py(parsed, scheme, kind)))
    except ValueError as error:
        raise ConfigError(f"cannot read the Redis URL: {_rule_of(error)}") from None
    if "@" in parsed.path + parsed.fragment:  # what was meant for a password would be a part of the path, and be shown
        raise ConfigError("special characters of a Redis URL are percent-encoded: '/' of a password, '@' of a path")
    if objects := sorted(name for name in settings if name.removeprefix("sentinel_") in _OBJECTS):
        raise ConfigError(f"{objects[0]} is no text: pass Address.of(url, credential_provider=...), or a client")
    connection_class: type[AbstractConnection] = settings.get("connection_class", Connection)
    timeout = settings.pop("socket_timeout", _DEFAULT_TIMEOUT)
    if kind == "sentinel":
        return _checked(_sentinel_url(parsed, hosts, settings, connection_class, timeout))
    if scheme == "unix":
        seeds: tuple[Endpoint, ...] = ((str(settings.pop("path", "")), 0),)
    else:
        seeds = _one_or_many(parsed, hosts, kind)
    return _checked(
        Address(
            "cluster" if kind else "single", seeds, _kept(settings, connection_class), connection_class, timeout=timeout
        )
    )


def _rule_of(error: ValueError) -> str:
    about_option = str(error).startswith("Invalid value for")  # redis-py names the option, not the value
    return str(error) if about_option else "a port is a number, and special characters are percent-encoded"


def _one_or_many(parsed: ParseResult, hosts: tuple[Endpoint, ...], kind: str) -> tuple[Endpoint, ...]:
    database = parsed.path.strip("/")
    if database and (not database.isdigit() or (kind and int(database))):
        raise ConfigError("the path of a Redis URL is the number of a database, and a Cluster has only database 0")
    if not kind and len(hosts) > 1:
        raise ConfigError("a redis:// URL names one server: redis+cluster:// or redis+sentinel:// take several")
    return hosts


def _hosts(parsed: ParseResult, default_port: int) -> tuple[Endpoint, ...]:
    _, _, hosts = parsed.netloc.rpartition("@")
    nodes = [urlparse(f"//{host}") for host in hosts.split(",")]
    return tuple(
        (unquote(node.hostname or "localhost"), default_port if node.port is None else node.port) for node in nodes
    )


def _for_redis_py(parsed: ParseResult, scheme: str, kind: str) -> str:
    """The URL as redis-py's own parser takes it: one host, and a path that is no service's name."""
    user, at, hosts = parsed.netloc.rpartition("@")
    path = "" if kind == "sentinel" else parsed.path
    return parsed._replace(scheme=scheme, netloc=f"{user}{at}{hosts.split(',')[0]}", path=path).geturl()


def _sentinel_url(
    parsed: ParseResult,
    hosts: tuple[Endpoint, ...],
    settings: dict[str, Any],
    connection_class: type[AbstractConnection],
    timeout: float | None,
) -> Address:
    service, _, database = parsed.path.strip("/").partition("/")
    if not service or (database and not database.isdigit()):
        raise ConfigError("a Sentinel URL names its service: redis+sentinel://host:26379/mymaster[/db]")
    own = _sentinels_own({name[9:]: settings.pop(name) for name in list(settings) if name.startswith("sentinel_")})
    kept = _kept(settings, connection_class) | ({"db": int(database)} if database else {})
    alike = ("ssl_", "socket_") if own.get("ssl", True) else ("socket_",)
    shared = {name: value for name, value in kept.items() if name.startswith(alike)}
    return Address("sentinel", hosts, kept, connection_class, unquote(service), shared | own, timeout)


def _sentinels_own(given: dict[str, Any]) -> dict[str, Any]:
    """The options for Sentinels with the types that redis-py gives to them."""
    words = {name: str(value) for name, value in given.items()}
    secure = words.pop("ssl", "").lower()
    if secure not in ("", "true", "false"):
        raise ConfigError("sentinel_ssl is true or false")
    try:
        own: dict[str, Any] = dict(parse_url(f"redis://?{urlencode(words)}"))
    except ValueError as error:
        raise ConfigError(f"cannot read an option for the Sentinels: {_rule_of(error)}") from None
    return own | ({"ssl": secure == "true"} if secure else {})


# --- from a client of the user's ---------------------------------------------------------------------


def _from_client(client: Redis) -> Address:
    pool = client.connection_pool
    settings = dict(client.get_connection_kwargs())  # type: ignore[no-untyped-call]
    timeout = settings.pop("socket_timeout", _DEFAULT_TIMEOUT)
    if isinstance(pool, SentinelConnectionPool):
        return replace(_from_sentinel(pool, settings), timeout=timeout)
    connection_class = pool.connection_class
    if issubclass(connection_class, UnixDomainSocketConnection):
        seed = (str(settings.pop("path", "")), 0)
    else:
        seed = (str(settings.pop("host", "localhost")), int(settings.pop("port", 6379)))
    return _checked(Address("single", (seed,), _kept(settings, connection_class), connection_class, timeout=timeout))


def _from_sentinel(pool: SentinelConnectionPool, settings: dict[str, Any]) -> Address:
    service, clients = sentinels_of(pool)
    sentinels: list[dict[str, Any]] = [
        dict(client.get_connection_kwargs())  # type: ignore[no-untyped-call]
        for client in clients
    ]
    seeds = tuple((str(own["host"]), int(own["port"])) for own in sentinels)
    reached_by = clients[0].connection_pool.connection_class
    own = _kept(sentinels[0], reached_by) | {"ssl": issubclass(reached_by, SSLConnection)}
    if (patience := sentinels[0].get("socket_timeout")) is not None:
        own["socket_timeout"] = patience
    # The managed class looks its master up itself; here the topology does, once for all connections.
    secure = issubclass(pool.connection_class, SSLConnection)
    plain: type[AbstractConnection] = SSLConnection if secure else Connection
    if not issubclass(pool.connection_class, SentinelManagedConnection):
        plain = pool.connection_class
    return _checked(Address("sentinel", seeds, _kept(settings, plain), plain, service, own))


def _from_cluster(client: RedisCluster) -> Address:
    settings = dict(client.get_connection_kwargs())
    timeout = settings.pop("socket_timeout", _DEFAULT_TIMEOUT)
    connection_class: type[AbstractConnection] = settings.get("connection_class") or Connection
    # The client's own greeting only asks replicas to answer reads; here nothing is read from replicas.
    settings.pop("redis_connect_func", None)
    settings.pop("response_callbacks", None)  # which no connection takes
    kept = _kept(settings, connection_class)
    seeds, remap = tuple(seeds_of(client)), remap_of(client)
    return _checked(Address("cluster", seeds, kept, connection_class, timeout=timeout, remap=remap))


def _kept(settings: Mapping[str, Any], connection_class: type[AbstractConnection]) -> dict[str, Any]:
    """Those of ``settings`` that make a connection what it is, and unknown ones, which it will refuse."""
    taken, common = _takes(cast("Any", connection_class)), _takes(cast("Any", AbstractConnection))
    own = (taken - common - _WHERE) | (taken & _WANTED)
    clients = common | _WHERE | _takes(Redis) | _takes(ConnectionPool) | _takes(BlockingConnectionPool)
    # A bare object is redis-py's mark for "not given": in another process it would be another one.
    given = {name: value for name, value in settings.items() if type(value) is not object}
    return {name: value for name, value in given.items() if name in own or name not in clients | taken}


@cache
def _takes(made: type) -> frozenset[str]:
    """The names of all that ``made`` can be made with; of what it passes on to its bases, too."""
    return frozenset(
        name
        for base in made.__mro__
        if "__init__" in vars(base) and base is not object
        for name, parameter in signature(vars(base)["__init__"]).parameters.items()
        if parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY) and name != "self"
    )
