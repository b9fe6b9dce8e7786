"""The fenced scripts against a model: any owners, in any order, with time, crashes, retention and replay in between."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

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

from conquiet.topics.operate import replay
from conquiet.topics.options import Retention
from conquiet.topics.server import retention
from conquiet.wire.streams import entries_of
from tests.topics.scripted import (
    GROUP,
    OTHER,
    SUSPICIOUS,
    TTL,
    Forwarder,
    Scripted,
    Seen,
    field_of,
    flat,
    number,
    packed_number,
    place,
)

pytestmark = pytest.mark.guarantee

OWNERS: Final = ("ann#1", "bob#2", "cid#3")
LATER: Final = 150
FENCED: Final = ("take", "takeover", "park", "requeue", "bury", "release", "renew", "suspect")

owners = st.sampled_from(OWNERS)
delays = st.sampled_from([0, LATER])
few = st.integers(1, 3)


class Scripts(Scripted, RuleBasedStateMachine):
    """One partition of a topic, a group with several would-be owners, and another group that just reads."""

    def __init__(self) -> None:
        super().__init__()
        self.forwarders: list[Forwarder] = []
        self.sent = 0
        self.claim = ""

    # --- the lease -------------------------------------------------------------------------------------

    @initialize(owner=owners)
    def begin(self, owner: str) -> None:
        self.send(3)
        self.acquire(owner)

    @rule(seconds=st.sampled_from([60, 200]))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds)

    @precondition(lambda self: not self.model.owner or self.model.until <= self.now)
    @rule(owner=owners, twice=st.booleans())
    def acquire(self, owner: str, twice: bool = False) -> None:
        """Nobody holds it any more; the script is sent twice if the first answer was lost."""
        model = self.model
        for _ in range(1 + twice):
            status, epoch, crashed, *_ = self.try_to_acquire(owner)
            model.previous.append((model.owner, model.epoch))
            model.crashed = model.crashed if model.owner == owner else model.owner
            assert int(epoch) > model.epoch
            model.owner, model.epoch, model.hand = owner, int(epoch), []
            assert (status, crashed.decode()) == (b"OK", model.crashed)
        model.until = self.now + TTL

    def try_to_acquire(self, owner: str) -> Any:
        args = (owner, TTL * 1000, self.clock.offset_ms, GROUP, "0-0", 1, "1", "fail")
        return self.run("partition_acquire", [self.lease, self.stream], *args)

    @precondition(lambda self: self.model.owner)
    @rule(what=st.sampled_from(["renew", "renew", "release"]))
    def renew_or_release(self, what: str) -> None:
        """Nobody has replaced the owner, so it may also be late."""
        model = self.model
        assert self.fenced(what, model.owner, model.epoch) == 1
        if what == "renew":
            model.until = self.now + TTL
            return
        model.previous.append((model.owner, model.epoch))
        model.owner, model.until, model.hand = "", 0, []

    @rule(what=st.sampled_from(FENCED), owner=owners, by=st.integers(-2, 2), data=st.data())
    def a_call_of_somebody_else_changes_nothing(self, what: str, owner: str, by: int, data: st.DataObject) -> None:
        model = self.model
        called = data.draw(st.sampled_from([*model.previous, (owner, model.epoch + by)]))
        if called == (model.owner, model.epoch) or not called[0]:
            return
        before = self.dump()
        assert self.fenced(what, *called, ids=list(model.pending)) in ([0], 0, -1)
        if model.until > self.now and called[0] != model.owner:
            assert self.try_to_acquire(called[0])[:2] == [b"HELD", model.owner.encode()]
        assert self.dump() == before

    # --- messages ----------------------------------------------------------------------------------------

    @rule(count=few)
    def send(self, count: int) -> None:
        for _ in range(count):
            self.sent += 1
            id = self.call("XADD", self.stream, "*", "payload", self.sent, "timestamp", 1)
            self.model.number_of[id.decode()] = self.sent

    @precondition(lambda self: self.model.owner)
    @rule(most=few, acks=st.booleans(), data=st.data())
    def take(self, most: int, acks: bool, data: st.DataObject) -> None:
        """Acknowledge some of what is in hand, and take more."""
        model = self.model
        acked = self.some_in_hand(data) if acks and model.hand else []
        status, count, fresh, due, *_ = self.fenced("take", model.owner, model.epoch, acked, most=most)
        assert (status, count) == (1, len(acked))
        for id in acked:
            model.done.append(model.number_of[id])
            model.settle(id)
        again = [row[0].decode() for row in due]
        ready = sorted((id for id, moment in model.parked.items() if moment <= self.now), key=place)
        assert len(again) == min(most, len(ready))
        assert set(again) <= set(ready)
        for id in again:
            del model.parked[id]
        self.take_in_hand(again)
        new = [id.decode() for id, _ in fresh]
        model.number_of |= {id.decode(): number(words) for id, words in fresh}
        assert len(new) <= most
        self.take_in_hand(new)

    @precondition(lambda self: self.model.owner)
    @rule(data=st.data())
    def take_what_has_become_due(self, data: st.DataObject) -> None:
        """The owner is late, and nobody has replaced it."""
        self.time_passes(200)
        self.take(3, acks=False, data=data)

    @precondition(lambda self: self.model.owner and self.model.pending)
    @rule(size=few)
    def take_over(self, size: int) -> None:
        """All pages of the pending list: everything there is the owner's then, and nothing else has changed."""
        model, page, found = self.model, "-", list[str]()
        while page:
            status, following, rows, *_ = self.fenced("takeover", model.owner, model.epoch, [page], most=size)
            assert status == 1
            for id, fields, parked, _, crashes, _ in rows:
                name = id.decode()
                assert number(fields) == model.number_of[name]
                assert bool(parked) == (name in model.parked)
                is_counted = model.pending[name] == model.crashed != "" and name not in model.parked
                model.crashes[name] += is_counted and model.crashes[name] < SUSPICIOUS
                assert int(crashes) == (0 if parked else model.crashes[name])
                found.append(name)
            page = following.decode()
        assert found == sorted(model.pending, key=place)
        self.take_in_hand([id for id in found if id not in model.parked and id not in model.hand])
        model.pending = dict.fromkeys(found, model.owner)
        model.crashed = ""

    @precondition(lambda self: self.model.hand)
    @rule(delay=delays, twice=st.booleans(), data=st.data())
    def park(self, delay: int, twice: bool, data: st.DataObject) -> None:
        failed = self.fail("park", delay, twice, data)
        self.model.parked |= dict.fromkeys(failed, self.now + delay)
        for id in failed:
            self.model.crashes.pop(id, None)
            self.model.hand.remove(id)

    @precondition(lambda self: self.model.hand)
    @rule(delay=delays, twice=st.booleans(), data=st.data())
    def requeue(self, delay: int, twice: bool, data: st.DataObject) -> None:
        for id in self.fail("requeue", delay, twice, data):
            self.model.settle(id)

    @precondition(lambda self: self.model.hand)
    @rule(twice=st.booleans(), forwards=st.booleans(), data=st.data())
    def bury(self, twice: bool, forwards: bool, data: st.DataObject) -> None:
        for id in self.fail("bury", 0, twice, data):
            self.model.settle(id)
            self.model.outbox += 1
        if forwards:
            self.begin_to_forward(2)

    def fail(self, what: str, delay: int, twice: bool, data: st.DataObject) -> list[str]:
        """Some of what is in hand failed; the script is sent twice if the first answer was lost."""
        model, failed = self.model, self.some_in_hand(data)
        assert self.fenced(what, model.owner, model.epoch, failed, delay) == [1, len(failed)]
        if twice:
            again = len(failed) if what == "park" else 0
            assert self.fenced(what, model.owner, model.epoch, failed, delay) == [1, again]
        return failed

    @rule(count=st.sampled_from([1, 3, 100]), acks=st.sampled_from([True, True, False]))
    def another_group_reads(self, count: int, acks: bool) -> None:
        words = ("XREADGROUP", "GROUP", OTHER, "reader", "COUNT", count, "STREAMS", self.stream, ">")
        reply = self.call(*words)
        if reply and acks:
            self.call("XACK", self.stream, OTHER, *(id for id, _ in reply[0][1]))

    def some_in_hand(self, data: st.DataObject) -> list[str]:
        return data.draw(st.lists(st.sampled_from(self.model.hand), min_size=1, unique=True))

    def take_in_hand(self, ids: Sequence[str]) -> None:
        self.model.hand += ids
        self.model.pending |= dict.fromkeys(ids, self.model.owner)

    # --- dead letters ------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.outbox)
    @rule(steps=st.sampled_from([0, 0, 1, 2]))
    def begin_to_forward(self, steps: int) -> None:
        """Claim and read; go on at once, or let others come in between."""
        claim = secrets.token_hex(4)
        self.forward(claim, "claim", b"0-0")
        self.claim = claim
        forwarder = Forwarder(claim, entries_of(self.call("XRANGE", self.outbox, "-", "+")))
        if steps:
            self.append(forwarder, deletes=steps > 1)
        else:
            self.forwarders.append(forwarder)

    @precondition(lambda self: self.model.outbox)
    @rule()
    def forward_after_a_crash(self) -> None:
        self.begin_to_forward(1)
        self.begin_to_forward(2)

    @precondition(lambda self: self.model.outbox)
    @rule(first=st.booleans())
    def two_forward_at_once(self, first: bool) -> None:
        self.begin_to_forward(0)
        self.begin_to_forward(0)
        late, last = self.forwarders[-2:]
        del self.forwarders[-2:]
        for forwarder in (late, last) if first else (last, late):
            self.append(forwarder, deletes=True)

    @precondition(lambda self: self.forwarders)
    @rule(data=st.data(), deletes=st.booleans())
    def forward_on(self, data: st.DataObject, deletes: bool) -> None:
        forwarder = data.draw(st.sampled_from(self.forwarders))
        self.forwarders.remove(forwarder)
        self.append(forwarder, deletes=deletes)

    def append(self, forwarder: Forwarder, *, deletes: bool) -> None:
        """Append and delete, or stop in between; whoever did not claim last can append nothing."""
        ids = [id for id, _ in forwarder.letters]
        words = flat((id, len(fields), *fields) for id, fields in forwarder.letters)
        before = self.dump()
        appended = self.forward(forwarder.claim, "", ids[0], *words)
        if forwarder.claim != self.claim:
            assert appended == -1
            assert self.dump() == before
            return
        assert appended == len(set(ids) - self.model.forwarded)
        self.model.letters += appended
        self.model.forwarded.update(ids)
        if deletes:
            self.model.outbox -= self.call("XDEL", self.outbox, *ids)

    def forward(self, claim: str, claiming: str, left: bytes, *letters: bytes | str | int) -> int:
        args = (self.clock.offset_ms, f"{GROUP}/0", claim, claiming, -1, -1, left, *letters)
        appended: int = self.run("forward", [self.letters, self.forwarded], *args)
        return appended

    @precondition(lambda self: self.model.letters)
    @rule(gone=st.booleans())
    def replay_all(self, gone: bool) -> None:
        """Each letter once: the entry itself, or a copy of one that is gone."""
        before = self.live_letters()
        if gone:
            originals = {field_of(words, b"originalMessageId").decode() for words in before.values()}
            self.call("XDEL", self.stream, "0-1", *(originals - set(self.model.pending)))
        assert self.wait(replay.replay(self.instance, self.topic)) == len(before)
        assert self.call("XLEN", self.letters) == 0
        self.model.letters = 0
        self.given_back(before)

    @precondition(lambda self: self.model.letters)
    @rule()
    def replay_one_and_crash(self) -> None:
        """The letter is given back and still lies there: it must not be given back again."""
        live, run = self.live_letters(), secrets.token_hex(4)
        if not live:
            return
        replayed = self.instance.keys.replayed(self.stream)
        self.run("replay_begin", [replayed], self.clock.offset_ms, run, 10**9, 100)
        letter, words = next(iter(live.items()))
        original = field_of(words, b"originalMessageId")
        call: list[str | bytes | int] = [self.clock.offset_ms, run, letter, GROUP, original, 0, "copy", *words[28:]]
        gone = self.instance.keys.replayed_gone(self.stream)
        keys = [self.stream, self.retry, self.attempts, replayed, gone, self.lease]
        assert self.run("replay", keys, *call)[0] == b"OK"
        assert self.run("replay", keys, *call)[0] == b"AGAIN"
        self.given_back({letter: words})

    def given_back(self, letters: dict[bytes, list[bytes]]) -> None:
        model, there = self.model, set(self.ids())
        for words in letters.values():
            original = field_of(words, b"originalMessageId").decode()
            if original in there:
                model.pending[original] = "replay#admin"
                model.parked[original] = self.now

    # --- retention -----------------------------------------------------------------------------------------

    @rule(most=st.none() | st.integers(1, 4), acked=st.booleans())
    def trim(self, most: int | None, acked: bool) -> None:
        before = self.ids()
        kept = Retention(max_len=most, delete_acked=acked)
        finished = self.finished_by_all(before)
        trimmed = self.wait(retention.trim(self.instance, self.topic, 0, kept))
        gone = [id for id in before if id not in set(self.ids())]
        over = max(len(before) - most, 0) if most is not None else 0
        assert gone == finished[: len(finished) if acked else over]
        assert (trimmed.removed, trimmed.dropped) == (len(gone), 0)

    def finished_by_all(self, ids: Sequence[str]) -> list[str]:
        """Those before the first that some group has not got or not finished."""
        bounds = []
        for row in self.look().groups:
            waiting = self.call("XPENDING", self.stream, row[1], "-", "+", 1)
            bounds.append(place(waiting[0][0].decode()) if waiting else (*place(row[7].decode()), 1))
        return [id for id in ids if all(place(id) < bound for bound in bounds)]

    # --- what always holds -----------------------------------------------------------------------------------

    @invariant()
    def all_is_as_expected(self) -> None:
        """The lease, the pending list, what is parked; and no message is lost or there twice."""
        model, seen = self.model, self.look()
        assert ((seen.lease[0] or b"").decode(), int(seen.lease[1] or 0)) == (model.owner, model.epoch)
        assert {row[0].decode(): row[1].decode() for row in seen.pending} == model.pending
        assert {id.decode() for id in seen.parked} == set(model.parked)
        assert set(seen.waiting) == set(seen.delayed[::2])
        assert set(model.pending) <= {id.decode() for id, _ in seen.entries}
        assert self.places(seen) == Counter(range(1, self.sent + 1))

    def places(self, seen: Seen) -> Counter[int]:
        """Where messages are: not delivered, pending, held back, on their way to the dead letters, there, or done."""
        places = Counter(self.model.done)
        last = next(row[7] for row in seen.groups if row[1] == GROUP.encode())
        for id, words in seen.entries:
            name = id.decode()
            places[number(words)] += place(name) > place(last.decode()) or name in self.model.pending
        for packed in seen.delayed[1::2]:
            places[packed_number(packed)] += 1
        for id, words in seen.outbox:
            places[number(words)] += id not in self.model.forwarded
        for id, words in seen.letters:
            places[number(words)] += id not in seen.replayed
        return places


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_scripts_keep_every_message_whoever_calls_them_in_whatever_order(url: str, scale: float) -> None:
    machine = type("Machine", (Scripts,), {"url": url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max(10, int(400 * scale)),
            stateful_step_count=60,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
