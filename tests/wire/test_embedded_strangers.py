"""Nobody but the user who started it gets into a private server, and nobody is told its password.

What another user of the machine can do is tried as one: in a process that has given up being root.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import psutil
import pytest
from redis.asyncio import Redis

from conquiet import Broker, ConfigError, EmbeddedRedis, QueueError
from conquiet.wire import embedded
from tests.rigs.asking import ask
from tests.rigs.servers import EVERY, Rung

pytestmark = pytest.mark.slow

NOBODY: Final = 65534
AS_NOBODY: Final[dict[str, Any]] = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": "/", "env": {}}
SECRET: Final = "canary-7f3a"
each_server = pytest.mark.parametrize("kind", EVERY, ids=[rung.name for rung in EVERY])

ATTEMPTS: Final = """
import os, pathlib, signal, socket, sys

pid, scratch, port = int(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
assert os.getuid() == os.geteuid() == 65534
failures = []

def refused(what, attempt):
    try:
        got = attempt()
    except PermissionError:
        return
    failures.append(f"{what}: {got!r}")

def by_socket():
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(scratch / "redis.sock"))
        return "connected"

def by_port(*words):
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.sendall(b" ".join(word.encode() for word in words) + b"\\r\\n")
        answer = link.recv(1000)
    if answer.startswith((b"-NOAUTH", b"-WRONGPASS")) or b"command not allowed" in answer:
        raise PermissionError
    return answer

refused("socket", by_socket)
refused("look", lambda: os.listdir(scratch))
refused("configuration", lambda: (scratch / "redis.conf").read_text())
refused("log", lambda: (scratch / "redis.log").read_text())
refused("place", lambda: (scratch / "mine").write_text("x"))
refused("instead", lambda: scratch.rename(scratch.with_name("theirs")))
refused("environment", lambda: pathlib.Path(f"/proc/{pid}/environ").read_bytes())
refused("files", lambda: os.listdir(f"/proc/{pid}/fd"))
refused("kill", lambda: os.kill(pid, signal.SIGTERM))
if port:
    for words in (
        ["PING"], ["INFO"], ["CONFIG", "SET", "dir", "/tmp"], ["SAVE"], ["FLUSHALL"], ["SLAVEOF", "127.0.0.1", "1"],
        ["MODULE", "LOAD", "/tmp/x.so"], ["EVAL", "return(1)", "0"], ["ACL", "WHOAMI"], ["MONITOR"],
        ["AUTH", "default"], ["AUTH", "default", "default"], ["HELLO", "3"], ["DEBUG", "SLEEP", "0"],
    ):
        refused(" ".join(words), lambda: by_port(*words))
print("\\n".join(failures))
"""


def as_nobody(server: EmbeddedRedis) -> str:
    """What another user managed to do, a line each."""
    port = urlsplit(server.url).port or 0
    # The system's Python if root's own is where others cannot read.
    command = [_python(), "-I", "-c", ATTEMPTS, str(server.pid), str(server.directory), str(port)]
    done = subprocess.run(command, **AS_NOBODY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return str(done.stdout).strip()


def _python() -> str:
    candidates = (sys.executable, os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3")
    for python in candidates:
        command = [python, "-I", "-c", ""]
        try:
            subprocess.run(command, **AS_NOBODY, check=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return python
    pytest.skip("there is no Python that another user may run")


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@needs_root
@pytest.mark.parametrize("way", ["socket", "port"])
async def test_another_user_of_the_machine_does_not_get_in(way: str) -> None:
    for rung in EVERY:
        async with EmbeddedRedis(binary=rung.binary, unix_socket=way == "socket") as server:
            assert as_nobody(server) == "", rung.name
            assert await ask(server.url, "PING")


@needs_root
async def test_the_attempts_are_those_that_work_on_an_open_server() -> None:
    """Or they would prove nothing: everybody gets into one whose directory and port are open to all."""
    async with EmbeddedRedis(binary=EVERY[0].binary, unix_socket=False, settings={"requirepass": ""}) as server:
        for path in (server.directory, *server.directory.iterdir()):
            path.chmod(0o777)
        managed = as_nobody(server)
    for what in ("socket", "look", "configuration", "log", "place", "PING", "INFO", "CONFIG SET dir /tmp", "MONITOR"):
        assert f"{what}: " in managed


# --- nobody is told ------------------------------------------------------------------------------------------------


def told_to_everybody(server: EmbeddedRedis) -> str:
    """What the list of processes shows of the server and its watchdog."""
    process = psutil.Process(server.pid)
    watchdog = process.parent()
    assert watchdog is not None
    return " ".join(
        [*process.cmdline(), *watchdog.cmdline(), *process.environ().values(), *watchdog.environ().values()]
    )


def password_of(server: EmbeddedRedis) -> str:
    return unquote(urlsplit(server.url).password or "")


@each_server
async def test_a_port_asks_for_a_password_that_only_the_address_tells(kind: Rung) -> None:
    async with EmbeddedRedis(binary=kind.binary, unix_socket=False) as server:
        password = password_of(server)
        assert len(password) >= 32
        config = server.directory / "redis.conf"
        assert (config.stat().st_mode & 0o777, password in config.read_text()) == (0o600, True)
        shown = [told_to_everybody(server), repr(server), str(server), repr(vars(server)), repr(server._options)]
        shown.append((server.directory / "redis.log").read_text())
        assert password not in " ".join(shown)


async def test_each_server_has_another_password() -> None:
    async with EmbeddedRedis(unix_socket=False) as one, EmbeddedRedis(unix_socket=False) as other:
        assert password_of(one) != password_of(other)


async def test_a_port_that_a_stranger_has_taken_learns_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger may listen where a server was to start, and wait for those who would log in there."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.setblocking(False)
        taken = stranger.getsockname()[1]
        with pytest.raises(QueueError, match="Address already in use"):
            await EmbeddedRedis(port=taken).open()
        ports = iter([taken, embedded._free_port()])
        monkeypatch.setattr(embedded, "_free_port", lambda: next(ports))
        async with EmbeddedRedis(unix_socket=False) as server:
            assert await ask(server.url, "PING")
        with pytest.raises(BlockingIOError):
            stranger.accept()


@pytest.mark.parametrize(
    "settings",
    [
        {"requirepass": f"{SECRET} {SECRET}"},
        {"masterauth": f"{SECRET} {SECRET}"},
        {"requirepass": SECRET, "user": f"alice on >{SECRET} nonsense"},
        {"user": f"default on >{SECRET} nonsense"},
        {"REQUIREPASS": f"{SECRET} {SECRET}"},
    ],
)
@each_server
async def test_a_server_that_refuses_its_password_does_not_quote_it(kind: Rung, settings: dict[str, str]) -> None:
    with pytest.raises(QueueError, match=r"\*\*\*") as caught:
        await EmbeddedRedis(binary=kind.binary, settings=settings).open()
    assert SECRET not in told_by(caught.value)


@pytest.mark.parametrize("name", ["requirepass", "masterauth", "user"])
def test_a_setting_that_is_refused_is_not_quoted_if_it_is_secret(name: str) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        EmbeddedRedis(settings={name: f"{SECRET}\nbind 0.0.0.0"})
    assert SECRET not in told_by(caught.value)


@pytest.mark.parametrize("port", [None, 1])
async def test_a_server_that_does_not_come_up_does_not_tell_its_password(
    monkeypatch: pytest.MonkeyPatch, port: int | None
) -> None:
    monkeypatch.setattr(embedded, "_START_TIMEOUT", 0.5)
    settings = {"requirepass": SECRET, "user": "default off"}
    with pytest.raises(QueueError, match="did not answer") as caught:
        await EmbeddedRedis(port=port and embedded._free_port(), settings=settings).open()
    assert SECRET not in told_by(caught.value)


def told_by(error: BaseException) -> str:
    """Of the error and all that it was caused by."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return " ".join(f"{one!r} {one}" for one in causes)


# --- but its own user gets in everywhere -----------------------------------------------------------------------------


ELSEWHERE: Final = """
import sys
from conquiet.sync import Broker
with Broker.connect(sys.argv[1]) as broker:
    broker.send("orders", {"n": 1})
"""


@pytest.mark.parametrize("how", [{"unix_socket": True}, {"unix_socket": False}, {"port": 1}], ids=str)
async def test_the_address_works_for_every_client_and_process_of_its_user(how: dict[str, Any], tmp_path: Path) -> None:
    how = {"port": embedded._free_port()} if "port" in how else how
    async with EmbeddedRedis(directory=tmp_path / "grüße & co", **how) as server, Broker.connect(server.url) as broker:
        await broker.create_topic("orders", partitions=1)
        command = [sys.executable, "-c", ELSEWHERE, server.url]
        subprocess.run(command, cwd=Path(__file__).parents[2], check=True)
        async with Redis.from_url(server.url) as client:
            assert await client.xlen("stream:topic:orders:p:0") == 1
