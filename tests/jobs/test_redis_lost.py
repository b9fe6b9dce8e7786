"""A Redis that came back without its last writes: what it has forgotten does not count, whatever it gave out."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from conquiet.jobs.job import Job, JobState, NewJob, Settlement
from conquiet.jobs.store import Lease, Wanted
from conquiet.jobs.stores.redis import RedisStore
from tests.conftest import Rung
from tests.rigs.asking import ask
from tests.rigs.servers import on_a_port

pytestmark = pytest.mark.guarantee

QUEUE: Final = "emails"


async def claim(store: RedisStore, worker: str) -> Job:
    [job] = (await store.claim(QUEUE, Wanted(1, worker, 30_000, 3))).jobs
    return job


@asynccontextmanager
async def store_on(rung: Rung, directory: Path) -> AsyncIterator[tuple[RedisStore, str]]:
    async with (
        on_a_port(rung.binary, directory=directory) as server,
        RedisStore(server.url) as store,
    ):
        yield store, server.url


@pytest.mark.any_server
async def test_a_claim_that_the_server_has_lost_is_stale(rung: Rung, tmp_path: Path) -> None:
    """It is started again with the file that it saved before the claim."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    async with store_on(rung, old) as (store, url):
        await store.add(QUEUE, [NewJob("a", b"1")])
        await ask(url, "SAVE")
        shutil.copy(old / "dump.rdb", new / "dump.rdb")
        lost = await claim(store, "one")
    async with store_on(rung, new) as (store, _):
        held = await claim(store, "other")
        assert held.lease_token > lost.lease_token
        for kind in ("ack", "retry", "fail", "release"):
            assert await store.settle(QUEUE, [_said(lost, kind)]) == [False]
        assert await store.renew(QUEUE, [Lease.of(lost)], 30_000) == [False]
        assert (await store.find(QUEUE, ["a"]))[0] == held
        assert await store.settle(QUEUE, [_said(held, "ack")]) == [True]
        assert (await store.counts(QUEUE))[JobState.SUCCEEDED] == 1


def _said(job: Job, kind: Any) -> Settlement:
    return Settlement.of(job, kind)
