"""Answers that are lost to producers, operators and Spark, at every command: each call can be made again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import pytest

from conquiet.kit.clock import ManualClock
from conquiet.topics.broker import Broker
from conquiet.topics.produce.once import Appended
from conquiet.topics.server.instance import Instance
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from tests.rigs.calling import (
    IS_FULL,
    at_each,
    boundaries,
    sends_what_is_listed,
    struck_and_goes_on,
    struck_and_made_again,
)
from tests.rigs.cluster_tracing import tracing
from tests.rigs.tracing import SCRIPTS, script_in
from tests.topics.boundaries import BACKGROUND as CONSUMING
from tests.topics.boundaries import PATHS
from tests.topics.calls import BACKGROUND, CALLS, REPEATED, Scene
from tests.topics.staging import Stage

pytestmark = [pytest.mark.any_server, pytest.mark.guarantee]

LOOKS: Final = (
    *("topic_look", "partition_look", "members_look", "group_look", "SMEMBERS", "SISMEMBER", "SCARD", "EXISTS"),
    *("TYPE", "XLEN"),
)
"""What changes nothing; struck at in calls that do nothing else, and everywhere at full size."""
CHOSEN: Final = [
    (path, at)
    for path, at in boundaries(CALLS)
    if IS_FULL or not CALLS[path].commands[at].startswith(LOOKS) or CALLS[path].commands[-1].startswith(LOOKS)
]


@pytest.fixture
async def scene(url: str, stage: Stage, clock: ManualClock) -> AsyncIterator[Scene]:
    keys = stage.instance.keys
    async with tracing(url) as proxy:
        link = Connections(Address.of(proxy.url))
        async with Broker(proxy.url, namespace=keys.namespace, clock=clock) as broker:
            yield Scene(proxy, broker, Instance(link, keys, clock), stage, clock)
        await link.aclose()


@pytest.mark.parametrize("path", [*CALLS, *REPEATED])
async def test_a_call_sends_what_is_listed_and_nothing_else(scene: Scene, path: str) -> None:
    """A new command belongs on the list of its call, and so is struck at like the others."""
    listed = (CALLS | REPEATED)[path]
    # Servers before Redis 7 do not know how much a group has not got yet: it is counted there.
    await sends_what_is_listed(scene, listed, BACKGROUND | ({"count_after"} - set(listed.commands)))


NOT_ON_A_PATH: Final[dict[str, str]] = {
    "group_finished": "changes nothing, and members of a topic that has grown ask again at their next look",
    "group_retract": "sent only if somebody begins to consume, past the library, in the middle of an adoption",
}
"""Scripts of the room whose answers no test here loses, and why."""


def test_every_script_of_the_room_is_on_a_path() -> None:
    listed = {name for path in (CALLS | REPEATED).values() for name in path.commands}
    listed |= CONSUMING | {name for path in PATHS.values() for name in path}
    room = {script.name for script in SCRIPTS.values() if not script.name.startswith(("jobs_", "balance_"))}
    assert room - {script_in(name) for name in listed} == set(NOT_ON_A_PATH)


@at_each(CALLS, CHOSEN)
async def test_a_call_whose_answer_is_lost_can_be_made_again(scene: Scene, path: str, at: int) -> None:
    await struck_and_made_again(scene, CALLS[path], at, "unanswered")


@pytest.mark.parametrize("way", ["unanswered", "unsent"])
async def test_rows_whose_answer_is_lost_are_appended_once(scene: Scene, way: str) -> None:
    done = await struck_and_goes_on(
        scene, REPEATED["append rows"], 0, "unanswered" if way == "unanswered" else "unsent"
    )
    assert done == (Appended(0, 2) if way == "unanswered" else Appended(2, 0))
    assert len(await scene.stage.ids(scene.topic)) == 2


async def test_a_page_whose_answer_is_lost_is_read_again(scene: Scene) -> None:
    [page] = await struck_and_goes_on(scene, REPEATED["read pages"], 0, "unanswered")
    assert [id.decode() for id, _ in page] == scene.ids
