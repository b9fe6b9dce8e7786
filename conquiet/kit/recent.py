"""A bounded cache: it keeps what was added last."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["Recent"]

_K = TypeVar("_K")
_V = TypeVar("_V")


class Recent(dict[_K, _V]):
    """A dict of at most ``limit`` entries; :meth:`keep` removes the entry that was kept longest ago."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    @property
    def is_full(self) -> bool:
        """Whether something goes when something comes."""
        return len(self) >= self._limit

    def keep(self, key: _K, value: _V) -> _V:
        """Add ``value``, or put it in place of what was there, as the one that was kept last."""
        self.pop(key, None)
        if self.is_full:
            del self[next(iter(self))]
        self[key] = value
        return value
