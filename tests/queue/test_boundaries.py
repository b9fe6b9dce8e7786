"""Answers that are lost, at every command: the caller is told, nothing else is lost, and the next call has its own."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Final

import pytest

from conquiet import QueueConfig, RedisStreamsQueue
from tests.conftest import Server
from tests.queue.boundaries import BACKGROUND, GHOSTS, PATHS, Scene
from tests.rigs.calling import at_each, boundaries, sends_what_is_listed, struck_and_made_again
from tests.rigs.cluster_tracing import tracing
from tests.rigs.tracing import Way

pytestmark = [pytest.mark.any_server, pytest.mark.guarantee]

WAYS: Final[tuple[Way, ...]] = ("unanswered", "unsent")


@pytest.fixture
async def scene(url: str) -> AsyncIterator[Scene]:
    config = QueueConfig(f"t:{secrets.token_hex(6)}", "group", "consumer-1", block_ms=2_000)
    async with tracing(url) as proxy:
        queue, eye = (RedisStreamsQueue.connect(where, config) for where in (proxy.url, url))
        yield Scene(proxy, url, queue, eye)
        await queue.aclose()
        await eye.aclose()


@pytest.mark.parametrize("path", PATHS)
async def test_a_call_sends_what_is_listed_and_nothing_else(scene: Scene, path: str) -> None:
    """A new command belongs on the list of its call, and so is struck at like the others."""
    await sends_what_is_listed(scene, PATHS[path], BACKGROUND)


@at_each(PATHS, boundaries(PATHS))
@pytest.mark.parametrize("way", WAYS)
async def test_a_call_whose_answer_is_lost_can_be_made_again(scene: Scene, path: str, at: int, way: Way) -> None:
    await struck_and_made_again(scene, PATHS[path], at, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", range(len(GHOSTS.commands)))
async def test_ids_without_an_entry_are_removed_whichever_answer_is_lost(
    scene: Scene, server: Server, at: int, way: Way
) -> None:
    if not server.version.startswith("6."):
        pytest.skip("this server removes them itself")
    await struck_and_made_again(scene, GHOSTS, at, way)
