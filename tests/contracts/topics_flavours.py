"""Topics in both their forms, seen through one awaitable shape, so that a suite is written once.

The core has that shape by itself. The sync facade gets it here: what the core awaits runs on a thread, the rest as it
is. Handlers are plain functions, which both take.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Final, cast

import conquiet
from conquiet import Backoff, Broker, DeadLetter, Message, RetryPolicy, SubscribeOptions, Subscription, sync
from tests.rigs.waiting import eventually

__all__ = ["FLAVOURS", "Recorder", "buried", "finished", "impatient", "opened", "serving"]

_AT_ONCE: Final = Backoff(base=0.0, cap=0.0, kind="fixed")
_TWINS: Final[Mapping[type, type]] = {
    sync.Admin: conquiet.Admin,
    sync.Broker: conquiet.Broker,
    sync.Delivery: conquiet.Delivery,
    sync.Messages: conquiet.Messages,
    sync.Subscription: conquiet.Subscription,
}


@asynccontextmanager
async def _core(url: str, **options: Any) -> AsyncIterator[Broker]:
    async with conquiet.Broker(url, **options) as broker:
        yield broker


@asynccontextmanager
async def _sync(url: str, **options: Any) -> AsyncIterator[Broker]:
    with ThreadPoolExecutor(16) as threads:
        async with cast("Broker", _Awaited(sync.Broker(url, **options), threads)) as broker:
            yield broker


FLAVOURS: Final = {"core": _core, "sync": _sync}


def opened(flavour: str, url: str, **options: Any) -> Any:
    """A broker of that flavour, with a namespace that no other test has, for ``async with``."""
    return FLAVOURS[flavour](url, **{"namespace": f"t{secrets.token_hex(6)}", **options})


class _Awaited:
    """A facade that is awaited where its core is."""

    def __init__(self, facade: Any, threads: ThreadPoolExecutor) -> None:
        self._facade = facade
        self._threads = threads

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._facade, {"aclose": "close"}.get(name, name))
        in_core = inspect.getattr_static(_TWINS[type(self._facade)], name, None)
        if inspect.iscoroutinefunction(in_core):
            return lambda *args, **kwargs: self._hop(member, *args, **kwargs)
        if inspect.isfunction(in_core):
            return lambda *args, **kwargs: self._wrapped(member(*args, **kwargs))
        return self._wrapped(member)

    def _wrapped(self, value: Any) -> Any:
        return _Awaited(value, self._threads) if type(value) in _TWINS else value

    async def _hop(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        work = asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))
        return self._wrapped(await work)

    async def __aenter__(self) -> _Awaited:
        await self._hop(self._facade.__enter__)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._hop(self._facade.__exit__, *error)

    def __aiter__(self) -> _Awaited:
        return self

    async def __anext__(self) -> Any:
        # StopIteration cannot come out of a thread's future.
        found = await self._hop(next, self._facade, None)
        if found is None:
            raise StopAsyncIteration
        return found


# --- what the suites share ------------------------------------------------------------------------------------------


def impatient(**changes: Any) -> SubscribeOptions:
    """Options with short waits and retries at once, unless ``changes`` says otherwise."""
    retry = {name: changes.pop(name) for name in ("max_retries", "mode", "backoff", "retry_on") if name in changes}
    given = {"poll_timeout": 0.1, "handle_signals": False, "retry": RetryPolicy(**{"backoff": _AT_ONCE, **retry})}
    return SubscribeOptions(**{**given, **changes})


class Recorder:
    """A plain handler that remembers what it got, and then does as ``act`` says."""

    def __init__(self, act: Callable[[Message], None] | None = None) -> None:
        self.messages: list[Message] = []
        self._act = act

    def __call__(self, message: Message) -> None:
        self.messages.append(message)
        if self._act is not None:
            self._act(message)

    @property
    def payloads(self) -> list[Any]:
        return [message.payload for message in self.messages]

    async def saw(self, count: int) -> None:
        """Return once it was called so many times, and no more often."""
        await eventually(lambda: len(self.messages) >= count, f"{count} calls of the handler")
        assert len(self.messages) == count, self.messages


@asynccontextmanager
async def serving(subscription: Subscription) -> AsyncIterator[Subscription]:
    """A subscription that is entered and waited for, until the block has ended."""
    async with subscription:
        waiting = asyncio.ensure_future(cast("Awaitable[None]", subscription.wait()))
        try:
            yield subscription
        finally:
            subscription.stop()
            await waiting


async def finished(broker: Broker, topic: Any, *groups: str) -> None:
    """Return once the groups have everything, and have settled it."""

    async def is_done() -> bool:
        found = [await broker.admin.describe_group(topic, group) for group in groups]
        return all(info.lag == 0 and info.pending == 0 for info in found)

    await eventually(is_done, f"{groups} to finish {topic!r}")


async def buried(broker: Broker, topic: Any, count: int = 1) -> list[DeadLetter]:
    """The dead letters, once there are so many."""
    found: list[DeadLetter] = []

    async def are_there() -> bool:
        found[:] = await broker.admin.dead_letters(topic)
        return len(found) >= count

    await eventually(are_there, f"{count} dead letters")
    assert len(found) == count, found
    return found
