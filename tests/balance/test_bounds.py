"""What one call makes the server do is bounded, however many streams there are and however long their entries."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Any, Final

import pytest

from conquiet.balance.ledger import Ledger
from conquiet.kit.clock import ManualClock
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.keys import BalanceKeys
from tests.balance.crew import entry
from tests.balance.work import MOST, Work, filled
from tests.conftest import Rung
from tests.rigs.asking import ask
from tests.rigs.servers import on_a_port

pytestmark = pytest.mark.any_server

TTL: Final = 100.0
MANY: Final = 3000
LONG_TEXT: Final = "x" * 100_000


@pytest.fixture
async def url(rung: Rung) -> AsyncIterator[str]:
    """Of a server whose commands are the test's alone."""
    if not rung.binary:
        pytest.skip("needs a server's binary")
    async with on_a_port(rung.binary) as server:
        yield server.url


@pytest.fixture
async def ledger(url: str, clock: ManualClock) -> AsyncIterator[Ledger]:
    ledger = Ledger(Connections(Address.of(url)), BalanceKeys("many"), "ann#1", TTL, clock)
    await ledger.open()
    await ledger.renew([])
    yield ledger
    await ledger.link.aclose()


async def test_each_call_does_little_however_many_streams_there_are(
    ledger: Ledger, url: str, clock: ManualClock
) -> None:
    await filled(ledger, MANY)
    work = Work(url)

    async def done_by(call: Awaitable[Any]) -> Any:
        done, result = await work.of(call)
        assert 0 < done.commands <= MOST
        return result

    first = await done_by(ledger.take(MANY, 0, hungry=True))
    given = [*first.given]
    while more := (await ledger.take(MANY, 0, hungry=True)).given:
        given += more
    assert len({one.stream for one in given}) == MANY
    assert len(first.given) < MANY
    page, _ = await done_by(ledger.pending("-"))
    assert len(page) < MANY
    assert len(await done_by(ledger.regrant(page[:200]))) == 200
    assert len(await ledger.regrant(page)) == len(page)
    following, _ = await done_by(ledger.recover("-"))
    assert following
    held = [(one.stream, one.epoch) for one in given[-500:]]
    assert not (await done_by(ledger.renew(held))).lost
    assert all(await done_by(ledger.release(held[:200])))
    assert all(await ledger.release(held[200:]))
    await done_by(ledger.claim(given[-1].stream))
    clock.advance(TTL + 20)
    ledger.owner = "bob#1"
    swept = await done_by(ledger.sweep(0, 0, hungry=True, skip=MANY // 2))
    assert swept.late
    assert not swept.is_last
    swept = await done_by(ledger.sweep(MANY, 0, hungry=True))
    assert 0 < len(swept.given) < MANY
    one = swept.given[0]
    await done_by(ledger.move(one.stream, one.epoch, "5-5"))
    await done_by(ledger.finish(one.stream, one.epoch, one.entry_id))
    await done_by(ledger.add("one more", {}))


async def test_a_sweep_comes_to_all_in_pages(ledger: Ledger, clock: ManualClock) -> None:
    await filled(ledger, 1000)
    while (await ledger.take(1000, 0, hungry=True)).given:
        pass
    clock.advance(TTL + 20)
    ledger.owner = "bob#1"
    late: list[str] = []
    is_last, skip = False, 0
    while not is_last:
        swept = await ledger.sweep(3, 0, hungry=True, skip=skip)
        late += [one.stream for one in swept.late] + [one.stream for one in swept.given]
        skip, is_last = skip + swept.staying, swept.is_last
    assert len(late) == len(set(late)) == 1000


async def test_long_entries_are_looked_at_a_few_at_a_time(ledger: Ledger, url: str, clock: ManualClock) -> None:
    for number in range(12):
        await ledger.add(f"s{number}", {"text": LONG_TEXT})
    given = [*(await ledger.take(100, 0, hungry=True)).given]
    assert 0 < len(given) < 6
    while more := (await ledger.take(100, 0, hungry=True)).given:
        given += more
    assert len(given) == 12
    again = await ledger.regrant([one.entry_id for one in given])
    assert sorted(one.stream for one in again) == sorted(one.stream for one in given), "of several calls"
    clock.advance(TTL + 20)
    ledger.owner = "bob#1"
    pages: list[int] = []
    is_last, skip = False, 0
    while not is_last:
        swept = await ledger.sweep(0, 0, hungry=True, skip=skip)
        pages.append(len(swept.late))
        skip, is_last = skip + swept.staying, swept.is_last
    assert (sum(pages), max(pages) < 6) == (12, True)


async def test_long_entries_that_another_client_left_are_looked_at_a_few_at_a_time(
    ledger: Ledger, url: str, clock: ManualClock
) -> None:
    keys = ledger.keys
    for number in range(12):
        await ask(url, "XADD", keys.input, "*", "lbs-input", entry(f"s{number}", {"text": LONG_TEXT}))
    await ask(url, "XREADGROUP", "GROUP", keys.group, "foreign", "STREAMS", keys.input, ">")
    eager = Ledger(ledger.link, keys, "ann#1", 0.001, clock)
    pages, after = 0, "-"
    while after:
        after, _ = await eager.recover(after)
        pages += 1
    assert pages > 2
    assert await ask(url, "ZCARD", keys.leases) == 12


async def test_those_who_ended_without_a_word_are_forgotten_a_few_at_a_time(ledger: Ledger, url: str) -> None:
    gone = [word for number in range(1, 1001) for word in (number, f"gone#{number}")]
    await ask(url, "ZADD", ledger.keys.members, *gone)
    done, _ = await Work(url).of(ledger.renew([]))
    assert done.commands < 300
    assert await ask(url, "ZCARD", ledger.keys.members) > 1
    for _ in range(10):
        await ledger.renew([])
    assert await ask(url, "ZRANGE", ledger.keys.members, 0, -1) == ["ann#1"]
