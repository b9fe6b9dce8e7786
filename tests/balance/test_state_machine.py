"""The scripts against a model: any consumers, in any order, with time, crashes and zombies in between."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from conquiet.balance.ledger import Given, Ledger
from conquiet.errors import AlreadyClaimedError, ConfigError, StreamNotOwnedError
from conquiet.kit.clock import ManualClock
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.keys import BalanceKeys
from conquiet.wire.streams import pack
from tests.balance.crew import entry

pytestmark = pytest.mark.guarantee

_T = TypeVar("_T")
FIELD: Final = "lbs-input"
TTL: Final = 100.0
OWNERS: Final = ("ann#1", "bob#2", "cid#3")
NAMES: Final = ("s1", "s2", "ü{3}|")

owners = st.sampled_from(OWNERS)
names = st.sampled_from(NAMES)
few = st.integers(1, 4)


@dataclass(frozen=True)
class Entry:
    """One of the input: ``ours``, ``foreign`` or ``rubbish``."""

    kind: str
    id: str
    name: str = ""


@dataclass
class Stream:
    """What must be known of an unfinished stream."""

    entry_id: str
    info: dict[str, Any]
    epoch: int = 0
    owner: str = ""
    until: float = -math.inf
    """By the test's clock; the server's runs a little, so nothing is done near a deadline."""
    position: str = "0-0"


class Ledgers(RuleBasedStateMachine):
    """One service, several consumers at once, each with all that it was ever given."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = ManualClock()
        self.keys = BalanceKeys(f"t{secrets.token_hex(6)}")
        self.link = Connections(Address.of(self.url))
        self.ledgers = {name: Ledger(self.link, self.keys, name, TTL, self.clock) for name in OWNERS}
        self.now = 0.0
        self.epoch = 0
        self.streams: dict[str, Stream] = {}
        self.unread: list[Entry] = []
        """What no consumer of the group has read, in order."""
        self.bad = 0
        self.given: list[tuple[str, str, int, str]] = []
        """Every owner, stream, epoch and entry ID that there was."""
        self.wait(self.ledgers[OWNERS[0]].open())

    def teardown(self) -> None:
        keys = self.keys
        mutexes = [f"{keys.mutex}{name}" for name in NAMES]
        known = [keys.input, keys.owners, keys.leases, keys.epochs, keys.positions, keys.bad, keys.members, keys.news]
        self.call("DEL", *known, *mutexes)
        self.wait(self.link.aclose())
        self.runner.close()

    def wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self.runner.run(work)

    def call(self, *words: str | bytes | int) -> Any:
        return self.wait(self.link.call(self.keys.input, pack(*words)))

    @initialize(owner=owners, most=few)
    def begin(self, owner: str, most: int) -> None:
        """All streams are there, and some have an owner, so that most steps find something to do."""
        for number, name in enumerate(NAMES):
            self.add(name, number)
        self.take(owner, most)

    # --- time and producers -------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([40, 130]))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds)
        self.now += seconds

    @rule(name=names, number=st.integers(0, 9))
    def add(self, name: str, number: int) -> None:
        id, is_new = self.wait(self.ledgers[OWNERS[0]].add(name, {"n": number}))
        known = self.streams.get(name)
        assert is_new == (known is None)
        if known is None:
            self.streams[name] = Stream(id, {"n": number})
            self.unread.append(Entry("ours", id, name))
        else:
            assert id == known.entry_id

    @precondition(lambda self: len(self.unread) < 9)
    @rule(name=names)
    def a_foreign_writer_adds_one(self, name: str) -> None:
        id = self.call("XADD", self.keys.input, "*", "more", "x", FIELD, entry(name))
        self.unread.append(Entry("foreign", id.decode(), name))

    @precondition(lambda self: len(self.unread) < 9)
    @rule()
    def a_foreign_writer_adds_rubbish(self) -> None:
        id = self.call("XADD", self.keys.input, "*", FIELD, "rubbish")
        self.unread.append(Entry("rubbish", id.decode()))

    # --- coming to own ------------------------------------------------------------------------------------------

    def is_held(self, stream: Stream) -> bool:
        return bool(stream.owner) and stream.until > self.now

    def own(self, owner: str, given: Given) -> None:
        """It was nobody's, or its own already, and is this one's in a new epoch from now on."""
        stream = self.streams[given.stream]
        assert not self.is_held(stream) or stream.owner == owner, f"{given.stream} is {stream.owner}'s"
        assert given.epoch > self.epoch
        assert (given.info, given.entry_id) == (stream.info, stream.entry_id)
        self.epoch = stream.epoch = given.epoch
        stream.owner, stream.until = owner, self.now + TTL
        self.given.append((owner, given.stream, given.epoch, given.entry_id))

    @rule(owner=owners, most=few)
    def take(self, owner: str, most: int) -> None:
        """As many entries as asked for are read, whatever they are."""
        taken = self.wait(self.ledgers[owner].take(most, 0, hungry=True))
        read, self.unread = self.unread[:most], self.unread[most:]
        free, merged = [], 0
        for one in read:
            stream = self.streams.get(one.name)
            if one.kind == "rubbish":
                self.bad += 1
            elif stream is None:
                self.streams[one.name] = Stream(one.id, {})
                free.append(one.name)
            elif stream.entry_id != one.id:
                merged += 1
            elif not self.is_held(stream):
                free.append(one.name)
        assert (taken.set_aside, taken.merged) == ([one.kind for one in read].count("rubbish"), merged)
        assert [given.stream for given in taken.given] == free
        for given in taken.given:
            self.own(owner, given)

    @rule(owner=owners, name=names, is_told=st.booleans())
    def claim(self, owner: str, name: str, is_told: bool) -> None:
        """Its own it gets only if it was never told of it."""
        stream, ledger = self.streams.get(name), self.ledgers[owner]
        known = stream.epoch if stream is not None and is_told else None
        if stream is None:
            with pytest.raises(ConfigError, match="no unfinished stream"):
                self.wait(ledger.claim(name, known))
        elif self.is_held(stream) and (is_told or stream.owner != owner):
            with pytest.raises(AlreadyClaimedError, match=stream.owner):
                self.wait(ledger.claim(name, known))
        else:
            self.own(owner, self.wait(ledger.claim(name, known)))

    @rule(owner=owners)
    def regrant(self, owner: str) -> None:
        """It gets all that is its own, and nothing else, of whatever is pending for it."""
        ids, _ = self.wait(self.ledgers[owner].pending("-"))
        given = self.wait(self.ledgers[owner].regrant(ids))
        mine = {name for name, stream in self.streams.items() if stream.owner == owner and self.is_held(stream)}
        assert {one.stream for one in given} == mine
        for one in given:
            self.own(owner, one)

    @rule(owner=owners, most=st.integers(0, 4))
    def sweep(self, owner: str, most: int) -> None:
        """Of all that were owned once and are not now, it gets as many as it wants, and hears of the rest."""
        swept = self.wait(self.ledgers[owner].sweep(most, 0, hungry=True))
        free = {name for name, stream in self.streams.items() if stream.epoch and not self.is_held(stream)}
        got, late = {given.stream for given in swept.given}, {one.stream for one in swept.late}
        assert not got & late
        assert got | late == free
        assert len(got) == min(most, len(free))
        for one in swept.late:
            stream = self.streams[one.stream]
            assert (one.info, one.epoch, one.owner) == (stream.info, stream.epoch, stream.owner)
        for given in swept.given:
            assert given.before == self.streams[given.stream].owner
            self.own(owner, given)

    # --- what only the owner may do -----------------------------------------------------------------------------

    def is_owner(self, owner: str, name: str, epoch: int) -> bool:
        stream = self.streams.get(name)
        return stream is not None and (stream.owner, stream.epoch) == (owner, epoch)

    @precondition(lambda self: self.given)
    @rule(data=st.data(), owner=owners)
    def renew(self, data: st.DataObject, owner: str) -> None:
        """All that it was ever given: it keeps what it still has, in that epoch, and creates nothing."""
        mine = [(name, epoch) for who, name, epoch, _ in self.given if who == owner]
        some = data.draw(st.lists(st.sampled_from(mine), unique_by=lambda one: one[0], max_size=4)) if mine else []
        renewed = self.wait(self.ledgers[owner].renew(some))
        assert renewed.lost == {name for name, epoch in some if not self.is_owner(owner, name, epoch)}
        assert renewed.total == sum(bool(stream.epoch) for stream in self.streams.values())
        for name, epoch in some:
            if self.is_owner(owner, name, epoch):
                self.streams[name].until = self.now + TTL

    @precondition(lambda self: self.given)
    @rule(data=st.data(), number=st.integers(1, 99))
    def commit(self, data: st.DataObject, number: int) -> None:
        owner, name, epoch, _ = data.draw(st.sampled_from(self.given[-6:]))
        if self.is_owner(owner, name, epoch):
            self.wait(self.ledgers[owner].move(name, epoch, f"{number}-0"))
            self.streams[name].position = f"{number}-0"
        else:
            with pytest.raises(StreamNotOwnedError):
                self.wait(self.ledgers[owner].move(name, epoch, f"{number}-0"))

    @precondition(lambda self: self.given)
    @rule(data=st.data(), again=st.booleans())
    def finish(self, data: st.DataObject, again: bool) -> None:
        """Who asks again is content if the entry is gone."""
        owner, name, epoch, id = data.draw(st.sampled_from(self.given[-6:]))
        is_gone = name not in self.streams or self.streams[name].entry_id != id
        if again and is_gone:
            self.wait(self.ledgers[owner].finish(name, epoch, id, again=True))
        elif self.is_owner(owner, name, epoch):
            self.wait(self.ledgers[owner].finish(name, epoch, id, again=again))
            del self.streams[name]
            self.unread = [one for one in self.unread if (one.kind, one.name) != ("ours", name)]
        else:
            with pytest.raises(StreamNotOwnedError):
                self.wait(self.ledgers[owner].finish(name, epoch, id, again=again))

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner, name, epoch, _ = data.draw(st.sampled_from(self.given[-6:]))
        [released] = self.wait(self.ledgers[owner].release([(name, epoch)]))
        assert released == self.is_owner(owner, name, epoch)
        if released:
            self.streams[name].owner, self.streams[name].until = "", -math.inf

    # --- what must hold -----------------------------------------------------------------------------------------

    @invariant()
    def redis_knows_the_same(self) -> None:
        keys = self.keys
        flat = self.call("HGETALL", keys.owners)
        states = {name.decode(): state.decode() for name, state in zip(flat[::2], flat[1::2], strict=True)}
        assert states == {name: f"{one.entry_id}|{one.epoch}|{one.owner}" for name, one in self.streams.items()}
        leases = {name.decode() for name in self.call("ZRANGE", keys.leases, 0, -1)}
        assert leases == {name for name, stream in self.streams.items() if stream.epoch}
        assert int(self.call("GET", keys.epochs) or 0) == self.epoch
        assert self.call("XLEN", keys.bad) == self.bad
        assert self.call("XLEN", keys.input) == len(self.streams) + sum(one.kind != "ours" for one in self.unread)
        for name, stream in self.streams.items():
            assert self.wait(self.ledgers[OWNERS[0]].position(name)) == stream.position

    @invariant()
    def what_is_owned_is_pending_for_its_owner(self) -> None:
        rows = self.call("XPENDING", self.keys.input, self.keys.group, "-", "+", 1000)
        pending = {row[0].decode(): row[1].decode() for row in rows}
        for name, stream in self.streams.items():
            if stream.owner:
                assert pending[stream.entry_id] == stream.owner, name


@pytest.mark.slow
@pytest.mark.cluster_too
@pytest.mark.timeout(180)
def test_the_scripts_do_what_the_model_does(url: str) -> None:
    class Here(Ledgers):
        pass

    Here.url = url
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    limits = settings(max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=checks)
    run_state_machine_as_test(Here, settings=limits)
