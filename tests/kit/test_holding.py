"""The one holder of leases: it renews what is held, and ends with its owner."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from conquiet.errors import QueueError
from conquiet.kit.clock import ManualClock
from conquiet.kit.holding import TAKEN, Holder
from conquiet.kit.retrying import Lines
from tests.rigs.waiting import LONG, eventually

TTL = 30.0


@dataclass(frozen=True)
class Held:
    """A lease."""

    name: str
    epoch: int = 1


@dataclass
class Server:
    """Renews, and says of each lease in ``gone`` that it belongs to others."""

    asked: list[list[Held]] = field(default_factory=list)
    gone: set[Held] = field(default_factory=set)
    failures: int = 0
    closed: int = 0
    may_answer: asyncio.Event | None = None

    async def renew(self, held: list[Held]) -> list[Held]:
        self.asked.append(held)
        if self.failures:
            self.failures -= 1
            raise QueueError("away")
        if self.may_answer is not None:
            await self.may_answer.wait()
        return [lease for lease in held if lease in self.gone]

    async def close(self) -> None:
        self.closed += 1


class Rig:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.server = Server()
        self.lost: list[tuple[Held, str]] = []
        self.answers = 0
        self.holder = Holder[Held](
            lambda lease: lease.name,
            self.server.renew,
            lambda lease, reason: self.lost.append((lease, reason)),
            self.server.close,
            TTL,
            self.clock,
            "the thing",
            Lines(logging.getLogger("conquiet")),
            self._answered,
        )

    def _answered(self) -> None:
        self.answers += 1

    async def beats(self, count: int) -> None:
        for _ in range(count):
            before = len(self.server.asked)
            self.clock.advance(TTL / 3)
            await eventually(lambda before=before: len(self.server.asked) > before, "a beat")  # type: ignore[misc]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    await rig.holder.open()
    yield rig
    await rig.holder.aclose()


async def test_what_is_held_is_renewed_and_what_is_dropped_is_not(rig: Rig) -> None:
    first, second = Held("a"), Held("b")
    rig.holder.add([first, second], 0.0)
    await rig.beats(1)
    assert rig.server.asked[-1] == [first, second]
    assert rig.holder.drop(first)
    assert not rig.holder.drop(first)
    await rig.beats(1)
    assert rig.server.asked[-1] == [second]
    assert (len(rig.holder), rig.holder.leases, rig.holder.get("b")) == (1, [second], second)


async def test_a_lease_that_others_have_is_lost_and_told_of_once(rig: Rig) -> None:
    lease = Held("a")
    rig.holder.add([lease], 0.0)
    rig.server.gone.add(lease)
    await rig.holder.beat()
    await eventually(lambda: rig.lost == [(lease, TAKEN)], "it is told")
    assert not rig.holder.has(lease)
    await rig.beats(2)
    assert len(rig.lost) == 1


async def test_the_refusal_counts_before_the_owner_hears_of_it(rig: Rig) -> None:
    """The owner's loop may be blocked for long: whoever asks meanwhile is told the truth."""
    lease = Held("a")
    rig.holder.add([lease], 0.0)
    rig.server.gone.add(lease)
    beating = threading.Thread(target=asyncio.run, args=(rig.holder.beat(),))
    beating.start()
    beating.join(LONG)  # blocks this loop
    assert rig.lost == []
    assert not rig.holder.has(lease)


async def test_what_others_have_is_lost_though_the_rest_could_not_be_renewed(rig: Rig) -> None:
    lease, other = Held("a"), Held("b")
    rig.holder.add([lease, other], 0.0)

    async def partly(held: list[Held]) -> list[Held]:
        rig.holder.refused([lease])
        raise QueueError("one of two servers is away")

    rig.holder._renew = partly
    with pytest.raises(QueueError):
        await rig.holder.beat()
    await eventually(lambda: rig.lost == [(lease, TAKEN)], "it is told")
    assert rig.holder.leases == [other]


async def test_what_was_given_anew_meanwhile_is_not_lost(rig: Rig) -> None:
    old, new = Held("a", 1), Held("a", 2)
    rig.holder.add([old], 0.0)
    rig.server.gone.add(old)
    rig.server.may_answer = asyncio.Event()
    beating = asyncio.ensure_future(asyncio.shield(rig.holder.beat()))
    await eventually(lambda: bool(rig.server.asked), "it asks")
    rig.holder.add([new], 0.0)
    loop = rig.server.may_answer._loop  # type: ignore[attr-defined]
    loop.call_soon_threadsafe(rig.server.may_answer.set)
    await beating
    await eventually(lambda: rig.answers > 0, "the answer")
    assert rig.lost == []
    assert rig.holder.get("a") is new


async def test_what_is_ending_is_neither_renewed_nor_lost(rig: Rig) -> None:
    lease = Held("a")
    rig.holder.add([lease], 0.0)
    with rig.holder.ending(lease):
        await rig.beats(1)
        assert rig.server.asked[-1] == []
        rig.holder.lose(lease)
        assert rig.lost == []
    rig.holder.lose(lease, "late")
    assert rig.lost == [(lease, "late")]


async def test_a_renewal_without_an_answer_loses_nothing_and_is_repeated_soon(rig: Rig) -> None:
    lease = Held("a")
    rig.holder.add([lease], rig.clock.monotonic())
    rig.server.failures = 1
    await rig.beats(1)
    rig.clock.advance(TTL / 12)
    await eventually(lambda: len(rig.server.asked) == 2, "it is repeated")
    assert rig.holder.has(lease)


async def test_who_could_not_renew_for_long_does_it_before_the_next_claim(rig: Rig) -> None:
    rig.holder.add([Held("a")], rig.clock.monotonic())
    await rig.holder.catch_up()
    assert rig.server.asked == []
    rig.holder._answered_at = rig.clock.monotonic() - TTL * 0.7
    await rig.holder.catch_up()
    assert len(rig.server.asked) == 1
    await rig.holder.catch_up()
    assert len(rig.server.asked) == 1
    await rig.holder.catch_up(rig.clock.monotonic() - TTL * 0.7)
    assert len(rig.server.asked) == 2


def test_a_holder_whose_loop_was_closed_renews_nothing_more() -> None:
    rig = Rig()

    async def hold() -> None:
        await rig.holder.open()
        rig.holder.add([Held("a")], 0.0)

    async def wait() -> None:
        rig.clock.advance(TTL / 3)
        await eventually(lambda: rig.server.closed == 1, "it parts with its connections")
        rig.clock.advance(TTL)
        assert (len(rig.holder), rig.server.asked) == (0, [])

    asyncio.run(hold())
    asyncio.run(wait())
