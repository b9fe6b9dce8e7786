"""A site of the test's own: a link, a namespace that no other test has, and a clock that can be moved."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator

import pytest

from conquiet.kit.clock import ManualClock
from conquiet.topics.operate.admin import Admin
from conquiet.topics.server.instance import Site
from conquiet.topics.server.topics import Registry
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.keys import Keys
from tests.conftest import Rung
from tests.rigs.cluster import LocalCluster
from tests.rigs.waiting import held
from tests.topics.staging import Stage


@pytest.fixture
def keys() -> Keys:
    return Keys(f"t{secrets.token_hex(6)}")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def site(url: str, keys: Keys, clock: ManualClock) -> AsyncIterator[Site]:
    link = Connections(Address.of(url))
    yield Site(link, keys, clock)
    await link.aclose()


@pytest.fixture
def registry(site: Site) -> Registry:
    return Registry(site)


@pytest.fixture
def admin(site: Site, registry: Registry) -> Admin:
    return Admin(site, registry)


@pytest.fixture
def stage(site: Site, registry: Registry) -> Stage:
    return Stage(site, registry)


@pytest.fixture(scope="package")
def cluster(rung: Rung) -> Iterator[LocalCluster]:
    if not rung.binary:
        pytest.skip("needs a server's binary")
    with held(LocalCluster(rung.binary)) as cluster:
        yield cluster


@pytest.fixture
async def clustered(cluster: LocalCluster, keys: Keys, clock: ManualClock) -> AsyncIterator[Stage]:
    """As ``stage``, on a Cluster."""
    link = Connections(Address.of(cluster.url))
    site = Site(link, keys, clock)
    yield Stage(site, Registry(site))
    await link.aclose()
