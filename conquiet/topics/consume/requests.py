"""What a partition asks of the server: frozen records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from conquiet.topics.consume.delivery import Delivery
from conquiet.topics.consume.outcomes import Outcome
from conquiet.topics.server.partition import Row

__all__ = ["Failed", "Request", "Step"]

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
    known: Row | None = None
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
