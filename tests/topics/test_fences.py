"""Every script that only the owner of a partition may call: anybody else is told so, and nothing changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

import pytest

from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Topic
from conquiet.wire.lease import Lease
from conquiet.wire.scripts import Call, Script
from conquiet.wire.streams import pack
from tests.rigs.asking import keys_like
from tests.topics.staging import Stage

pytestmark = [pytest.mark.any_server, pytest.mark.guarantee]

OWNER: Final = "worker-1#a1"
GROUP: Final = "billing"


@dataclass
class Scene:
    """A partition of which everything is there that a script could change, and its owner."""

    instance: Instance
    topic: Topic
    epoch: int
    handled: list[str]
    """Entries that the owner was given and has not settled."""

    @property
    def stream(self) -> str:
        return self.topic.stream(self.instance.keys, 0)

    @property
    def names(self) -> list[str]:
        """Lease, stream, retry, attempts, outbox."""
        lease, retry, attempts, outbox = self.instance.keys.of_group(self.stream, GROUP)
        return [lease, self.stream, retry, attempts, outbox]

    @property
    def delayed(self) -> list[str]:
        return [self.instance.keys.delayed(self.stream), self.instance.keys.delayed_items(self.stream)]

    def call(self, script: str, owner: str, epoch: int) -> Call:
        return FENCED[script](self, Script.named(script), owner, epoch)

    async def everything(self, url: str) -> dict[str, Any]:
        """What every key holds."""
        keys = sorted(await keys_like(url, f"{self.instance.keys.namespace}:*"))
        return dict(
            zip(keys, await self.instance.link.call_many(self.stream, [pack("DUMP", key) for key in keys]), strict=True)
        )


_Make = Callable[[Scene, Script, str, int], Call]

FENCED: Final[dict[str, _Make]] = {
    "take": lambda scene, script, owner, epoch: script(
        [*scene.names[:4], *scene.delayed], owner, epoch, 0, GROUP, 10, 10, "0-0", "", scene.handled[0]
    ),
    "takeover": lambda scene, script, owner, epoch: script(scene.names[:4], owner, epoch, GROUP, "-", 10, OWNER, "", 3),
    "park": lambda scene, script, owner, epoch: script(
        scene.names[:4], owner, epoch, 0, GROUP, scene.handled[0], 60_000, 1, "E"
    ),
    "requeue": lambda scene, script, owner, epoch: script(
        [*scene.names[:2], scene.names[3], *scene.delayed, scene.names[2]],
        *(owner, epoch, 0, GROUP, scene.handled[0], 0, 1, f"0/{scene.handled[0]}"),
    ),
    "bury": lambda scene, script, owner, epoch: script(
        scene.names, owner, epoch, 0, GROUP, "orders", 0, scene.handled[0], 1, "rejected", "E", "no", "", -1
    ),
    "partition_release": lambda scene, script, owner, epoch: script(scene.names[:2], owner, epoch, GROUP),
    "lease_renew": lambda scene, script, owner, epoch: script(scene.names[:1], owner, epoch, 15_000, 1_000),
    "lease_suspect": lambda scene, script, owner, epoch: script(scene.names[:1], owner, epoch, scene.handled[1]),
}
"""How each is called such that it changes something."""

WRONG: Final = {
    "another owner": ("worker-2#b2", 0),
    "another incarnation": ("worker-1#a2", 0),
    "no incarnation": ("worker-1", 0),
    "nobody": ("", 0),
    "an epoch before": (OWNER, -1),
    "an epoch to come": (OWNER, 1),
}


@pytest.fixture
async def scene(stage: Stage) -> Scene:
    topic = await stage.topic()
    held = await stage.acquire(topic, GROUP, owner=OWNER)
    await stage.add(topic, 5)
    ids, _ = await stage.take(held, 4)
    await stage.park(held, ids[3], delay=0.0)
    scene = Scene(stage.instance, topic, int(held.epoch), ids[:3])
    await stage.instance.run(scene.stream, scene.call("lease_suspect", OWNER, scene.epoch))
    await stage.instance.run(scene.stream, Script.named("lease_suspect")(scene.names[:1], OWNER, scene.epoch, ids[0]))
    delayed, items = scene.delayed
    await stage.call(items, "HSET", items, "i", b"\x92\xa7payload\xa11")
    await stage.call(delayed, "ZADD", delayed, 1, "i")
    return scene


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("script", FENCED)
async def test_only_the_owner_in_its_epoch_may(scene: Scene, url: str, script: str, wrong: str) -> None:
    owner, by = WRONG[wrong]
    before = await scene.everything(url)
    assert await scene.instance.run(scene.stream, scene.call(script, owner, scene.epoch + by)) in ([0], 0)
    assert await scene.everything(url) == before


@pytest.mark.parametrize("script", FENCED)
async def test_an_owner_that_was_replaced_may_not(scene: Scene, stage: Stage, url: str, script: str) -> None:
    """Whoever has it now, and wherever that lives: also the same consumer, which took it again."""
    stage.instance.clock.advance(20.0)  # type: ignore[attr-defined]
    for heir in ("worker-2#b2", OWNER):
        held = await stage.acquire(scene.topic, GROUP, owner=heir)
        before = await scene.everything(url)
        assert await scene.instance.run(scene.stream, scene.call(script, OWNER, scene.epoch)) in ([0], 0)
        assert await scene.everything(url) == before
        await stage.release(held)
        before = await scene.everything(url)
        assert await scene.instance.run(scene.stream, scene.call(script, OWNER, int(held.epoch))) in ([0], 0)
        assert await scene.everything(url) == before


@pytest.mark.parametrize("script", FENCED)
async def test_without_a_lease_nobody_may(scene: Scene, stage: Stage, url: str, script: str) -> None:
    """As on a server that forgot it: none is made."""
    await stage.call(scene.names[0], "DEL", scene.names[0])
    before = await scene.everything(url)
    for epoch in (scene.epoch, 0):
        assert await scene.instance.run(scene.stream, scene.call(script, OWNER, epoch)) in ([0], 0, -1)
    assert await scene.everything(url) == before


@pytest.mark.parametrize("script", FENCED)
async def test_the_owner_may(scene: Scene, url: str, script: str) -> None:
    """Else the tests above would prove nothing."""
    before = await scene.everything(url)
    reply = await scene.instance.run(scene.stream, scene.call(script, OWNER, scene.epoch))
    assert (reply if isinstance(reply, int) else reply[0]) == 1
    assert await scene.everything(url) != before


async def test_the_renewal_of_a_lease_is_the_fenced_one(scene: Scene, url: str) -> None:
    """It goes out as the holder's record says: that one is lost for good by one refusal."""
    before = await scene.everything(url)
    for owner, epoch in (("worker-1#a2", scene.epoch), (OWNER, scene.epoch - 1)):
        lease = Lease.acquired(scene.names[0], owner, epoch, 15.0, asked=0.0)
        lease.renewed(await scene.instance.run(scene.stream, lease.renewal(0)), asked=1.0)
        assert lease.lost
    assert await scene.everything(url) == before


def test_every_script_that_asks_who_holds_the_lease_is_here() -> None:
    texts = {
        file.name.removesuffix(".lua"): file.read_text("utf-8")
        for file in files("conquiet.wire").joinpath("lua").iterdir()
    }
    scripts = {name for name, text in texts.items() if not text.startswith("-- Fragment")}
    assert {name for name in scripts if re.search(r"\bholds\(", texts[name])} == FENCED.keys()
    # And those which use the lease otherwise take it away from whoever has it, on purpose, or give it to nobody else.
    others = {name for name in scripts if "--#include lease\n" in texts[name]} - FENCED.keys()
    assert others == {"group_adopt", "group_delete", "group_reset", "lease_retire", "partition_acquire"}
