"""Leases of topics on a server that lost its last writes: only the claim that it records is accepted.

The owner whose claim it has forgotten goes on, as one does who was told "yes": everything it tries is refused.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import pytest

from conquiet.kit.clock import ManualClock
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Registry
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.keys import Keys
from tests.rigs.rollback import Rollback
from tests.topics.staging import TTL, Stage
from tests.topics.test_fences import FENCED, GROUP, OWNER, Scene

pytest_plugins = ("tests.contracts.rollback_fixtures",)
pytestmark = pytest.mark.guarantee

HEIR: Final = "worker-2#b2"
AN_HOUR: Final = 3600.0


@pytest.fixture
async def stage(rollback: Rollback, clock: ManualClock) -> AsyncIterator[Stage]:
    link = Connections(Address.of(rollback.url))
    instance = Instance(link, Keys("t"), clock)
    yield Stage(instance, Registry(instance))
    await link.aclose()


async def forgotten(stage: Stage, rollback: Rollback) -> Scene:
    """An owner with entries in hand, on a server that knows neither; the entries themselves were kept."""
    topic = await stage.topic()
    await stage.create_group(topic, GROUP)
    await stage.add(topic, 5)
    await rollback.keep()
    held = await stage.acquire(topic, GROUP, owner=OWNER)
    ids, _ = await stage.take(held, 4) or ([], [])
    await rollback.lose()
    return Scene(stage.instance, topic, int(held.epoch), ids[:3])


async def is_refused_everything(scene: Scene, url: str, owner: str, epoch: int) -> None:
    before = await scene.everything(url)
    for script in FENCED:
        reply = await scene.instance.run(scene.stream, scene.call(script, owner, epoch))
        assert reply in ([0], 0, -1), script
        assert await scene.everything(url) == before, script


async def test_whoever_acquires_next_is_the_only_owner(stage: Stage, rollback: Rollback) -> None:
    """Also while nobody has: what the server does not know gives no right."""
    scene = await forgotten(stage, rollback)
    await is_refused_everything(scene, rollback.url, OWNER, scene.epoch)
    held = await stage.acquire(scene.topic, GROUP, owner=HEIR)
    assert int(held.epoch) > scene.epoch
    await is_refused_everything(scene, rollback.url, OWNER, scene.epoch)
    taken = await stage.take(held, 10)
    assert taken is not None
    assert taken[0] == await stage.ids(scene.topic)
    await is_refused_everything(scene, rollback.url, OWNER, scene.epoch)
    assert await stage.pending(scene.topic, GROUP) == taken[0]


async def test_the_same_consumer_can_do_nothing_under_the_claim_that_was_forgotten(
    stage: Stage, rollback: Rollback
) -> None:
    """Else what it had under way before would count under the lease that it took after."""
    scene = await forgotten(stage, rollback)
    held = await stage.acquire(scene.topic, GROUP, owner=OWNER)
    assert int(held.epoch) > scene.epoch
    await stage.take(held, 10)
    await is_refused_everything(scene, rollback.url, OWNER, scene.epoch)


async def test_a_takeover_that_was_forgotten_leaves_the_owner_before_it(
    stage: Stage, rollback: Rollback, clock: ManualClock
) -> None:
    topic = await stage.topic()
    await stage.add(topic, 5)
    first = await stage.acquire(topic, GROUP, owner=OWNER)
    ids, _ = await stage.take(first, 2) or ([], [])
    await rollback.keep()
    clock.advance(TTL + 1)
    second = await stage.acquire(topic, GROUP, owner=HEIR)
    await rollback.lose()
    scene = Scene(stage.instance, topic, int(first.epoch), ids)
    await is_refused_everything(scene, rollback.url, HEIR, int(second.epoch))
    assert await stage.take(first, 1, ids[0]) is not None
    clock.advance(TTL + 1)
    third = await stage.acquire(topic, GROUP, owner=HEIR)
    assert int(third.epoch) > int(second.epoch) > int(first.epoch)
    await is_refused_everything(scene, rollback.url, OWNER, int(first.epoch))
    await is_refused_everything(scene, rollback.url, HEIR, int(second.epoch))


async def test_a_release_that_was_forgotten_leaves_the_lease_until_it_runs_out(
    stage: Stage, rollback: Rollback, clock: ManualClock
) -> None:
    topic = await stage.topic()
    held = await stage.acquire(topic, GROUP, owner=OWNER)
    await rollback.keep()
    await stage.release(held)
    await rollback.lose()
    assert (await stage.try_acquire(topic, GROUP, owner=HEIR))[0] == b"HELD"
    clock.advance(TTL + 1)
    assert int((await stage.acquire(topic, GROUP, owner=HEIR)).epoch) > int(held.epoch)


# --- and its clock went back ---------------------------------------------------------------------------------


async def test_after_a_clock_that_went_back_the_record_keeps_epochs_rising(stage: Stage, rollback: Rollback) -> None:
    """A claim that was kept counts, however far in the future its epoch seems to lie."""
    topic = await stage.topic()
    ahead = Stage(Instance(stage.instance.link, stage.instance.keys, later := ManualClock()), stage.registry)
    later.advance(AN_HOUR)
    first = await ahead.acquire(topic, GROUP, owner=OWNER)
    await ahead.release(first)
    await rollback.keep()
    second = await ahead.acquire(topic, GROUP, owner=OWNER)
    await rollback.lose()
    third = await stage.acquire(topic, GROUP, owner=HEIR)
    assert int(third.epoch) == int(first.epoch) + 1
    scene = Scene(stage.instance, topic, int(second.epoch), ["1-1", "1-2", "1-3"])
    await is_refused_everything(scene, rollback.url, OWNER, int(second.epoch))


@pytest.mark.parametrize("recorded", [HEIR, "worker-1#a2"], ids=["another", "another life of it"])
async def test_where_an_epoch_comes_twice_the_incarnation_decides(
    stage: Stage, rollback: Rollback, recorded: str
) -> None:
    """Writes lost and a clock that went back: the one case in which a number can be given a second time."""
    scene = await forgotten(stage, rollback)
    held = await stage.acquire(scene.topic, GROUP, owner=recorded)
    await stage.call(scene.names[0], "HSET", scene.names[0], "epoch", scene.epoch)
    taken = await stage.instance.run(scene.stream, scene.call("take", recorded, scene.epoch))
    assert taken[0] == 1
    await is_refused_everything(scene, rollback.url, OWNER, scene.epoch)
    await is_refused_everything(scene, rollback.url, recorded, int(held.epoch))
