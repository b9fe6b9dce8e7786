"""The user's handler, called for each message or for batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from conquiet.errors import ConfigError
from conquiet.kit import runners
from conquiet.kit.clock import Clock
from conquiet.message import Message
from conquiet.topics.consume.delivery import Delivery
from conquiet.topics.options import SubscribeOptions

if TYPE_CHECKING:
    from conquiet.topics.consume.engine import Engine
    from conquiet.topics.consume.owned import Owned

__all__ = ["BatchHandler", "Handler", "Handling"]

Handler: TypeAlias = Callable[[Message], Awaitable[None]] | Callable[[Message], None]
BatchHandler: TypeAlias = (
    Callable[[list[Message]], Awaitable[Sequence[BaseException | None] | None]]
    | Callable[[list[Message]], Sequence[BaseException | None] | None]
)


class Handling:
    """Calls the user's handler on deliveries that are ready, each in a context of its own.

    At most ``max_inflight`` at a time; of a batch handler, at most one call a partition. A call that takes longer than
    ``handler_timeout`` is cancelled and has failed, but not before it has ended: a second attempt beside it would be
    two of one message at once.
    """

    finishes = True
    """Whether it is worth waiting, at the end, for what is being handled."""

    def __init__(
        self, handler: Handler | BatchHandler, options: SubscribeOptions, engine: Engine, clock: Clock
    ) -> None:
        # The clock's own, if that is the time as it is: this is asked for each message.
        self._now = time.monotonic if type(clock).monotonic is Clock.monotonic else clock.monotonic
        self._engine = engine
        self._size = options.batch_size if options.batch_handler else 0
        self._waiting: dict[Owned, list[Delivery]] = {}
        """What waits for a batch handler."""
        self._batches: dict[Owned, list[Delivery]] = {}
        """What it has, or is about to get: at most one batch a partition."""
        function = cast("Callable[..., Any]", handler)
        if self._size:  # a list of its own: the handler may do with it as it likes
            called = runners.Handler[Any](function, "messages", spread=lambda owner: ([*self._batches[owner]],))
        else:
            called = runners.Handler[Any](function, "message")
        self._runners: runners.Runners[Any] = runners.Runners(
            called,
            limit=options.max_inflight,
            finished=self._batch_finished if self._size else engine.finished,
            withdrawn=lambda item: self._runners.begin([item]),
            is_held=self._may_begin_batch if self._size else self._may_begin,
            stopped=asyncio.CancelledError,
            timeout=options.handler_timeout,
            to_its_end=True,
        )

    @property
    def is_open(self) -> bool:
        """Whether handlers may begin; what is ready waits otherwise."""
        return self._runners.is_open

    @is_open.setter
    def is_open(self, is_open: bool) -> None:
        self._runners.is_open = is_open

    @property
    def has_ready(self) -> bool:
        """Whether something waits to be begun."""
        return self._runners.has_ready

    @property
    def in_threads(self) -> set[Owned]:
        """The partitions of which a handler runs in a thread, which nothing can end."""
        return {item if self._size else item.owner for item in self._runners.in_threads}

    def begin(self, owner: Owned, deliveries: Iterable[Delivery]) -> None:
        """Handle these of one partition as soon as possible."""
        if not self._size:
            self._runners.begin(deliveries)
            return
        self._waiting.setdefault(owner, []).extend(deliveries)
        if owner not in self._batches:
            self._next_batch(owner)

    def wake(self) -> None:
        """Look again: it may have been opened."""
        self._runners.begin(())

    async def aclose(self) -> None:
        """Cancel what still runs; a thread cannot be cancelled, and is left behind."""
        await self._runners.aclose()

    def _may_begin(self, delivery: Delivery) -> bool:
        return delivery.owner.hand.begin(delivery, self._now())

    # --- batches ------------------------------------------------------------------------------------------------

    def _next_batch(self, owner: Owned) -> None:
        self._batches.pop(owner, None)
        if owner in self._waiting:
            self._batches[owner] = []
            self._runners.begin([owner])

    def _may_begin_batch(self, owner: Owned) -> bool:
        """Whether anything of a partition may begin; what came meanwhile goes along."""
        ready = self._batches[owner] + self._waiting.pop(owner, [])  # it has some if its thread did not begin
        if len(ready) > self._size:
            self._waiting[owner] = ready[self._size :]
        batch = self._batches[owner] = owner.hand.begin_all(ready[: self._size], self._now())
        if not batch:
            self._next_batch(owner)
        return bool(batch)

    def _batch_finished(self, owner: Owned, result: Any, error: BaseException | None, seconds: float) -> None:
        batch = self._batches[owner]
        each = seconds / len(batch)
        if error is None and result is None:
            self._engine.finished_all(batch, each)
        else:
            errors = [error] * len(batch) if error is not None else _outcomes(result, len(batch))
            for delivery, one in zip(batch, errors, strict=True):
                self._engine.finished(delivery, None, one, each)
        self._next_batch(owner)


def _outcomes(result: Any, count: int) -> Sequence[BaseException | None]:
    if not isinstance(result, Sequence) or len(cast("Sequence[Any]", result)) != count:
        wrong = ConfigError(f"a batch handler returns None or one outcome for each message, not {result!r}")
        return [wrong] * count
    return [_outcome(one) for one in cast("Sequence[object]", result)]


def _outcome(outcome: object) -> BaseException | None:
    if outcome is None or isinstance(outcome, BaseException):
        return outcome
    return ConfigError(f"the outcome of a message is None or an exception, not {outcome!r}")
