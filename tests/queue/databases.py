"""Running a consumer for as long as a test of a database needs it."""

from __future__ import annotations

import asyncio
from typing import Any

from conquiet import QueueConsumer, QueueMessage

__all__ = ["run"]


async def run(consumer: QueueConsumer, handler: Any, factory: Any, messages: int) -> None:
    """Run until so many messages have been handled."""
    left = iter(range(messages - 1, -1, -1))

    def counted(message: QueueMessage, tx: Any) -> Any:
        result = handler(message, tx)
        if next(left) == 0:
            consumer.stop()
        return result

    await asyncio.wait_for(consumer.run(handler=counted, db_factory=factory), 30)
