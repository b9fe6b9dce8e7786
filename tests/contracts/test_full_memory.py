"""Every script and every command of every room, when the server's memory is full (``maxmemory``, nothing evicted).

What frees or settles goes on, what takes on more is refused before anything is done, and is done when there is room.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import conquiet
from conquiet.kit.clock import ManualClock
from conquiet.sync import EmbeddedRedis
from tests.conftest import CONTRACT_LADDER, Rung
from tests.contracts.full_memory_lives import LIVES
from tests.contracts.full_memory_scenes import COMMANDS, SCENES, Scene
from tests.rigs.filling import CONNECTION, PLAIN, Filling, wanted
from tests.rigs.lua_reading import SCRIPTS
from tests.rigs.servers import on_a_port_in_sync
from tests.rigs.sizing import IS_FULL

pytestmark = pytest.mark.guarantee

ALL = {**SCENES, **LIVES}
RUNGS = [rung for rung in CONTRACT_LADDER if rung.binary][None if IS_FULL else -1 :]


@pytest.fixture(params=RUNGS, ids=[rung.name for rung in RUNGS])
def own(request: pytest.FixtureRequest) -> Iterator[EmbeddedRedis]:
    """A server that the test may fill."""
    rung: Rung = request.param
    with on_a_port_in_sync(rung.binary) as server:
        yield server


@pytest.mark.parametrize("scene", ALL, ids=lambda scene: scene.__name__)
async def test_what_frees_or_keeps_goes_on_and_what_adds_is_refused_before_it_changes_anything(
    scene: Scene, own: EmbeddedRedis
) -> None:
    async with Filling(own.url) as proxy:
        await scene(proxy.url, ManualClock())
    assert proxy.wrong == []
    missing = {name for name in ALL[scene] if wanted(name) not in proxy.outcomes[name]}
    assert missing == set(), proxy.outcomes


def test_every_script_and_every_command_is_in_a_scene() -> None:
    package = Path(conquiet.__file__).parent
    code = "".join(path.read_text("utf-8") for path in package.rglob("*.py"))
    sent = set(re.findall(r'\b(?:pack|ask)\(\*?\(?"([A-Z]+)"', code)) - {"EVAL", "EVALSHA"}
    assert sent - CONNECTION == PLAIN.keys()
    assert COMMANDS - PLAIN.keys() == set(SCRIPTS)
    # The others change nothing, and are asked for in many places.
    assert {name for name, kind in PLAIN.items() if kind != "reads"} <= COMMANDS
