"""Records what this version writes: ``python -m tests.upgrades.record [folder]``.

The folder is that of the version among the fixtures, unless another is given. See README.md beside this.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from conquiet import EmbeddedRedis, PostgresStore, RedisStore
from conquiet.sync import EmbeddedRedis as SyncRedis
from tests.rigs.postgres import LocalPostgres
from tests.rigs.servers import EVERY
from tests.upgrades.scenes.balance import balance
from tests.upgrades.scenes.jobs import jobs
from tests.upgrades.scenes.queue import queue
from tests.upgrades.scenes.spark import CHECKPOINT, session, spark
from tests.upgrades.scenes.topics import topics
from tests.upgrades.stored import FIXTURES, Recording

Scene = Callable[[str], AbstractAsyncContextManager[dict[str, Any]]]

_SCENES: Final[dict[str, Scene]] = {"queue": queue, "topics": topics, "balance": balance}
_NEWER: Final = ("\\", "SET transaction_timeout")
"""How lines of a dump begin that only newer servers, or their own client, understand."""


def oldest_server() -> str:
    """The binary of the oldest server here: what it dumps, all newer ones restore."""
    return EVERY[0].binary


async def record_redis(folder: Path, name: str) -> None:
    """The rooms that live in Redis, each on a server of its own."""
    for room, scene in _SCENES.items():
        async with EmbeddedRedis(binary=oldest_server()) as server, scene(server.url) as facts:
            (await Recording.taken(server.url, name, facts)).store(folder / f"{room}.json")
    async with (
        EmbeddedRedis(binary=oldest_server()) as server,
        RedisStore.connect(server.url) as store,
        jobs(store) as facts,
    ):
        (await Recording.taken(server.url, name, facts)).store(folder / "jobs.json")


async def record_postgres(folder: Path, name: str) -> None:
    """The jobs of PostgreSQL, as SQL; the facts of it beside them, in the form of the others."""
    with LocalPostgres() as server:
        async with PostgresStore.connect(server.dsn) as store:
            await store.migrate()
            async with jobs(store) as facts:
                [(now,)] = server.ask("SELECT (extract(epoch FROM now()) * 1000)::bigint")
                (folder / "jobs.sql").write_text(dumped(server))
        [(release,)] = server.ask("SHOW server_version")
        Recording(name, f"PostgreSQL {release}", now, facts, {}).store(folder / "jobs-postgres.json")


def dumped(server: LocalPostgres) -> str:
    """The whole database in plain SQL."""
    words = [server.binary("pg_dump"), "--inserts", "--no-owner", "--no-privileges", f"--dbname={server.dsn}"]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(_NEWER))


def record_spark(folder: Path, name: str) -> None:
    """A stream between two topics that was stopped, with its checkpoint, and what writes are remembered by."""
    shutil.rmtree(folder / CHECKPOINT, ignore_errors=True)
    with SyncRedis(binary=oldest_server()) as server, tempfile.TemporaryDirectory() as place:
        with session() as running:
            facts = spark(running, server.url, Path(place))
        shutil.copytree(Path(place) / CHECKPOINT, folder / CHECKPOINT)
        asyncio.run(Recording.taken(server.url, name, facts)).store(folder / "spark.json")


def main() -> None:
    """Record all rooms."""
    name = version("conquiet")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FIXTURES / name)
    folder: Path = parser.parse_args().folder
    print(f"recording what version {name} writes into {os.fspath(folder)}")
    folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(record_redis(folder, name))
    asyncio.run(record_postgres(folder, name))
    record_spark(folder, name)


if __name__ == "__main__":
    main()
