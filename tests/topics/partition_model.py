"""A server and a loop for the pure partition: what the scripts do, in a few lines, and no Redis."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from conquiet.kit.entry_ids import order as id_order
from conquiet.topics.codec import JSON
from conquiet.topics.consume.delivery import Deliveries, Delivery
from conquiet.topics.consume.outcomes import Park
from conquiet.topics.consume.partition import Partition
from conquiet.topics.consume.partition_leases import Acquired
from conquiet.topics.consume.requests import Request, Step
from conquiet.topics.consume.room import shared_out
from conquiet.topics.options import DeadLetterPolicy, SubscribeOptions
from conquiet.topics.server.partition import SUSPICIOUS, Again, Answer, Page, Taken
from conquiet.topics.server.topics import Topic
from conquiet.wire.lease import Lease

__all__ = ["Consumer", "Log"]

FOR_EVER: Final = 1e18


@dataclass
class Pending:
    owner: str
    due: float | None = None
    failures: int = 0
    crashes: int = 0


@dataclass
class Log:
    """One partition as the server knows it."""

    index: int
    entries: list[tuple[str, str | None]] = field(default_factory=list)
    """IDs and keys."""
    given: int = 0
    """How many were ever given to the group."""
    pending: dict[str, Pending] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
    owner: str = ""
    epoch: int = 0
    running: str = ""
    crashed: tuple[str, str] = ("", "")

    def add(self, key: str | None) -> None:
        self.entries.append((f"{len(self.entries) + 1}-0", key))

    @property
    def last_id(self) -> str:
        return self.entries[self.given - 1][0] if self.given else "0-0"

    def fields(self, id: str) -> list[bytes]:
        key = dict(self.entries)[id]
        return [b"payload", b"1", b"timestamp", b"1", *(() if key is None else (b"key", key.encode()))]

    def acquire(self, owner: str) -> Lease:
        if self.owner:
            self.crashed = (self.owner, self.running)
        self.owner, self.epoch, self.running = owner, self.epoch + 1, ""
        return Lease("lease", owner, self.epoch, 15.0, FOR_EVER)

    def do(self, step: Step, partition: Partition, now: float) -> Answer | None:
        """As the script of a step does it."""
        match step.kind:
            case "take":
                return self._take(step, partition.limit, now)
            case "page":
                return self._page(step, partition.crashed)
            case "park":
                for delivery, outcome in step.failed:
                    assert isinstance(outcome, Park)
                    if delivery.id in self.pending:
                        kept = self.pending[delivery.id]
                        kept.due, kept.failures, kept.crashes = now + outcome.delay, outcome.failures, 0
                return len(step.failed)
            case "bury":
                self._settle([delivery.id for delivery, _ in step.failed])
                return len(step.failed)
            case "mark":
                self.running = step.id
                return 1
            case "requeue":
                raise AssertionError

    def _settle(self, ids: list[str]) -> None:
        for id in ids:
            if self.pending.pop(id, None) is not None:
                self.settled.add(id)

    def _take(self, step: Step, limit: str | None, now: float) -> Taken:
        self._settle([delivery.id for delivery in step.acks])
        ripe = [id for id, one in self.pending.items() if one.due is not None and one.due <= now]
        due = sorted(ripe, key=lambda id: (self.pending[id].due, id))[: step.due]
        for id in due:
            self.pending[id].due = None
        new = [id for id, _ in self.entries[self.given : self.given + step.fresh]]
        new = [id for id in new if limit is None or id_order(id) <= id_order(limit)]
        self.given += len(new)
        for id in new:
            self.pending[id] = Pending(self.owner)
        later = [one.due - now for one in self.pending.values() if one.due is not None]
        rows = [(id.encode(), self.fields(id)) for id in new]
        return Taken(
            len(step.acks), rows, [self._again(id) for id in due], max(min(later), 0.0) if later else None, 0, False
        )

    def _page(self, step: Step, crashed: tuple[str, str]) -> Page:
        first = (0, 0) if step.id == "-" else id_order(step.id.lstrip("("))
        ids = sorted((id for id in self.pending if id_order(id) >= first and f"({id}" != step.id), key=id_order)
        page = ids[: step.size]
        found: list[Again] = []
        for id in page:
            one = self.pending[id]
            is_late = one.due is None and crashed[0] and one.owner == crashed[0] and crashed[1] in ("", id)
            if is_late and (crashed[1] or one.crashes < SUSPICIOUS):
                one.crashes += 1
            one.owner = self.owner
            found.append(self._again(id))
        if len(page) == step.size:
            return Page(f"({page[-1]}", found, 0, "")
        self.crashed = ("", "")
        return Page(None, found, 0, self.last_id)

    def _again(self, id: str) -> Again:
        one = self.pending[id]
        return Again(id, self.fields(id), one.failures or None, "", one.crashes, one.due is not None, False)


class Consumer:
    """Partitions with common room, asked in turn as the engine does it."""

    def __init__(self, options: SubscribeOptions, logs: list[Log]) -> None:
        self.options = options
        self.logs = logs
        self.now = 0.0
        self.turns = 0
        self.names = 0
        self.parts: list[Partition] = []
        self.running: list[tuple[Partition, Delivery]] = []
        self.ready: list[tuple[Partition, Delivery]] = []
        for log in logs:
            self.parts.append(self._acquired(log))

    def _acquired(self, log: Log) -> Partition:
        self.names += 1
        lease = log.acquire(f"me#{self.names}")
        made = Deliveries(Delivery, JSON, DeadLetterPolicy(), ("t", log.index, "g"), lease.epoch)
        topic = Topic("t", len(self.logs))
        acquired = Acquired(topic, log.index, f"s{log.index}", lease, *log.crashed, log.last_id)
        return Partition(acquired, self.options, made)

    def replace(self, at: int) -> None:
        """The owner of a partition died, or lost it; the next one begins."""
        gone = self.parts[at]
        gone.abandon()
        self.running = [one for one in self.running if one[0] is not gone]
        self.ready = [one for one in self.ready if one[0] is not gone]
        self.parts[at] = self._acquired(self.logs[at])

    @property
    def free(self) -> int:
        return self.options.max_inflight - sum(part.load for part in self.parts)

    def wanted(self) -> list[tuple[Partition, Request]]:
        """What each partition wants now."""
        options, free, now = self.options, self.free, self.now
        hungry = [part for part in self.parts if part.is_hungry(now)]
        self.turns += 1
        start = self.turns % len(hungry) if hungry else 0
        hungry = hungry[start:] + hungry[:start]
        room, spare = shared_out(free, self.parts, hungry, options)
        found: list[tuple[Partition, Request]] = []
        for part in self.parts:
            is_alone = all(other.hand.isolation.current is None for other in self.parts)
            found.append((part, part.wants(now, room.get(part, 0), spare, may_isolate=is_alone)))
        return found

    def exchange(self, wanted: list[tuple[Partition, Request]], is_done: bool = True, is_heard: bool = True) -> int:
        """Do what was asked for, unless it does not arrive; and hear the answers, unless they are lost."""
        steps = [(part, step) for part, request in wanted for step in request.steps]
        for part, step in sorted(steps, key=lambda one: one[1].kind != "page"):
            answer = self.logs[part.index].do(step, part, self.now) if is_done else None
            if answer is None or not is_heard:
                part.torn(step)
            else:
                part.received(step, answer, self.now)
        for part in self.parts:
            self.ready += [(part, delivery) for delivery in part.hand.ready()]
        return len(steps)

    def listen(self, wanted: list[tuple[Partition, Request]]) -> None:
        """Those that listen hear of what is new."""
        for part, request in wanted:
            if request.listens is not None and self.logs[part.index].given < len(self.logs[part.index].entries):
                part.news()

    def begin(self) -> list[tuple[Partition, Delivery]]:
        """Begin all that may be."""
        begun = [one for one in self.ready if one[0].hand.begin(one[1], self.now)]
        self.ready.clear()
        self.running += begun
        return begun
