"""A private redis-server for tests, examples and first steps: nothing to set up, nothing left behind.

The server runs under a small watchdog process (``_warden.py``), because only a third process can end it
when this one is killed. The watchdog belongs to the process and not to the thread that started it, so a
server may be opened on any thread's event loop and outlive the thread.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

import anyio
import anyio.to_thread

from conquiet.errors import ConfigError, QueueError
from conquiet.kit.opened import Opened
from conquiet.kit.service import to_its_end
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.server_binaries import find_servers
from conquiet.wire.server_options import ServerOptions, Site, scratch_directory
from conquiet.wire.streams import pack

__all__ = ["EmbeddedRedis", "find_servers"]

_START_TIMEOUT = 10.0
_STOP_TIMEOUT = 5.0
_POLL = 0.005
_PORT_TRIES = 10
_LOG_LINES = 12
_LOG_BYTES = 8192
_WATCHDOG = Path(__file__).with_name("_warden.py")
_IN_USE = "Address already in use"
_VERSION = re.compile(r"redis_version:(\S+)")
_SOFTWARE = re.compile(r"(redis|valkey)_version:(\S+)")


class EmbeddedRedis(Opened):
    """A redis-server of one's own, on a Unix socket or on loopback, for as long as it is open.

    ``async with EmbeddedRedis() as server`` starts one, and ``server.url`` is its address: it answers from
    then on, to every process of this user. Other users of the machine do not get in: the socket is in a
    directory that only this user can enter, and a port asks for a password.

    Nothing is persisted unless ``appendonly`` is true. The server never outlives this process: on
    ``kill -9`` it is told to end within a quarter of a second, and killed 3 s later if it did not.

    A close and a crash of this process leave the same: nothing, or the data if ``directory`` was given.
    With ``appendonly`` a later server on that directory then has every write that was answered. Two servers
    never share a directory: the later one waits up to 5 s for the earlier to end, and then fails.

    The constructor does no I/O and binds to no event loop. An object may be opened again after its close,
    on any loop. A forked child that closes its copy leaves the parent's server running.

    :param unix_socket: listen on a socket and on no port, which is the default. It is ``redis.sock`` in the
        directory if that is private (mode 0700) and its path is short enough for a socket, else in a
        temporary one. False: listen on a port of 127.0.0.1, with a password that is part of ``url``.
    :param port: listen there or fail; ``None`` is a free port, another one each time it is opened.
    :param directory: where the data goes: made if missing, for this user alone; never removed.
    :param binary: a server's name or path; ``None`` is the first of :func:`find_servers`.
    :param settings: further directives, each value as it would stand in redis.conf. A ``requirepass`` (one
        plain word) is the password instead of a random one; an empty one lets in everybody on this machine.
    """

    def __init__(
        self,
        *,
        appendonly: bool = False,
        unix_socket: bool | None = None,
        port: int | None = None,
        directory: str | os.PathLike[str] | None = None,
        binary: str | os.PathLike[str] | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._options = ServerOptions(appendonly, unix_socket, port, directory, binary, dict(settings or {}))
        self._server: _Server | None = None

    async def open(self) -> None:
        """Start the server and return once it answers, its data loaded; this takes 10 s at most.

        Raises `ConfigError` if no server is installed or this one is open already, and `QueueError` with
        the end of the server's log if it does not come up. No process is left behind then.
        """
        if self._server is not None:
            raise ConfigError("this EmbeddedRedis is already open")
        for tries_left in reversed(range(_PORT_TRIES)):
            try:
                await self._start()
            except QueueError as error:
                # Another process may take a free port between our finding it and the server's binding it.
                if not tries_left or self._options.port is not None or _IN_USE not in str(error):
                    raise
            else:
                return

    async def aclose(self) -> None:
        """End the server and remove what it left, within about 5 s; safe to repeat, or if never opened.

        Cancelled meanwhile, it ends the server all the same, and raises the cancellation afterwards.
        """
        server = self._server
        if server is not None:
            await to_its_end(self._stop(server), "stop")

    @property
    def url(self) -> str:
        """``unix:///PATH`` or ``redis://:PASSWORD@127.0.0.1:PORT``, as redis-py's ``from_url`` takes it."""
        return self._opened().url

    @property
    def version(self) -> str:
        """The Redis version that the server reports (of a Valkey: the one it is compatible with)."""
        return self._opened().version

    @property
    def software(self) -> str:
        """Name and version of the server, for people: ``Valkey 9.1.2`` or ``Redis 7.0.15``."""
        return self._opened().software

    @property
    def pid(self) -> int:
        """The process ID of the server itself, for tests that stop or kill it."""
        return self._opened().pid

    @property
    def directory(self) -> Path:
        """Where the server keeps its data."""
        return self._opened().site.directory

    async def _start(self) -> None:
        self._server = server = _Server(self._options)
        try:
            await _in_thread(server.start)
            info = await _first_answer(server)
            server.software = " ".join(_SOFTWARE.findall(info)[-1]).capitalize()
            server.version = _VERSION.findall(info)[0]
        finally:
            if not server.version:
                await self.aclose()

    async def _stop(self, server: _Server) -> None:
        await _in_thread(server.stop)
        self._server = None

    def _opened(self) -> _Server:
        if self._server is None or not self._server.version:
            raise ConfigError("this EmbeddedRedis is not open: use it as a context manager, or call open()")
        return self._server


class _Server:
    """One start of a server. Its calls block, so they belong in a worker thread.

    A cancelled task leaves its worker thread running: ``stop`` copes with a ``start`` that has yet to begin,
    or to end.
    """

    site: Site
    url: str

    def __init__(self, options: ServerOptions) -> None:
        self.pid = 0
        self.software = ""
        self.version = ""
        self._scratch: Path | None = None
        self._log: BinaryIO | None = None
        self._files = ExitStack()
        self.options = options
        self._owner = os.getpid()
        self._started: Future[None] = Future()
        self._watchdog: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if not self._started.set_running_or_notify_cancel():
            return
        try:
            self._start(self.options.executable())
        except OSError as error:
            raise QueueError(f"cannot start a redis-server: {error}") from error
        finally:
            self._started.set_result(None)

    def stop(self) -> None:
        if os.getpid() != self._owner:
            self._files.close()
            # It is no child of this process, and Popen must know, or it warns of leaving it behind.
            self.running()
        elif not self._started.cancel():
            wait([self._started])
            self._files.close()
            if self._watchdog is not None:
                self._wait(self._watchdog)
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)

    def running(self) -> bool:
        return self._watchdog is not None and self._watchdog.poll() is None

    def failure(self, what: str) -> QueueError:
        return QueueError(f"the redis-server at {self.site} {what}; its log ends with\n{self._log_tail()}")

    def _start(self, executable: str) -> None:
        options = self.options
        scratch = self._scratch = scratch_directory()
        self._log = self._files.enter_context((scratch / "redis.log").open("w+b"))
        self.site = site = options.site(scratch, options.port or _free_port())
        self.url = options.url(site)
        config = options.write_config(site)
        self._watchdog = self._spawn(str(scratch), str(site.directory), executable, config)
        self.pid = self._read_pid(self._watchdog)

    def _spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_WATCHDOG), str(self._owner), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # or Ctrl-C in a terminal would end the server before its users
        )
        assert watchdog.stdin is not None
        self._files.enter_context(watchdog.stdin)
        # A Popen that is collected while its process runs keeps itself alive, and would keep the pipe open.
        watchdog.stdin = None
        return watchdog

    def _log_tail(self) -> str:
        if self._log is None or self._log.closed:
            return ""
        # By our own handle, since the watchdog removes the file, and leaving alone the offset, which the
        # server writes at.
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), _LOG_BYTES, max(0, size - _LOG_BYTES))
        shown = self.options.without_secrets(text.decode(errors="replace"))
        return "\n".join(shown.splitlines()[-_LOG_LINES:])

    def _read_pid(self, watchdog: subprocess.Popen[bytes]) -> int:
        assert watchdog.stdout is not None
        with watchdog.stdout as stdout:
            line = stdout.readline()
        if not line:
            raise self.failure("did not start")
        return int(line)

    def _wait(self, watchdog: subprocess.Popen[bytes]) -> None:
        try:
            killed = watchdog.wait(_STOP_TIMEOUT) < 0
        except subprocess.TimeoutExpired:
            killed = True
        if killed:
            # The watchdog did not do its work. It leads the group of which the server is a member.
            with suppress(ProcessLookupError):
                os.killpg(watchdog.pid, signal.SIGKILL)
            watchdog.wait(_STOP_TIMEOUT)


async def _first_answer(server: _Server) -> str:
    """Wait until the server answers, and return what it says of itself."""
    # Not by the port: another process may have it, and would be told the password. A server that cannot have the
    # port ends before it makes its socket.
    link = Connections(Address.of(server.options.socket_url(server.site)).answering_within(1.0))
    last: QueueError | None = None
    try:
        with anyio.fail_after(_START_TIMEOUT):
            while server.running():
                try:
                    await link.call("", pack("PING"))
                    return str((await link.call("", pack("INFO", "server"))).decode())
                except QueueError as error:
                    last = error
                await anyio.sleep(_POLL)
    except TimeoutError:
        raise server.failure(f"did not answer within {_START_TIMEOUT:g} s ({last})") from last
    finally:
        await link.aclose()
    raise server.failure("ended before it answered") from last


async def _in_thread(call: Callable[[], None]) -> None:
    # A limiter of its own, since the common one may be full of the application's blocking calls.
    await anyio.to_thread.run_sync(call, limiter=anyio.CapacityLimiter(1))


def _free_port() -> int:
    port = 0
    for _ in range(50):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        # A cluster node also takes the port 10,000 above its own.
        if port <= 55535:
            break
    return port
