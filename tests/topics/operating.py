"""What tests of an operator look at, past the library."""

from __future__ import annotations

from tests.rigs.asking import keys_like
from tests.topics.staging import Stage

__all__ = ["all_keys", "generation_of"]


async def all_keys(stage: Stage) -> list[str]:
    """Every key of the test's namespace, on whatever node."""
    pattern = f"{stage.instance.keys.namespace}:*"
    nodes = [f"redis://{host}:{port}" for host, port in stage.instance.link.address.seeds]
    return sorted([key for node in nodes for key in await keys_like(node, pattern)])


async def generation_of(stage: Stage, group: str) -> int:
    key = stage.instance.keys.generation("orders", group)
    return int(await stage.call(key, "GET", key) or 0)
