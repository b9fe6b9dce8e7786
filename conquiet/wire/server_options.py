"""How a private server is set up: where it listens, who may come in, and where it keeps its data.

Nobody but the user who started it gets in. It always has a socket in a directory that only this user can enter; on
a port it asks for a password, which is in the configuration file, in no command line, and in no text of an error.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import quote

from conquiet.errors import ConfigError
from conquiet.wire.server_binaries import find_servers

__all__ = ["ServerOptions", "Site", "scratch_directory"]

_SOCKET: Final = "redis.sock"
_SOCKET_PATH_MAX: Final = 103  # bytes: the smallest limit among the systems we run on
_PREFIX: Final = "conquiet-redis-"
_PASSWORD: Final = "requirepass"
_SECRETS: Final = frozenset(
    (_PASSWORD, "masterauth", "primaryauth", "sentinel", "tls-client-key-file-pass", "tls-key-file-pass", "user")
)
"""Settings whose values no error shows."""
_OURS: Final = frozenset(
    ("appendonly", "bind", "daemonize", "dir", "logfile", "port", "protected-mode", "unixsocket", "unixsocketperm")
)


@dataclass(frozen=True, slots=True)
class Site:
    """Where one start of a server has its files, and where it listens."""

    scratch: Path
    """Private to this user, and gone with the server."""
    directory: Path
    """Of its data."""
    socket: Path
    port: int
    """0 for none."""

    def __str__(self) -> str:
        """For errors: no password."""
        return f"127.0.0.1:{self.port}" if self.port else str(self.socket)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What a user asked for."""

    appendonly: bool
    unix_socket: bool | None
    port: int | None
    place: str | os.PathLike[str] | None
    binary: str | os.PathLike[str] | None
    settings: Mapping[str, str] = field(repr=False)
    password: str = field(init=False, repr=False)
    """Of the ``settings``; else on a port one that nobody can guess, the same for each start."""

    def __post_init__(self) -> None:
        if self.port is not None and not 0 < self.port < 65536:
            raise ConfigError(f"port is {self.port!r}, must be from 1 to 65535, or None for a free one")
        if self.port is not None and self.unix_socket:
            raise ConfigError(f"port is {self.port!r} and unix_socket is true: only one of them can be served")
        for name, value in self.settings.items():
            _check(name, value)
        given = {name.lower(): value.strip() for name, value in self.settings.items()}
        if given.get("cluster-enabled", "no") != "no" and not self.is_tcp:
            raise ConfigError("cluster-enabled needs a port: give unix_socket=False, or a port")
        made = secrets.token_urlsafe(24) if self.is_tcp else ""
        object.__setattr__(self, "password", given.get(_PASSWORD, made))

    @property
    def is_tcp(self) -> bool:
        """Whether it listens on a port."""
        return self.port is not None or self.unix_socket is False

    def executable(self) -> str:
        """The program to run."""
        if self.binary is None:
            return find_servers()[0]
        path = shutil.which(self.binary)
        if path is None:
            raise ConfigError(f"binary is {os.fspath(self.binary)!r}, which is no program that can be run")
        return os.path.abspath(path)

    def site(self, scratch: Path, port: int) -> Site:
        """The place of one start; makes the directory of the data, for this user alone, if there is none."""
        directory = Path(os.path.abspath(self.place)) if self.place else scratch
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.is_tcp:
            return Site(scratch, directory, scratch / _SOCKET, port)
        # Beside the data it has the same address each time; but not where others may come near it.
        home = directory if _is_private(directory) and _fits(directory) else scratch
        return Site(scratch, directory, home / _SOCKET, 0)

    def write_config(self, site: Site) -> str:
        """The file from which the server reads all this, which only this user can read."""
        path = str(site.scratch / "redis.conf")
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(os.fsencode(self._config(site)))
        return path

    def url(self, site: Site) -> str:
        """Where its users find it."""
        return f"redis://{self._login()}127.0.0.1:{site.port}" if site.port else self.socket_url(site)

    def socket_url(self, site: Site) -> str:
        """The way in that no stranger can have taken, as one can take a port."""
        return f"unix://{self._login()}{quote(str(site.socket))}"

    def without_secrets(self, text: str) -> str:
        """``text`` of a server's log, which quotes the lines of a configuration that it does not understand."""
        values = [value.strip() for name, value in self.settings.items() if name.lower() in _SECRETS]
        for secret in sorted((self.password, *values), key=len, reverse=True):
            text = text.replace(secret, "***") if secret else text
        return text

    def _login(self) -> str:
        return f":{quote(self.password, safe='')}@" if self.password else ""

    def _config(self, site: Site) -> str:
        directives = {
            "bind": "127.0.0.1",
            "protected-mode": "yes",
            "port": str(site.port),
            "unixsocket": _quoted(str(site.socket)),
            "unixsocketperm": "700",
            "daemonize": "no",
            "dir": _quoted(str(site.directory)),
            "save": "",
            "appendonly": "yes" if self.appendonly else "no",
            _PASSWORD: self.password,
        }
        lines = [*directives.items(), *self.settings.items()]
        return "".join(f"{name} {value.strip() or _quoted('')}\n" for name, value in lines)


def scratch_directory() -> Path:
    """A new directory that only this user can enter, with a path short enough for a socket in it."""
    base = tempfile.gettempdir()
    # The system's own if the user's has too long a name; mkdtemp adds eight characters.
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base if _fits(Path(base) / f"{_PREFIX}12345678") else "/tmp"))


def _fits(directory: Path) -> bool:
    return len(os.fsencode(directory / _SOCKET)) <= _SOCKET_PATH_MAX


def _is_private(directory: Path) -> bool:
    status = directory.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _check(name: str, value: str) -> None:
    if name.lower() in _OURS:
        raise ConfigError(f"setting {name!r} is decided by EmbeddedRedis itself")
    if not re.fullmatch(r"[A-Za-z0-9-]+", name) or re.search(r"[\r\n\0]", value):
        shown = "***" if name.lower() in _SECRETS else repr(value)
        raise ConfigError(f"setting {name!r}: {shown} is not one directive and its value on a line")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
