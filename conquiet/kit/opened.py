"""What is opened and closed: ``async with`` does both."""

from __future__ import annotations

from types import TracebackType
from typing import Self

__all__ = ["Opened"]


class Opened:
    """Opened when ``async with`` begins, and closed when it ends."""

    async def open(self) -> None:
        """Make it ready for use."""

    async def aclose(self) -> None:
        """Close what is open; safe to repeat."""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
