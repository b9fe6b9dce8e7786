"""Crashes at every command boundary: not sent, not answered, killed. Nothing is lost, and nothing gets stuck."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest

from conquiet.errors import QueueError
from conquiet.kit.clock import SYSTEM_CLOCK
from conquiet.topics.broker import Broker
from tests.rigs.cluster import LocalCluster
from tests.rigs.cluster_tracing import through, tracing
from tests.rigs.sizing import IS_FULL
from tests.rigs.tracing import Tracer, Way
from tests.rigs.waiting import LONG, eventually
from tests.topics.boundaries import BACKGROUND, GROUP, JOINING, LEASE, LIVING, PATHS, Scene

pytestmark = pytest.mark.any_server

BOUNDARIES = [(path, at) for path, names in PATHS.items() for at in range(len(names))]
ROOT = Path(__file__).parents[2]


def at_each(boundaries: list[tuple[str, int]]) -> pytest.MarkDecorator:
    ids = [f"{path}-{at}-{PATHS[path][at]}".replace(" ", "_") for path, at in boundaries]
    return pytest.mark.parametrize(("path", "at"), boundaries, ids=ids)


every_boundary = at_each(BOUNDARIES)


ON_A_CLUSTER = [(path, at) for path, at in BOUNDARIES if path in ("take over", "park", "requeue", "bury")]


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Tracer]:
    async with tracing(url) as proxy:
        yield proxy


@asynccontextmanager
async def scene_of(url: str, path: str) -> AsyncIterator[Scene]:
    scene = Scene(url, f"t{secrets.token_hex(6)}", path)
    try:
        await scene.prepare()
        yield scene
    finally:
        await scene.aclose()


@asynccontextmanager
async def victim(scene: Scene, proxy: Tracer) -> AsyncIterator[tuple[Broker, asyncio.Task[None]]]:
    """Somebody on the path; closed at the end."""
    clock = scene.clock if scene.path == "hand over" else SYSTEM_CLOCK
    broker = Broker(through(proxy.url, scene.url), namespace=scene.namespace, clock=clock)
    walk = scene.walker = asyncio.create_task(scene.walk(broker))
    try:
        yield broker, walk
    finally:
        if not walk.done():
            walk.cancel()
            with suppress(asyncio.CancelledError):
                await walk
        await broker.aclose()


@asynccontextmanager
async def company(scene: Scene) -> AsyncIterator[None]:
    """Somebody to hand over to, after the victim has got everything; on other paths nobody."""
    if scene.path != "hand over":
        yield
        return
    async with scene.consumer(scene.broker):
        yield


@pytest.fixture(autouse=True)
def no_mistakes(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever is caught and logged with a traceback is a mistake in the library."""
    yield
    records = caplog.get_records("call")
    assert [record.getMessage() for record in records if record.levelno >= logging.ERROR and record.exc_info] == []


# --- the lists ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_a_path_sends_what_is_listed_and_nothing_else(url: str, proxy: Tracer, path: str) -> None:
    """A new command on a path belongs on its list, and so is struck at like the others."""
    async with scene_of(url, path) as scene, victim(scene, proxy) as (_, walk):
        if path == "hand over":
            await eventually(scene.is_settled, "the victim has got everything")
            proxy.arm()
        async with company(scene):
            if path == "leave" or scene.is_operation:
                await walk
            elif path == "hand over":
                await eventually(lambda: is_shared(scene), "the partitions are shared")
            else:
                await eventually(scene.is_settled, "all is settled")
            trace = list(proxy.trace)
    usual = BACKGROUND if scene.is_operation else {*BACKGROUND, *JOINING, *LIVING}
    assert {*trace, *usual} == {*PATHS[path], *usual}
    following = iter(trace)
    assert [name for name in PATHS[path] if name not in following] == []


async def is_shared(scene: Scene) -> bool:
    scene.clock.advance(1.0)  # what was not released has to run out
    owners = await scene.owners()
    return len(owners) == 2 and "" not in owners


# --- a lost connection ---------------------------------------------------------------------------------


@every_boundary
@pytest.mark.parametrize("way", ["unsent", "unanswered"])
async def test_a_victim_that_comes_back_finishes(url: str, proxy: Tracer, path: str, at: int, way: Way) -> None:
    await comes_back(url, proxy, path, at, way)


@at_each(ON_A_CLUSTER)
async def test_on_a_cluster_a_victim_that_comes_back_finishes(cluster: LocalCluster, path: str, at: int) -> None:
    async with tracing(cluster.url) as proxy:
        await comes_back(cluster.url, proxy, path, at, "unanswered")


async def comes_back(url: str, proxy: Tracer, path: str, at: int, way: Way) -> None:
    async with scene_of(url, path) as scene:
        async with struck(scene, proxy, at, way) as (broker, walk):
            if scene.is_operation:
                with pytest.raises(QueueError):
                    await walk
                await scene.operate(broker)
            elif path == "leave":
                await walk
            else:
                await scene.send(1)
                await eventually(scene.settles, f"the victim has finished: {path}")
            if path == "hand over":
                await eventually(lambda: is_shared(scene), "the partitions are shared")
        if scene.is_operation or path == "leave":
            await scene.rescue()
        await scene.check()


@pytest.mark.parametrize("way", ["unsent", "unanswered"])
@pytest.mark.parametrize("target", ["lease_renew", "member_beat"])
async def test_a_sign_of_life_that_is_lost_is_given_again_in_time(
    url: str, proxy: Tracer, target: str, way: Way
) -> None:
    """The victim keeps its partitions, in the same epoch; time goes on by less than two heartbeats."""
    async with scene_of(url, "hand over") as scene, victim(scene, proxy):
        await eventually(scene.is_settled, "the victim has got everything")
        leases = [scene.instance.keys.lease(stream, GROUP) for stream in scene.streams]
        before = [await scene.redis.hmget(lease, "owner", "epoch") for lease in leases]
        struck = proxy.strike(target, (), way)
        began = scene.clock.monotonic()

        def goes_on() -> None:
            scene.clock.advance(max(0.0, min(LEASE / 100, began + 0.6 * LEASE - scene.clock.monotonic())))

        def is_struck() -> bool:
            goes_on()
            return struck.is_set()

        await eventually(is_struck, f"{target} comes")
        until = [int(await scene.redis.hget(lease, "until_ms") or 0) for lease in leases]

        async def are_renewed() -> bool:
            goes_on()
            now = [int(await scene.redis.hget(lease, "until_ms") or 0) for lease in leases]
            return all(new > old for new, old in zip(now, until, strict=True))

        await eventually(are_renewed, "the leases are renewed")
        await scene.send(1)
        await eventually(scene.is_settled, "the victim has got this too")
        assert [await scene.redis.hmget(lease, "owner", "epoch") for lease in leases] == before


@every_boundary
@pytest.mark.parametrize("way", ["unsent", "unanswered"])
async def test_another_finishes_for_a_victim_that_stays_away(
    url: str, proxy: Tracer, path: str, at: int, way: Way
) -> None:
    """It comes back in the end, too late: it changes nothing any more."""
    await stays_away(url, proxy, path, at, way)


@at_each(ON_A_CLUSTER)
@pytest.mark.parametrize("way", ["unsent", "unanswered"])
async def test_on_a_cluster_another_finishes_for_a_victim_that_stays_away(
    cluster: LocalCluster, path: str, at: int, way: Way
) -> None:
    async with tracing(cluster.url) as proxy:
        await stays_away(cluster.url, proxy, path, at, way)


async def stays_away(url: str, proxy: Tracer, path: str, at: int, way: Way) -> None:
    async with scene_of(url, path) as scene:
        async with struck(scene, proxy, at, way, for_good=True) as (_, walk):
            if scene.is_operation:
                with pytest.raises(QueueError):
                    await walk
            if path == "hand over":
                await scene.send(1)
                await eventually(scene.settles, "the other has got everything")
            else:
                await scene.rescue()
                await scene.check()
            proxy.reopen()
        await scene.check()


async def test_marks_of_a_replay_that_crashed_go_with_the_next_one(url: str, proxy: Tracer) -> None:
    async with scene_of(url, "replay") as scene:
        last = len(PATHS["replay"]) - 1
        async with struck(scene, proxy, last, "unsent") as (_, walk):
            with pytest.raises(QueueError):
                await walk
        scene.clock.advance(3600.0)
        await scene.die_again()
        await scene.operate(scene.broker)
        assert await scene.redis.hgetall(scene.instance.keys.replayed(scene.streams[0])) == {}


@asynccontextmanager
async def struck(
    scene: Scene, proxy: Tracer, at: int, way: Way, *, for_good: bool = False
) -> AsyncIterator[tuple[Broker, asyncio.Task[None]]]:
    """A victim right after it was struck, with the proxy shut if that is for good."""
    target, after = PATHS[scene.path][at], PATHS[scene.path][:at]
    event = proxy.strike(target, after, way, for_good=for_good, armed=scene.path != "hand over")
    async with victim(scene, proxy) as (broker, walk):
        if scene.path == "hand over":
            await eventually(scene.is_settled, "the victim has got everything")
            proxy.arm()
        async with company(scene), asyncio.timeout(LONG):
            await event.wait()
            yield broker, walk


# --- kill -9 ---------------------------------------------------------------------------------------------


@contextmanager
def process(scene: Scene, proxy: Tracer) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-W", "error", "-m", "tests.topics.boundary_process", proxy.url]
    with subprocess.Popen(
        [*command, scene.url, scene.namespace, scene.path, str(len(scene.sent))],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as child:
        try:
            yield child
        finally:
            child.kill()


@at_each([(path, at) for path, at in BOUNDARIES if IS_FULL or at == len(PATHS[path]) // 2])
async def test_another_finishes_for_a_victim_that_is_killed(url: str, proxy: Tracer, path: str, at: int) -> None:
    """At one boundary of each path; at all of them in a run of full scale."""
    await is_killed(url, proxy, path, at)


@at_each([(path, at) for path, at in ON_A_CLUSTER if at == len(PATHS[path]) // 2])
async def test_on_a_cluster_another_finishes_for_a_victim_that_is_killed(
    cluster: LocalCluster, path: str, at: int
) -> None:
    async with tracing(cluster.url) as proxy:
        await is_killed(cluster.url, proxy, path, at)


async def is_killed(url: str, proxy: Tracer, path: str, at: int) -> None:
    async with scene_of(url, path) as scene:
        event = proxy.strike(PATHS[path][at], PATHS[path][:at], "held", armed=path != "hand over")
        with process(scene, proxy) as child:
            if path == "hand over":
                await eventually(scene.is_settled, "the victim has got everything")
                proxy.arm()
            async with company(scene), asyncio.timeout(LONG):
                await event.wait()
                child.kill()
                child.wait()
                await proxy.disconnect()
                if path == "hand over":
                    scene.clock.advance(60.0)
                    await scene.send(1)
                    await eventually(scene.settles, "the other has got everything")
        if path != "hand over":
            await scene.rescue()
        await scene.check()
