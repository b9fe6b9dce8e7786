"""Each script that has a fence, called directly: only the owner that the server records changes anything."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

import pytest

from conquiet import EmbeddedRedis
from conquiet.balance.ledger import Given, Ledger
from conquiet.errors import AlreadyClaimedError, StreamNotOwnedError
from conquiet.kit.clock import ManualClock
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.keys import BalanceKeys
from tests.conftest import Rung
from tests.rigs.asking import ask
from tests.rigs.servers import on_a_port

pytestmark = [pytest.mark.any_server, pytest.mark.guarantee]

TTL: Final = 100.0
FAR: Final = 10_000_000_000_000
"""An epoch of later than the year 2200."""


class Desk:
    """Ledgers of one service, one a consumer."""

    def __init__(self, url: str, clock: ManualClock) -> None:
        self.url = url
        self.clock = clock
        self.keys = BalanceKeys(f"t{secrets.token_hex(6)}")
        self._link = Connections(Address.of(url))

    def of(self, owner: str) -> Ledger:
        return Ledger(self._link, self.keys, owner, TTL, self.clock)

    async def given(self, owner: str, stream: str = "s") -> Given:
        """A stream that was added, and is this one's."""
        ledger = self.of(owner)
        await ledger.open()
        await ledger.renew([])
        await ledger.add(stream, {"a": 1})
        [given] = (await ledger.take(1, 0, hungry=True)).given
        return given

    async def state(self) -> list[Any]:
        """All that is decided by, deadlines included."""
        keys = self.keys
        return [
            await ask(self.url, "XRANGE", keys.input, "-", "+"),
            await ask(self.url, "XPENDING", keys.input, keys.group),
            await ask(self.url, "HGETALL", keys.owners),
            await ask(self.url, "ZRANGE", keys.leases, 0, -1, "WITHSCORES"),
            await ask(self.url, "GET", keys.epochs),
            await ask(self.url, "HGETALL", keys.positions),
        ]

    async def reconnect(self) -> None:
        await self._link.aclose()
        self._link = Connections(Address.of(self.url))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._link.aclose()


@pytest.fixture
async def desk(url: str, clock: ManualClock) -> AsyncIterator[Desk]:
    async with Desk(url, clock) as desk:
        yield desk


async def renew(ledger: Ledger, given: Given) -> None:
    if given.stream in (await ledger.renew([(given.stream, given.epoch)])).lost:
        raise StreamNotOwnedError(given.stream)


async def commit(ledger: Ledger, given: Given) -> None:
    await ledger.move(given.stream, given.epoch, "5-5")


async def finish(ledger: Ledger, given: Given) -> None:
    await ledger.finish(given.stream, given.epoch, given.entry_id)


async def release(ledger: Ledger, given: Given) -> None:
    [done] = await ledger.release([(given.stream, given.epoch)])
    if not done:
        raise StreamNotOwnedError(given.stream)


Verb = Callable[[Ledger, Given], Awaitable[None]]
VERBS: Final = [renew, commit, finish, release]
verbs = pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)


@verbs
async def test_the_owner_in_its_epoch_is_let_through(desk: Desk, verb: Verb) -> None:
    given = await desk.given("ann#1")
    before = await desk.state()
    await verb(desk.of("ann#1"), given)
    assert await desk.state() != before or verb is renew


@verbs
@pytest.mark.parametrize(
    ("owner", "shift"),
    [("bob#1", 0), ("ann#2", 0), ("ann#1", -1), ("ann#1", 1), ("", 0)],
    ids=["another", "another life of it", "in an epoch before", "in an epoch to come", "nobody"],
)
async def test_whoever_else_asks_changes_nothing(desk: Desk, verb: Verb, owner: str, shift: int) -> None:
    given = await desk.given("ann#1")
    stale = Given(given.stream, given.info, given.epoch + shift, given.entry_id)
    desk.clock.advance(5)
    before = await desk.state()
    with pytest.raises(StreamNotOwnedError):
        await verb(desk.of(owner), stale)
    assert await desk.state() == before


@verbs
async def test_an_owner_before_the_present_one_changes_nothing(desk: Desk, verb: Verb) -> None:
    """Also if it is the same consumer, that lost the stream and has it again."""
    first = await desk.given("ann#1")
    desk.clock.advance(TTL + 20)
    second = (await desk.of("ann#1").sweep(1, 0, hungry=True)).given[0]
    assert second.epoch > first.epoch
    before = await desk.state()
    with pytest.raises(StreamNotOwnedError):
        await verb(desk.of("ann#1"), first)
    assert await desk.state() == before
    await verb(desk.of("ann#1"), second)


@verbs
async def test_a_stream_that_was_released_is_nobodys(desk: Desk, verb: Verb) -> None:
    given = await desk.given("ann#1")
    await release(desk.of("ann#1"), given)
    before = await desk.state()
    with pytest.raises(StreamNotOwnedError):
        await verb(desk.of("ann#1"), given)
    assert await desk.state() == before


@verbs
async def test_a_stream_that_is_not_known_is_nobodys(desk: Desk, verb: Verb) -> None:
    given = await desk.given("ann#1")
    await desk.given("ann#1", "other")
    await finish(desk.of("ann#1"), given)
    before = await desk.state()
    with pytest.raises(StreamNotOwnedError):
        await verb(desk.of("ann#1"), given)
    assert await desk.state() == before


@verbs
async def test_a_late_owner_is_let_through_while_nobody_took_over(desk: Desk, verb: Verb) -> None:
    """The clock decides who may take a stream over, and not who owns it."""
    given = await desk.given("ann#1")
    desk.clock.advance(3 * TTL)
    await verb(desk.of("ann#1"), given)


# --- what is given anew -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", ["ann#2", "bob#1"])
async def test_only_the_recorded_owner_is_given_its_stream_anew(desk: Desk, owner: str) -> None:
    given = await desk.given("ann#1")
    before = await desk.state()
    assert await desk.of(owner).regrant([given.entry_id]) == []
    with pytest.raises(AlreadyClaimedError, match="ann#1"):
        await desk.of(owner).claim("s")
    with pytest.raises(AlreadyClaimedError, match="ann#1"):
        await desk.of(owner).claim("s", given.epoch)
    assert await desk.state() == before


@pytest.mark.parametrize("how", ["regrant", "claim"])
async def test_what_is_given_anew_ends_the_epoch_before(desk: Desk, how: str) -> None:
    first = await desk.given("ann#1")
    ann = desk.of("ann#1")
    [second] = await ann.regrant([first.entry_id]) if how == "regrant" else [await ann.claim("s")]
    assert (second.stream, second.info, second.entry_id) == (first.stream, first.info, first.entry_id)
    assert second.epoch > first.epoch
    for verb in VERBS:
        with pytest.raises(StreamNotOwnedError):
            await verb(ann, first)
    await finish(ann, second)


@pytest.mark.parametrize("ended", ["released", "expired", "finished", "removed"])
async def test_what_is_its_own_no_more_is_not_given_anew(desk: Desk, ended: str) -> None:
    given = await desk.given("ann#1")
    ann = desk.of("ann#1")
    if ended == "released":
        await release(ann, given)
    elif ended == "expired":
        desk.clock.advance(TTL + 1)
    elif ended == "finished":
        await finish(ann, given)
    else:
        await ask(desk.url, "XDEL", desk.keys.input, given.entry_id)
    assert await ann.regrant([given.entry_id]) == []


async def test_who_knows_that_it_owns_a_stream_cannot_claim_it(desk: Desk) -> None:
    given = await desk.given("ann#1")
    with pytest.raises(AlreadyClaimedError, match="ann#1"):
        await desk.of("ann#1").claim("s", given.epoch)


# --- epochs -------------------------------------------------------------------------------------------------------


async def test_an_epoch_is_no_lower_than_the_time_of_the_server(desk: Desk) -> None:
    desk.clock.advance(3600)
    seconds, micros = await ask(desk.url, "TIME")
    before = (int(seconds) * 1000 + int(micros) // 1000) + 3_600_000
    given = await desk.given("ann#1")
    assert before <= given.epoch < before + 60_000


async def test_epochs_grow_when_the_clock_of_the_server_has_gone_back(desk: Desk) -> None:
    await ask(desk.url, "SET", desk.keys.epochs, FAR)
    assert [(await desk.given("ann#1", f"s{number}")).epoch for number in range(3)] == [FAR + 1, FAR + 2, FAR + 3]


async def test_epochs_that_an_earlier_version_counted_go_on(desk: Desk) -> None:
    await ask(desk.url, "SET", desk.keys.epochs, 7)
    assert (await desk.given("ann#1")).epoch > time.time() * 1000 - 3_600_000


# --- a server without its last writes -----------------------------------------------------------------------------


class Forgetful:
    """A server that is killed, and comes back with what it had when it was told to keep it."""

    def __init__(self, rung: Rung, directory: Path) -> None:
        self._binary = rung.binary
        self._directory = directory
        self.server = self._made(None)

    def _made(self, port: int | None) -> EmbeddedRedis:
        return on_a_port(self._binary, directory=self._directory, port=port)

    async def keep(self) -> None:
        await ask(self.server.url, "SAVE")

    async def forget(self) -> None:
        port = urlsplit(self.server.url).port
        os.kill(self.server.pid, signal.SIGKILL)
        await self.server.aclose()
        self.server = self._made(port)
        await self.server.open()


@pytest.fixture
async def forgetful(rung: Rung, tmp_path: Path) -> AsyncIterator[Forgetful]:
    if not rung.binary:
        pytest.skip("needs a server's binary")
    forgetful = Forgetful(rung, tmp_path)
    await forgetful.server.open()
    yield forgetful
    await forgetful.server.aclose()


@pytest.fixture
async def keeper(forgetful: Forgetful, clock: ManualClock) -> AsyncIterator[Desk]:
    """At that server."""
    async with Desk(forgetful.server.url, clock) as desk:
        yield desk


async def test_a_claim_that_the_server_has_forgotten_is_refused_in_favour_of_the_one_it_records(
    forgetful: Forgetful, keeper: Desk
) -> None:
    """The same consumer is given the same stream twice: an epoch that came twice would let both through."""
    ann = keeper.of("ann#1")
    await ann.open()
    await ann.renew([])
    await ann.add("s", {})
    await forgetful.keep()
    [stale] = (await ann.take(1, 0, hungry=True)).given
    await forgetful.forget()
    await keeper.reconnect()
    ann = keeper.of("ann#1")
    [given] = (await ann.take(1, 0, hungry=True)).given
    assert given.epoch > stale.epoch
    before = await keeper.state()
    for verb in VERBS:
        with pytest.raises(StreamNotOwnedError):
            await verb(ann, stale)
        assert await keeper.state() == before
    await finish(ann, given)


async def test_after_the_server_forgot_a_takeover_the_heirs_claim_is_refused_and_later_epochs_are_higher(
    forgetful: Forgetful, keeper: Desk
) -> None:
    first = await keeper.given("ann#1")
    await forgetful.keep()
    keeper.clock.advance(TTL + 20)
    [heirs] = (await keeper.of("bob#1").sweep(1, 0, hungry=True)).given
    await forgetful.forget()
    await keeper.reconnect()
    for verb in VERBS:
        with pytest.raises(StreamNotOwnedError):
            await verb(keeper.of("bob#1"), heirs)
    [third] = (await keeper.of("cid#1").sweep(1, 0, hungry=True)).given
    assert third.epoch > heirs.epoch > first.epoch
