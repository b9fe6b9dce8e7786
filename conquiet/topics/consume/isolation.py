"""Entries that may have killed their handlers: handled one at a time, so that the culprit shows. Pure."""

from __future__ import annotations

from collections import deque

from conquiet.topics.consume.delivery import Delivery

__all__ = ["Isolation"]


class Isolation:
    """The suspects of one partition. Each is noted in the lease before it begins.

    If the process dies, the crash counts against that one. While there are suspects, nothing else is taken.
    """

    def __init__(self) -> None:
        self._waiting: deque[Delivery] = deque()
        self._names: set[str] = set()
        self.current: Delivery | None = None
        """The suspect that is being handled, or about to be."""
        self._is_noted = False
        """Whether the lease may name a suspect."""
        self._is_asking = False

    @property
    def is_active(self) -> bool:
        """Whether nothing but suspects may be handled."""
        return self.current is not None or bool(self._waiting)

    @property
    def is_wanting(self) -> bool:
        """Whether :meth:`wants` may have something to note."""
        return self._is_noted or bool(self._waiting)

    @property
    def waiting(self) -> int:
        """How many suspects could begin."""
        return len(self._waiting)

    def suspect(self, delivery: Delivery) -> None:
        """A delivery is to be handled alone once its turn has come."""
        self._names.add(delivery.id)

    def admit(self, delivery: Delivery) -> bool:
        """Whether a delivery whose turn has come is a suspect; then it waits behind the others."""
        if delivery.id not in self._names:
            return False
        self._waiting.append(delivery)
        return True

    def wants(self, *, may_begin: bool) -> str | None:
        """What is to be noted in the lease: the next suspect, ``""`` if none is left, ``None`` for nothing."""
        if self._is_asking or self.current is not None:
            return None
        if self._waiting:
            if not may_begin:
                return None
            self.current = self._waiting.popleft()
        elif not self._is_noted:
            return None
        self._is_asking = True
        return "" if self.current is None else self.current.id

    def noted(self) -> Delivery | None:
        """The server has noted it: the suspect that may begin now, if there is one."""
        self._is_asking = False
        self._is_noted = self.current is not None
        return self.current

    def torn(self) -> None:
        """Whether the server has noted it is not known: ask again."""
        self._is_asking = False
        self._is_noted = True
        if self.current is not None:
            self._waiting.appendleft(self.current)
            self.current = None

    def finished(self, delivery: Delivery) -> None:
        """A delivery was handled."""
        if delivery is self.current:
            self.current = None
            self._names.discard(delivery.id)

    def forget_waiting(self) -> None:
        """Forget all but the one that has begun."""
        self._waiting.clear()
        self._names.clear()
        if self.current is not None and self.current.begun is None:
            self.current = None
