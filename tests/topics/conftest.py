"""An instance of the test's own: a link, a namespace that no other test has, and a clock that can be moved."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator

import pytest

from conquiet.kit.clock import ManualClock
from conquiet.topics.operate.admin import Admin
from conquiet.topics.server.instance import Instance
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
async def instance(url: str, keys: Keys, clock: ManualClock) -> AsyncIterator[Instance]:
    link = Connections(Address.of(url))
    yield Instance(link, keys, clock)
    await link.aclose()


@pytest.fixture
def registry(instance: Instance) -> Registry:
    return Registry(instance)


@pytest.fixture
def admin(instance: Instance, registry: Registry) -> Admin:
    return Admin(instance, registry)


@pytest.fixture
def stage(instance: Instance, registry: Registry) -> Stage:
    return Stage(instance, registry)


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
    instance = Instance(link, keys, clock)
    yield Stage(instance, Registry(instance))
    await link.aclose()
