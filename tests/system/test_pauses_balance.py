"""An owner of streams that is stopped at an exactly known step, for longer than its leases, and then goes on.

Its heir has the streams when the owner's command, or the answer to it, goes on at last: that changes nothing for the
heir, the owner never acts as one again in its old epoch, and both share what is added afterwards.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from conquiet import StreamBalancer
from tests.rigs.asking import ask
from tests.rigs.freezing import Freezer, Side, all_of, freezer
from tests.rigs.sizing import IS_FULL
from tests.rigs.waiting import eventually
from tests.system.balance_crew import Crew, names
from tests.system.balance_log import Pen, two_at_once
from tests.system.balance_process import Consumer
from tests.system.jobs_log import now

pytestmark = [pytest.mark.system, pytest.mark.any_server]

LEASE: Final = 1.0
PACE: Final = 0.02
SIDES: Final[tuple[Side, ...]] = ("before", "after")


@dataclass(frozen=True)
class Step:
    """A command at which the owner is stopped, and how it comes to send it."""

    command: str
    cause: str = ""
    """``add`` (a stream is added), ``write`` (it commits and finishes), ``leave`` or ``give away``."""
    sample: Side | None = None
    """On which side it is part of a run of small scale."""

    @property
    def name(self) -> str:
        return f"{self.cause or 'idle'}: {self.command}"


STEPS: Final = (
    Step("balance_take", "add", "after"),
    Step("balance_renew", sample="before"),
    Step("balance_sweep"),
    Step("XREAD"),
    Step("balance_position", "write"),
    Step("balance_finish", "write", "before"),
    Step("balance_release", "give away", "before"),
    Step("balance_release", "leave", "before"),
)


def cases() -> Iterable[tuple[Step, Side]]:
    """Each step on both sides in a run of full scale; else a sample."""
    return [(step, side) for step in STEPS for side in SIDES if IS_FULL or step.sample == side]


@dataclass
class Scene:
    """One owner that is stopped, and its heir, which runs here."""

    directory: Path
    step: Step
    side: Side
    crew: Crew
    proxy: Freezer
    streams: list[str] = field(default_factory=lambda: names(2))

    async def play(self) -> None:
        async with self._heir() as heir:
            await self._reach_the_step(heir)
            await self.crew.freeze("victim")
            if self.step.cause != "give away":
                await heir.open()
            if self._is_finished:
                self.streams.pop(0)
            await eventually(self._heir_has_all, "the heir has all of them")
            await self._go_on()
            await self._share()
        assert two_at_once(self.crew.log.read()) == []
        self._judge()

    # --- up to the step ----------------------------------------------------------------------------------------

    @property
    def _gate(self) -> Path:
        return self.directory / "gate"

    @asynccontextmanager
    async def _heir(self) -> AsyncIterator[StreamBalancer]:
        """To be opened when it is time."""
        heir = StreamBalancer.connect(
            self.crew.url,
            service=self.crew.service,
            consumer="heir",
            lease_ttl=LEASE,
            auto_claim=True,
            rebalance=True,
            handle_signals=False,
        )
        consumer = Consumer(heir, Pen(str(self.crew.log.path), "heir"), now)
        beside = [asyncio.ensure_future(consumer.act(PACE)), asyncio.ensure_future(self._consume(heir, consumer))]
        try:
            yield heir
        finally:
            await heir.aclose()
            for task in beside:
                task.cancel()
            await asyncio.wait(beside)

    async def _consume(self, heir: StreamBalancer, consumer: Consumer) -> None:
        await eventually(lambda: heir._life.is_lived, "the heir is there")
        await consumer.consume()

    async def _reach_the_step(self, heir: StreamBalancer) -> None:
        step, crew, proxy = self.step, self.crew, self.proxy
        options = ["--lease-ttl", str(LEASE), "--pace", str(PACE), "--gate", str(self._gate), "--share"]
        await crew.start("victim", options=tuple(options), url=proxy.url)
        if step.cause != "add":
            await crew.add(self.streams)
            await crew.settled(self.streams, "victim")
        proxy.keep(step.command, self.side)
        if step.cause == "add":
            await crew.add(self.streams)
        elif step.cause == "write":
            self._gate.touch()
        elif step.cause == "leave":
            crew.signal("victim", signal.SIGTERM)
        elif step.cause == "give away":
            await heir.open()
        await proxy.kept()

    @property
    def _is_finished(self) -> bool:
        """Whether the owner was done with its first stream, by the server's word."""
        return (self.step.command, self.side) == ("balance_finish", "after")

    # --- and on from there -------------------------------------------------------------------------------------

    async def _heir_has_all(self) -> bool:
        held = self.crew.log.held("heir")
        return await self.crew.owners() == dict.fromkeys(self.streams, "heir") and set(held) == set(self.streams)

    async def _go_on(self) -> None:
        """What was kept goes on, then the owner does; for the heir nothing changes."""
        before = await self._in_redis()
        await self.proxy.release()
        after = await self._in_redis()
        assert after[1:] == before[1:]
        # Heard of again, the owner is one with whom the heir shares: it may give up some by now.
        assert _epochs(after[0]) == _epochs(before[0])
        assert "victim" not in str(after[0])
        at = await self.crew.now()
        self.crew.signal("victim", signal.SIGCONT)
        if self.step.cause == "leave":
            await eventually(lambda: self.crew.code("victim") is not None, "it has left")
            assert self.crew.code("victim") == 0
        else:
            acts = self.crew.log.noted
            await eventually(lambda: any(note.at > at for note in acts("acts", "victim")), "it goes on")
        assert (await self._in_redis())[1:] == before[1:]  # owners may share again by now

    async def _in_redis(self) -> list[object]:
        """All that the server knows of the streams, but for times."""
        crew = self.crew
        return [
            await ask(crew.url, "HGETALL", crew.keys.owners),
            await ask(crew.url, "HGETALL", crew.keys.positions),
            await ask(crew.url, "XLEN", crew.keys.input),
        ]

    async def _share(self) -> None:
        """Both work on; or the heir alone, if the other has left."""
        new = [f"new:{number}" for number in range(4)]
        await self.crew.add(new)
        self.streams += new
        if self.step.cause == "leave":
            await self.crew.settled(self.streams, "heir")
            return
        await eventually(self._is_shared, "all have an owner, and each owns some")
        await self.crew.dismiss("victim")
        await self.crew.settled(self.streams, "heir")

    async def _is_shared(self) -> bool:
        owners, log = await self.crew.owners(), self.crew.log
        done = {
            note.stream for note in log.noted("accepted", "victim") if note.detail == "done"
        }  # nobody tells of that
        held = sorted([*(set(log.held("victim")) - done), *log.held("heir")])
        return set(owners.values()) == {"victim", "heir"} and held == sorted(self.streams)

    def _judge(self) -> None:
        """Whatever the owner has tried to write since it was stopped is refused, and what it had before is not its."""
        log = self.crew.log
        assert set(log.held("heir")) == set(self.streams)
        accepted = {(note.stream, note.detail) for note in log.noted("accepted", "victim")}
        written = {
            ("balance_position", "after"): {("session:0", "commit")},
            ("balance_finish", "before"): {("session:0", "commit"), ("session:1", "commit")},
            ("balance_finish", "after"): {("session:0", "commit"), ("session:1", "commit"), ("session:0", "done")},
        }
        assert accepted == written.get((self.step.command, self.side), set())


async def play(url: str, directory: Path, step: Step, side: Side) -> None:
    directory.mkdir()
    with Crew.hired(url, directory) as crew:
        async with freezer(url) as proxy:
            await Scene(directory, step, side, crew, proxy).play()


async def test_an_owner_that_is_stopped_at_any_step_changes_nothing_for_its_heir(url: str, tmp_path: Path) -> None:
    scenes: dict[str, Callable[[], Any]] = {}
    for number, (step, side) in enumerate(cases()):
        scenes[f"{side} {step.name}"] = partial(play, url, tmp_path / str(number), step, side)
    await all_of(scenes)


def _epochs(owners: object) -> dict[str, str]:
    """For each stream its entry and its epoch, without its owner."""
    assert isinstance(owners, dict)
    return {str(stream): str(owner).rpartition("|")[0] for stream, owner in owners.items()}
