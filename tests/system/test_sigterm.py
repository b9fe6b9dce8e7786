"""Signals end a consumer process soon and cleanly (spec 1 §6.3, spec 2 §5.1)."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from conquiet import RedisStreamsQueue
from tests.contracts.looking import Look
from tests.rigs.waiting import eventually
from tests.system.processes import Crew

pytestmark = [pytest.mark.system, pytest.mark.any_server]

number = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
flavour = pytest.mark.parametrize("flavour", ["core", "sync"])


@number
@flavour
@pytest.mark.parametrize("how", ["iter", "run"])
async def test_a_signal_ends_a_process_that_waits_for_a_minute(
    how: str, flavour: str, number: signal.Signals, crew: Crew, queue: RedisStreamsQueue, look: Look
) -> None:
    """spec 1 §6.3: on SIGTERM no new reads are initiated and in-flight messages remain pending; exit code 0."""
    sent = await queue.enqueue({"n": 1})
    await crew.start("consumer", flavour, "--how", how)
    await look.blocked()  # the first message is handled, and the wait for another has begun
    crew.signal("consumer", number)
    assert await crew.ended("consumer") == 0
    assert crew.notes() == ["ready", sent, "ended"]
    in_flight = [] if how == "run" else [sent]
    assert await look.pending_ids() == in_flight
    assert [row.deliveries for row in await look.pending()] == [1] * len(in_flight)
    after = await queue.enqueue({"n": 2})
    assert await look.drain() == [after]


@number
@flavour
async def test_a_signal_in_a_handler_lets_it_finish(
    flavour: str, number: signal.Signals, crew: Crew, queue: RedisStreamsQueue, look: Look, tmp_path: Path
) -> None:
    """spec 2 §5.1: graceful: the message in hand is committed and acknowledged, and no other is read."""
    first, second = await queue.enqueue_many([{"n": 1}, {"n": 2}])
    gate = tmp_path / "gate"
    await crew.start("consumer", flavour, "--how", "run", "--gate", str(gate))
    await eventually(lambda: crew.handled() == [first], "the handler runs")
    crew.signal("consumer", number)
    gate.touch()
    assert await crew.ended("consumer") == 0
    assert crew.notes() == ["ready", first, "ended"]
    assert await look.pending() == []
    assert await look.drain() == [second]
