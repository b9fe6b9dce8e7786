"""Tells listeners of moments in the life of what runs here: tests wait for them instead of sleeping."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

__all__ = ["listening", "tell"]

_listeners: list[Callable[[str, str], None]] = []


def tell(who: str, moment: str) -> None:
    """``who`` has come to ``moment``; costs next to nothing without a listener."""
    for listener in _listeners:
        listener(who, moment)


@contextmanager
def listening(listener: Callable[[str, str], None]) -> Generator[None]:
    """Within the block, ``listener(who, moment)`` hears of each moment, on the thread and loop where it is."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
