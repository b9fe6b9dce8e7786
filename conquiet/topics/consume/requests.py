"""What a partition asks of the server, and what waits to be asked: settlements. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from conquiet.kit import chunks
from conquiet.topics.consume.delivery import Delivery
from conquiet.topics.consume.outcomes import DONE, Bury, Outcome, Park, Requeue
from conquiet.topics.server import partition as server

__all__ = ["Failed", "Request", "Settlements", "Step"]

Failed: TypeAlias = tuple[Delivery, Outcome]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One call of a script, and what it carries, so that a lost answer loses nothing.

    ``take`` acknowledges and takes new and due entries, ``page`` takes over a part of the pending list, ``park``,
    ``requeue`` and ``bury`` write failures, ``mark`` notes a suspect.
    """

    kind: Literal["take", "page", "park", "requeue", "bury", "mark"]
    acks: Sequence[Delivery] = ()
    failed: Sequence[Failed] = ()
    fresh: int = 0
    due: int = 0
    size: int = 0
    id: str = ""
    """Where the page begins, behind which ID new entries are taken, or the suspect."""
    known: server.Row | None = None
    """A new entry that need not be sent again."""

    @property
    def asked(self) -> int:
        """How many entries it may bring."""
        return self.fresh + self.due + self.size

    @property
    def carried(self) -> int:
        """How many settlements it carries."""
        return len(self.acks) + len(self.failed)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What a partition wants now: ``steps`` to be sent in this order.

    With none, it wants something at local time ``until``, or when news come behind the ID ``listens`` if that is set.
    """

    steps: Sequence[Step] = ()
    until: float | None = None
    listens: str | None = None


class Settlements:
    """Acknowledgments and failures that wait to be written, or are on their way."""

    def __init__(self) -> None:
        self.leaving: set[str] = set()
        """The IDs of all of them."""
        self.sending = 0
        """How many are on their way."""
        self.acks: list[Delivery] = []
        self.failed: list[Failed] = []

    def __bool__(self) -> bool:
        return bool(self.acks or self.failed)

    def add(self, delivery: Delivery, outcome: Outcome) -> None:
        """This becomes of a delivery."""
        self.leaving.add(delivery.id)
        if outcome is DONE:
            self.acks.append(delivery)
        else:
            self.failed.append((delivery, outcome))

    def add_all(self, deliveries: Sequence[Delivery]) -> None:
        """All of these were handled."""
        self.leaving.update([delivery.id for delivery in deliveries])
        self.acks += deliveries

    def acknowledging(
        self, last_id: str, fresh: int = 0, due: int = 0, known: server.Row | None = None
    ) -> Iterator[Step]:
        """The step that acknowledges, and takes more along with that; none if there is nothing to do."""
        acks = self.acks
        if acks or fresh or due:
            self.acks = acks[server.MOST_ACKED :]
            some = acks[: server.MOST_ACKED] if self.acks else acks
            yield Step("take", some, (), fresh, due, id=last_id, known=known)

    def writing(self) -> Iterator[Step]:
        """The steps that write all failures, none so large that it holds the server up."""
        if not self.failed:
            return
        failed, self.failed = self.failed, []
        for some in chunks.by_number([pair for pair in failed if isinstance(pair[1], Park)], server.MOST_PARKED):
            yield Step("park", failed=some)
        for some in _copied([pair for pair in failed if isinstance(pair[1], Requeue)]):
            yield Step("requeue", failed=some)
        for some in _copied([pair for pair in failed if isinstance(pair[1], Bury)]):
            yield Step("bury", failed=some)

    def torn(self, step: Step) -> None:
        """No answer: they wait again, before all others."""
        self.acks[:0] = step.acks
        self.failed[:0] = step.failed

    def confirmed(self, step: Step) -> Sequence[Delivery]:
        """The server has them. Those."""
        settled = step.acks or [delivery for delivery, _ in step.failed]
        self.leaving.difference_update([delivery.id for delivery in settled])
        return settled

    def find(self, id: str) -> Delivery | None:
        """One that waits to be written."""
        waiting = (*self.acks, *(delivery for delivery, _ in self.failed)) if id in self.leaving else ()
        return next((delivery for delivery in waiting if delivery.id == id), None)

    def clear(self) -> tuple[list[Delivery], list[Failed]]:
        """Forget all of them. What was to be acknowledged, and what has failed."""
        acks, failed, self.acks, self.failed = self.acks, self.failed, [], []
        self.leaving.clear()
        return acks, failed


def _copied(failed: Sequence[Failed]) -> Iterator[Sequence[Failed]]:
    return chunks.chunks(failed, server.MOST_COPIED, server.MOST_BYTES, lambda pair: sum(map(len, pair[0]._entry)))
