"""What is there before a call of a producer, an operator or Spark."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from conquiet.kit.clock import ManualClock
from conquiet.topics.broker import Broker
from conquiet.topics.produce import once
from conquiet.topics.produce.once import Write
from conquiet.topics.server.external_groups import Position, adopt_group
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Registry, Topic
from tests.rigs.tracing import Tracer
from tests.topics.staging import Stage, hurried

__all__ = [
    "GROUP",
    "QUERY",
    "TOPIC",
    "WRITE",
    "Scene",
    "begun",
    "bounded_topic",
    "dead_letters",
    "entries",
    "group",
    "group_of_what_is_not_listed",
    "query",
    "topic",
]

TOPIC: Final = "orders"
GROUP: Final = "billing"
QUERY: Final = "query"
WRITE: Final = Write("nightly")


@dataclass
class Scene:
    """A namespace that nobody else has: ``broker`` and ``instance`` reach it through a proxy, ``stage`` past it."""

    proxy: Tracer
    broker: Broker
    instance: Instance
    stage: Stage
    clock: ManualClock
    found: Topic | None = None
    ids: list[str] = field(default_factory=list)
    partition: int = 0

    @property
    def topic(self) -> Topic:
        assert self.found is not None
        return self.found

    @property
    def registry(self) -> Registry:
        return Registry(self.instance)

    @property
    def stream(self) -> str:
        return self.stage.stream(self.topic)

    async def soon(self, work: Any) -> Any:
        """The outcome of what waits for time to pass."""
        return await hurried(self.clock, work)

    async def looked(self) -> Topic | None:
        return await Registry(self.stage.instance).fetch_or_none(TOPIC)


async def topic(scene: Scene) -> None:
    scene.found = await scene.stage.topic(TOPIC)


async def bounded_topic(scene: Scene) -> None:
    scene.found = await scene.stage.topic(TOPIC, max_len=10, on_full="reject")


async def entries(scene: Scene) -> None:
    await topic(scene)
    scene.ids = await scene.stage.add(scene.topic, 3)


async def group(scene: Scene) -> None:
    """It has got two of three messages, and nobody is left of it."""
    await entries(scene)
    await scene.stage.join(scene.topic, GROUP)
    await scene.stage.create_group(scene.topic, GROUP)
    await scene.stage.read(scene.topic, GROUP, 2)
    scene.clock.advance(60.0)


async def group_of_what_is_not_listed(scene: Scene) -> None:
    """As if there had been no room to list the partition."""
    await group(scene)
    listed = scene.stage.instance.keys.partitions(TOPIC)
    await scene.stage.call(listed, "SREM", listed, scene.stream)


async def dead_letters(scene: Scene) -> None:
    await topic(scene)
    await scene.stage.join(scene.topic, GROUP)
    scene.ids = await scene.stage.dead(scene.topic, GROUP, 3)


async def query(scene: Scene) -> None:
    await entries(scene)
    await adopt_group(scene.stage.instance, scene.stage.registry, scene.topic, QUERY, {0: Position("0-0", 0)})


async def begun(scene: Scene) -> None:
    await topic(scene)
    await once.begin(scene.stage.instance, scene.topic, WRITE)
