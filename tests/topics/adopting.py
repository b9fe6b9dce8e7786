"""Groups as Spark queries have them: making them, moving them, and what they look like in Redis."""

from __future__ import annotations

from typing import Any, Final

from conquiet.topics.server.external_groups import Position, adopt_group, publish_progress
from conquiet.topics.server.topics import Topic
from tests.rigs.asking import keys_like, lasting_keys
from tests.topics.staging import Stage

__all__ = ["GROUP", "adopt", "all_keys", "everything", "found", "lasting", "places", "publish", "stands"]

GROUP: Final = "query"


async def adopt(stage: Stage, topic: Topic, positions: dict[int, Position] | None = None, group: str = GROUP) -> None:
    await adopt_group(stage.instance, stage.registry, topic, group, positions or {})


async def publish(stage: Stage, topic: Topic, positions: dict[int, Position], group: str = GROUP) -> None:
    await publish_progress(stage.instance, topic, group, positions)


async def found(stage: Stage, topic: Topic) -> Topic:
    looked = await stage.registry.fetch_or_none(topic.name)
    assert looked is not None
    return looked


async def places(stage: Stage, topic: Topic, group: str = GROUP) -> list[str | None]:
    """Where a group stands on each partition, if it is there."""
    return [(await stands(stage, topic, index, group)).get("last-delivered-id") for index in range(topic.partitions)]


async def stands(stage: Stage, topic: Topic, partition: int = 0, group: str = GROUP) -> dict[str, Any]:
    stream = stage.stream(topic, partition)
    if not await stage.call(stream, "EXISTS", stream):
        return {}
    for flat in await stage.call(stream, "XINFO", "GROUPS", stream):
        row = {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}
        if row["name"] == group.encode():
            return {name: value.decode() if isinstance(value, bytes) else value for name, value in row.items()}
    return {}


async def all_keys(stage: Stage) -> list[str]:
    """Every key of the test's namespace, on whatever node."""
    nodes = [f"redis://{host}:{port}" for host, port in stage.instance.link.address.seeds]
    return sorted([key for node in nodes for key in await keys_like(node, f"{stage.instance.keys.namespace}:*")])


async def lasting(stage: Stage) -> list[str]:
    """Those of them that do not run out within a day."""
    nodes = [f"redis://{host}:{port}" for host, port in stage.instance.link.address.seeds]
    return [key for node in nodes for key in await lasting_keys(node, f"{stage.instance.keys.namespace}:*")]


async def everything(stage: Stage) -> dict[str, Any]:
    """All that is stored: whatever changes shows."""
    state: dict[str, Any] = {}
    for key in await all_keys(stage):
        kind = await stage.call(key, "TYPE", key)
        if kind == b"hash":
            flat = await stage.call(key, "HGETALL", key)
            state[key] = dict(zip(flat[::2], flat[1::2], strict=True))
        elif kind == b"set":
            state[key] = set(await stage.call(key, "SMEMBERS", key))
        else:
            state[key] = await stage.call(key, "DUMP", key)
    return state
