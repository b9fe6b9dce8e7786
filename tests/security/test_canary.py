"""A password that is looked for in all that a program of conquiet's shows: nobody ever finds it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from conquiet import EmbeddedRedis
from tests.conftest import Rung

pytestmark = [pytest.mark.any_server, pytest.mark.slow]

CANARY: Final = "canary-7f3a9c"
PROGRAM: Final = """
import asyncio, gc, logging, os, pathlib, sys, traceback, warnings
logging.basicConfig(level=logging.DEBUG)
warnings.simplefilter("always")
from conquiet import *
from prometheus_client import generate_latest

async def attempt(work):
    try:
        print(repr(await work))
    except Exception as error:
        traceback.print_exception(error)
        print(repr(error), error)

async def rooms(url):
    config = QueueConfig("canary", "g", "c")
    print(repr(Address.of(url)), str(Address.of(url)))
    queue = RedisStreamsQueue.connect(url, config)
    print(repr(queue), vars(queue).keys())
    await attempt(queue.enqueue({"n": 1}))
    await attempt(queue.read(100))
    await attempt(queue.aclose())
    broker = Broker.connect(url)
    await attempt(broker.create_topic("canary", partitions=1))
    await attempt(broker.send("canary", {"n": 1}))
    await attempt(broker.send("nothing", {"n": 1}))
    print(repr(broker), repr(broker.admin))
    await attempt(broker.aclose())
    store = RedisStore.connect(url)
    jobs = JobQueue(store, "canary")
    await attempt(jobs.enqueue({"n": 1}))
    print(repr(store), repr(jobs))
    await attempt(store.aclose())
    balancer = StreamBalancer.connect(url, service="canary", handle_signals=False)
    await attempt(balancer.add_stream("s"))
    print(repr(balancer))
    await attempt(balancer.aclose())

async def main():
    good = os.environ["CANARY_URL"]
    wrong = good.replace("canary-", "wrong-canary-")
    away = good.replace(good.rpartition(":")[2], "1")
    for url in (good, wrong, away, wrong + "?nonsense=1", good.replace("redis://", "rediss://"),
                good.replace("redis://", "redis+sentinel://") + "/m", good.replace("redis://", "redis+cluster://"),
                good.replace("redis://", "http://"), good + "/x/y", good.replace(":canary", ":/canary")):
        try:
            await rooms(url)
        except Exception as error:
            traceback.print_exception(error)
    print(generate_latest().decode())
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            print((process / "cmdline").read_bytes())
        except OSError:
            pass

asyncio.run(main(), debug=True)
print("the end")
"""


async def test_a_password_is_in_nothing_that_a_program_shows(rung: Rung) -> None:
    async with EmbeddedRedis(
        binary=rung.binary or None, unix_socket=False, settings={"user": f"bob on >{CANARY} allkeys allchannels +@all"}
    ) as server:
        place = server.url.rpartition("@")[2].removeprefix("redis://")
        environ = {**os.environ, "CANARY_URL": f"redis://bob:{CANARY}@{place}", "PYTHONPATH": str(Path.cwd())}
        words = [sys.executable, "-X", "dev", "-c", PROGRAM]
        done = await asyncio.to_thread(subprocess.run, words, capture_output=True, env=environ, check=False)
    shown = (done.stdout + done.stderr).decode(errors="replace")
    assert "the end" in shown, shown[-3000:]
    assert "QueueError" in shown
    assert "ConfigError" in shown
    assert "conquiet_" in shown
    assert [line for line in shown.splitlines() if CANARY in line] == []
