"""A consumer of a topic that is stopped at an exactly known step, for longer than its leases, and then goes on.

Its successor is at work with the message when the consumer's command, or the answer to it, goes on at last: it changes
nothing for the successor, is not handled again by who has lost it, and both share the work afterwards.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from conquiet import Broker, Subscription
from tests.rigs.asking import ask
from tests.rigs.freezing import Freezer, Side, all_of, freezer
from tests.rigs.sizing import IS_FULL
from tests.rigs.waiting import eventually
from tests.system.jobs_log import now
from tests.system.pauses import consumer_here
from tests.system.topics_crew import GROUP, TOPIC, Team
from tests.system.topics_log import Record, check

pytestmark = [pytest.mark.system, pytest.mark.any_server]

LEASE: Final = 1.0


@dataclass(frozen=True)
class Step:
    """A command at which the consumer is stopped, and how it comes to send it."""

    command: str
    do: str = ""
    """What is to become of a message that is sent; none is if it is empty."""
    mode: str = "park"
    cause: str = ""
    """``join``, ``leave`` or ``hand over``, if the command is part of that."""
    after: tuple[str, ...] = ()
    sample: Side | None = None
    """On which side it is part of a run of small scale."""

    @property
    def name(self) -> str:
        return f"{self.cause or self.do or 'idle'}: {self.command}"


STEPS: Final = (
    Step("take new", "done", sample="after"),
    Step("ack", "done", sample="before"),
    Step("park", "fail", sample="before"),
    Step("take due", "fail", after=("park",)),
    Step("requeue", "fail", "requeue", sample="before"),
    Step("bury", "reject", sample="before"),
    Step("forward: append", "reject"),
    Step("XDEL dead", "reject"),
    Step("lease_renew", sample="before"),
    Step("member_beat"),
    Step("XREAD"),
    Step("partition_acquire", cause="join"),
    Step("takeover", cause="join"),
    Step("partition_release", cause="hand over", sample="before"),
    Step("members_call", cause="hand over"),
    Step("partition_release", cause="leave", sample="before"),
    Step("member_leave", cause="leave"),
)
SIDES: Final[tuple[Side, ...]] = ("before", "after")
REFUSALS: Final = {
    **dict.fromkeys(("take new", "ack", "park", "take due", "requeue", "bury", "takeover"), b"*1\r\n:0\r\n"),
    **dict.fromkeys(("lease_renew", "partition_release"), b":0\r\n"),
}
"""What the server says to who has lost the lease."""


def cases() -> Iterable[tuple[Step, Side]]:
    """Each step on both sides in a run of full scale; else a sample."""
    return [(step, side) for step in STEPS for side in SIDES if IS_FULL or step.sample == side]


@dataclass
class Scene:
    """One consumer that is stopped, and its heir, which runs here."""

    url: str
    directory: Path
    step: Step
    side: Side
    team: Team
    proxy: Freezer
    broker: Broker
    sent: set[tuple[str, int]] = field(default_factory=set)
    stopped_at: int = 0
    epochs: list[int] = field(default_factory=list)
    """Of the partitions, when the consumer was stopped."""

    async def play(self) -> None:
        await self.broker.create_topic(TOPIC, partitions=2)
        async with self._heir() as heir:
            await self._reach_the_step(heir)
            await self._stop()
            if self.step.cause != "hand over":
                await heir.__aenter__()
            await self.team.owns_all("heir")
            if self._is_unfinished:
                await eventually(lambda: bool(self._begun_by_heir()), "the heir is at work with the message")
            await self._go_on(heir)
            self._gate.touch()
            await self.team.all_is_done(self.broker, self.sent - self._rejected)
            await self._share(heir)
        await self._judge()

    # --- up to the step ----------------------------------------------------------------------------------------

    @property
    def _gate(self) -> Path:
        return self.directory / "gate"

    @asynccontextmanager
    async def _heir(self) -> AsyncIterator[Subscription]:
        """To be entered when it is time."""
        heir = consumer_here(self.broker, self.team, "heir", LEASE, self.step.mode, self._gate)
        try:
            yield heir
        finally:
            self._gate.touch()
            await heir.aclose()

    async def _reach_the_step(self, heir: Subscription) -> None:
        step, team, proxy = self.step, self.team, self.proxy
        how = ("--lease-ttl", str(LEASE), "--heed", "--retry", step.mode)
        if step.cause == "join":
            proxy.keep(step.command, self.side)
            team.launch("victim", *how, url=proxy.url)
        else:
            await team.start("victim", *how, url=proxy.url)
            await team.owns_all("victim")
            proxy.keep(step.command, self.side, after=step.after)
        if step.do:
            await self.send(0, step.do)
        elif step.cause == "leave":
            team.signal("victim", signal.SIGTERM)
        elif step.cause == "hand over":
            await heir.__aenter__()
        await proxy.kept()

    async def send(self, partition: int, do: str = "done") -> None:
        seq = len(self.sent)
        await self.broker.send(TOPIC, {"seq": seq, "do": do}, key=f"k{seq}", partition=partition)
        self.sent.add((f"k{seq}", seq))

    async def _stop(self) -> None:
        if self.step.cause == "join":  # nothing can be in flight, nor has it told its name
            await self.team.freeze("victim")
        else:
            await self.team.stop("victim")
        self.stopped_at, self.epochs = now(), await self._epochs()

    async def _epochs(self) -> list[int]:
        leases = [self.team.keys.lease(stream, GROUP) for stream in await self.team.partitions()]
        return [int(await ask(self.url, "HGET", lease, "epoch") or 0) for lease in leases]

    # --- and on from there -------------------------------------------------------------------------------------

    @property
    def _is_unfinished(self) -> bool:
        """Whether the heir has to handle the message that the consumer was stopped with."""
        command, side = self.step.command, self.side
        if command in ("forward: append", "XDEL dead") or not self.step.do:
            return False
        return command in ("take new", "park", "take due", "requeue") or side == "before"

    def _begun_by_heir(self) -> list[Record]:
        return [record for record in self.team.log.read().records if record.owner.startswith("heir")]

    async def _go_on(self, heir: Subscription) -> None:
        """What was kept goes on, then the consumer does; for the heir nothing changes."""
        before = await self._in_redis(heir)
        await self.proxy.release()
        if self.side == "before" and self.step.command in REFUSALS:
            assert self.proxy.answer == REFUSALS[self.step.command]
        assert await self._in_redis(heir) == before
        self.team.signal("victim", signal.SIGCONT)
        if self.step.cause == "leave":
            assert await self.team.ended("victim") == 0
        else:
            await eventually(self._has_a_partition, "the one that was stopped has a partition again")
        assert (await self._in_redis(heir))["held"] == before["held"]

    async def _has_a_partition(self) -> bool:
        return "victim" in await self.team.owners()

    async def _in_redis(self, heir: Subscription) -> dict[str, object]:
        """All that the server knows of the heir's work, but for times; what it has no work with, it may hand over."""
        keys, found = self.team.keys, dict[str, object]()
        for stream in await self.team.partitions():
            found[stream] = await ask(self.url, "HGET", keys.lease(stream, GROUP), "epoch")
            found[f"{stream} retry"] = await ask(self.url, "ZRANGE", keys.retry(stream, GROUP), 0, -1)
            found[f"{stream} length"] = await ask(self.url, "XLEN", stream)
            found[f"{stream} outbox"] = await ask(self.url, "XLEN", keys.outbox(stream, GROUP))
        found["held"] = await self.team.held(heir.consumer)
        return found

    async def _share(self, heir: Subscription) -> None:
        """Both work on, each at its share; or the heir alone, if the other has left."""
        if self.step.cause == "leave":
            assert set(await self.team.owners()) == {"heir"}
        else:
            await eventually(self._is_shared, "each has a partition")
        for partition in (0, 1, 0, 1):
            await self.send(partition)
        await self.team.all_is_done(self.broker, self.sent - self._rejected)
        if self.step.cause != "leave":
            await self.team.dismiss("victim")

    async def _is_shared(self) -> bool:
        return sorted(await self.team.owners()) == ["heir", "victim"]

    # --- the end -----------------------------------------------------------------------------------------------

    async def _judge(self) -> None:
        records = self.team.log.read().records
        judged = [record for record in records if record.message not in self._rejected]
        assert check(self.sent - self._rejected, judged, self.team.disturbances) == []
        letters = await self.broker.admin.dead_letters(TOPIC)
        assert {(letter.key, letter.payload["seq"]) for letter in letters} == self._rejected
        assert len(letters) == len(self._rejected)
        late = [record for record in records if record.start >= self.stopped_at]
        assert not [record for record in late if record.epoch <= self.epochs[record.partition]], "it had lost that"
        info = await self.broker.admin.describe_group(TOPIC, GROUP)
        assert (info.lag, info.pending) == (0, 0)
        entries = [await ask(self.url, "XLEN", stream) for stream in await self.team.partitions()]
        assert sum(entries) == len(self.sent) + (self.step.mode == "requeue"), "a message is there twice"

    @property
    def _rejected(self) -> set[tuple[str, int]]:
        """What ends as a dead letter."""
        return {("k0", 0)} if self.step.do == "reject" else set()


async def play(url: str, directory: Path, step: Step, side: Side) -> None:
    directory.mkdir()
    with Team.hired(url, directory) as team:
        async with freezer(url) as proxy, team.broker() as broker:
            await Scene(url, directory, step, side, team, proxy, broker).play()


async def test_a_consumer_that_is_stopped_at_any_step_changes_nothing_for_its_heir(url: str, tmp_path: Path) -> None:
    scenes: dict[str, Callable[[], Any]] = {}
    for number, (step, side) in enumerate(cases()):
        scenes[f"{side} {step.name}"] = partial(play, url, tmp_path / str(number), step, side)
    await all_of(scenes)
