"""Ends of leases that were asked for and not answered: the server may have seen to them, or not."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from conquiet.balance.lease import StreamLease
from conquiet.errors import StreamNotOwnedError
from conquiet.kit.recent import Recent
from conquiet.metrics import LeaseEnd

__all__ = ["Ends"]

_MOST: Final = 1000


class Ends:
    """Remembers them, so that they can be asked for again: that the stream is gone by then is no failure."""

    def __init__(self) -> None:
        self._asked: Recent[str, tuple[StreamLease, LeaseEnd]] = Recent(_MOST)

    def get(self, stream: str) -> StreamLease | None:
        """The lease of this stream whose end was not answered, if there is one."""
        found = self._asked.get(stream)
        return None if found is None else found[0]

    def of(self, lease: StreamLease) -> LeaseEnd | None:
        """The end that this one may have come to."""
        found, how = self._asked.get(lease.stream, (None, None))
        return how if found is lease else None

    def forget(self, lease: StreamLease) -> None:
        """It is known what became of it."""
        if self.get(lease.stream) is lease:
            del self._asked[lease.stream]

    @contextmanager
    def asking(self, lease: StreamLease, how: LeaseEnd) -> Generator[None]:
        """Ask for the end of a lease within the block."""
        try:
            yield
        except StreamNotOwnedError:
            self.forget(lease)
            raise
        except BaseException:
            self._asked.keep(lease.stream, (lease, how))
            raise
        self.forget(lease)
