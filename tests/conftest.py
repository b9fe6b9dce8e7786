"""The servers that tests run on, and names that no other test has.

The ladder is in ``tests/rigs/servers.py``. A test that takes ``server`` or ``url`` runs on each rung; marked
``any_server``, on the first. Marked ``cluster_too``, it runs on a Redis Cluster besides, unless it is one for
``one_node``. Nothing is ever flushed: each test has key names of its own.

In a lane (``nox -s quick``, ``nox -s guarantees``; see ``tests/rigs/lanes.py``) only a part of the tests runs: on the
newest server alone, through the core alone; and a machine that finds a mistake does not look for a shorter way to it.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from conquiet import QueueConfig, RedisStreamsQueue
from conquiet.jobs.stores.postgres import looking
from tests.rigs.cluster import LocalCluster
from tests.rigs.lanes import IS_NARROW, is_left_out, is_of_lane
from tests.rigs.scraping import forget
from tests.rigs.servers import CLUSTERS, CONTRACT_LADDER, LADDER, Rung, on_a_port_in_sync
from tests.rigs.sizing import SCALE
from tests.rigs.waiting import held

__all__ = ["CLUSTERS", "CONTRACT_LADDER", "LADDER", "Rung", "Server"]

# A deadline for each example would measure the machine, not the code.
settings.register_profile("house", deadline=None)
settings.register_profile("narrow", deadline=None, max_examples=20, phases=(Phase.explicit, Phase.generate))
settings.load_profile("narrow" if IS_NARROW else "house")

# A shell that starts this in the background has it ignore Ctrl-C, and so would every process that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What modules beside the tests assert is told as theirs is: a failure that nobody can repeat has to explain itself.
_ROOMS = ("balance", "contracts", "jobs", "queue", "sync", "system", "topics", "upgrades", "wire")
pytest.register_assert_rewrite(*(f"tests.{room}" for room in _ROOMS))

WIDER = tuple(Path(__file__).parent / name for name in ("contracts", "upgrades"))
"""Folders whose tests also run on the newest Redis."""


@dataclass(frozen=True)
class Server:
    """A running server."""

    name: str
    url: str
    version: str

    @property
    def release(self) -> tuple[int, ...]:
        return tuple(int(part) for part in self.version.split(".")[:2])


def pytest_report_header() -> str:
    return f"servers: {', '.join(rung.name for rung in CONTRACT_LADDER + CLUSTERS)}"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return is_left_out(collection_path) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if not is_of_lane(item)]
    if left_out:
        items[:] = [item for item in items if is_of_lane(item)]
        config.hook.pytest_deselected(items=left_out)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "rung" in metafunc.fixturenames:
        marked = metafunc.definition.get_closest_marker
        ladder = CONTRACT_LADDER if metafunc.definition.path.parent in WIDER else LADDER
        rungs = ladder[:1] if marked("any_server") else ladder
        if "server" in metafunc.fixturenames and marked("cluster_too") and not marked("one_node"):
            rungs = rungs + CLUSTERS
        metafunc.parametrize("rung", rungs, ids=[rung.name for rung in rungs], indirect=True, scope="session")


@pytest.fixture(scope="session")
def rung(request: pytest.FixtureRequest) -> Rung:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def server(rung: Rung) -> Iterator[Server]:
    if rung.image:
        yield from _container(rung)
        return
    if rung.is_cluster:
        with held(LocalCluster(rung.binary)) as cluster:
            yield Server(rung.name, cluster.url, rung.name.rpartition("-")[2])
        return
    with on_a_port_in_sync(rung.binary) as embedded:
        yield Server(rung.name, embedded.url, embedded.version)


def _container(rung: Rung) -> Iterator[Server]:
    from testcontainers.redis import RedisContainer

    with RedisContainer(rung.image) as container:
        url = f"redis://{container.get_container_host_ip()}:{container.get_exposed_port(6379)}"
        yield Server(rung.name, url, rung.image.rsplit(":", 1)[1] + ".0")


@pytest.fixture
def url(server: Server) -> str:
    return server.url


@pytest.fixture
def config() -> QueueConfig:
    """A stream and a group that only this test has."""
    return QueueConfig(f"t:{secrets.token_hex(6)}", "group", "consumer-1", block_ms=2_000)


@pytest.fixture
async def queue(url: str, config: QueueConfig) -> AsyncIterator[RedisStreamsQueue]:
    async with RedisStreamsQueue.connect(url, config) as queue:
        yield queue


@pytest.fixture(scope="session")
def scale() -> float:
    """How much of the full size the long tests run at."""
    return SCALE


@pytest.fixture(autouse=True)
def own_series() -> None:
    """Metrics begin anew with each test: a scrape shows its series alone."""
    forget()


@pytest.fixture(autouse=True)
def looks_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims look for jobs from the beginning, however slow the machine is.

    Else two that took long, because the machine had other things to do, would have the next pass over jobs that the
    test has just given back.
    """
    monkeypatch.setattr(looking, "_DEAR", float("inf"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"servers used: {', '.join(rung.name for rung in CONTRACT_LADDER + CLUSTERS)}")
    skips = os.environ.get("CONQUIET_SKIPS")
    if skips:
        names = sorted({report.nodeid for report in terminalreporter.getreports("skipped")})
        with open(skips, "a", encoding="utf-8") as file:
            file.writelines(f"{name}\n" for name in names)
