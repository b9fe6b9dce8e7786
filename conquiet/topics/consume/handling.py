"""The user's handler, called for each message or for batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
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
        function = cast("Callable[..., Any]", handler)
        self._batches = _Batches(options.batch_size) if options.batch_handler else None
        self._runners: runners.Runners[Any]
        if self._batches is None:
            self._runners = self._of(
                runners.Handler[Delivery](function, "message"), options, self._may_begin, engine.finished
            )
        else:
            called = runners.Handler[_Batch](function, "messages", spread=lambda batch: (batch.deliveries,))
            self._runners = self._of(called, options, self._begins, self._finished)

    def _of(self, handler: Any, options: SubscribeOptions, is_held: Any, finished: Any) -> runners.Runners[Any]:
        return runners.Runners(
            handler,
            limit=options.max_inflight,
            finished=finished,
            withdrawn=lambda item: self._runners.begin([item]),
            is_held=is_held,
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
        return {item.owner for item in self._runners.in_threads}

    def begin(self, owner: Owned, deliveries: Iterable[Delivery]) -> None:
        """Handle these of one partition as soon as possible."""
        self._runners.begin(deliveries if self._batches is None else self._batches.add(owner, deliveries))

    def wake(self) -> None:
        """Look again: it may have been opened."""
        self._runners.begin(())

    async def aclose(self) -> None:
        """Cancel what still runs; a thread cannot be cancelled, and is left behind."""
        await self._runners.aclose()

    def _may_begin(self, delivery: Delivery) -> bool:
        return delivery.owner.hand.begin(delivery, self._now())

    # --- batches ------------------------------------------------------------------------------------------------

    def _begins(self, batch: _Batch) -> bool:
        """Whether anything of a batch may begin; what came meanwhile goes along."""
        assert self._batches is not None
        now, owner = self._now(), batch.owner
        batch.deliveries = owner.hand.begin_all(self._batches.fill(owner), now)
        if not batch.deliveries:
            self._runners.begin(self._batches.free(owner))
        return bool(batch.deliveries)

    def _finished(self, batch: _Batch, result: Any, error: BaseException | None, seconds: float) -> None:
        assert self._batches is not None
        deliveries, each = batch.deliveries, seconds / len(batch.deliveries)
        if error is None and result is None:
            self._engine.finished_all(deliveries, each)
        else:
            errors = [error] * len(deliveries) if error is not None else _outcomes(result, len(deliveries))
            for delivery, one in zip(deliveries, errors, strict=True):
                self._engine.finished(delivery, None, one, each)
        if following := self._batches.free(batch.owner):
            self._runners.begin(following)


@dataclass(slots=True, eq=False)
class _Batch:
    """Deliveries of one partition, for one call."""

    owner: Owned
    deliveries: list[Delivery]


class _Batches:
    """What waits for a batch handler: at most one batch a partition is out."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ready: dict[Owned, list[Delivery]] = {}
        self._busy: set[Owned] = set()

    def add(self, owner: Owned, deliveries: Iterable[Delivery]) -> list[_Batch]:
        """The batches that may begin now."""
        self._ready.setdefault(owner, []).extend(deliveries)
        return self._next(owner)

    def free(self, owner: Owned) -> list[_Batch]:
        """A batch of a partition is over: the next, if there is one."""
        self._busy.discard(owner)
        return self._next(owner)

    def fill(self, owner: Owned) -> list[Delivery]:
        """What is ready of a partition, as much as a batch may have."""
        ready = self._ready.pop(owner, [])
        if len(ready) > self._size:
            self._ready[owner] = ready[self._size :]
        return ready[: self._size]

    def _next(self, owner: Owned) -> list[_Batch]:
        if owner in self._busy or owner not in self._ready:
            return []
        self._busy.add(owner)
        return [_Batch(owner, [])]


def _outcomes(result: Any, count: int) -> Sequence[BaseException | None]:
    if not isinstance(result, Sequence) or len(cast("Sequence[Any]", result)) != count:
        wrong = ConfigError(f"a batch handler returns None or one outcome for each message, not {result!r}")
        return [wrong] * count
    return [_outcome(one) for one in cast("Sequence[object]", result)]


def _outcome(outcome: object) -> BaseException | None:
    if outcome is None or isinstance(outcome, BaseException):
        return outcome
    return ConfigError(f"the outcome of a message is None or an exception, not {outcome!r}")
