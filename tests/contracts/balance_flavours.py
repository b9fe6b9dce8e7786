"""Balanced streams in both their forms, seen through one awaitable shape, so that a suite is written once.

The core has that shape by itself. The sync facade gets it here: what the core awaits runs on a thread, the rest as it
is. Handlers are plain functions, which both take; the leases that they get are of their own flavour.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, cast

from conquiet import balance as core
from conquiet.balance import StreamBalancer, StreamEvent
from conquiet.kit.clock import ManualClock
from conquiet.sync import _balance as sync
from tests.rigs.waiting import eventually

__all__ = ["FLAVOURS", "Crew", "Member"]

FLAVOURS: Final = ("core", "sync")
_TWINS: Final[Mapping[type, type]] = {
    sync.StreamBalancer: core.StreamBalancer,
    sync.StreamLease: core.StreamLease,
}


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
        if inspect.isasyncgenfunction(in_core):
            return lambda: self._items(member())
        return self._wrapped(member)

    def _wrapped(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._wrapped(one) for key, one in value.items()}
        return _Awaited(value, self._threads) if type(value) in _TWINS else value

    async def _hop(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        work = asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))
        return self._wrapped(await work)

    async def _items(self, iterator: Iterator[Any]) -> AsyncIterator[Any]:
        # StopIteration cannot come out of a thread's future.
        while (item := await self._hop(next, iterator, None)) is not None:
            yield item

    async def __aenter__(self) -> _Awaited:
        await self._hop(self._facade.__enter__)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._hop(self._facade.__exit__, *error)


class Member:
    """A consumer, and what it was told."""

    def __init__(self, balancer: StreamBalancer) -> None:
        self.balancer = balancer
        self.events: list[StreamEvent] = []
        self.task: asyncio.Task[None] | None = None

    def told(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def owned(self) -> set[str]:
        return set(self.balancer.owned)

    async def owns(self, *streams: str) -> None:
        """Return once it owns exactly these."""
        await eventually(lambda: self.owned == set(streams), f"{streams} to be owned")

    def listen(self) -> None:
        self.task = asyncio.ensure_future(self._listen())

    async def _listen(self) -> None:
        async for event in self.balancer.events():
            self.events.append(event)

    def run(self, handler: Callable[[str, Any], Any]) -> None:
        self.task = asyncio.ensure_future(self.balancer.run(handler))

    async def ended(self) -> None:
        """Return when its listening or running has ended."""
        assert self.task is not None
        await asyncio.wait_for(self.task, 20)


class Crew:
    """Makes consumers of a flavour, for a service that no other test has."""

    def __init__(self, flavour: str, url: str, clock: ManualClock) -> None:
        self.flavour = flavour
        self.url = url
        self.clock = clock
        self.service = f"t{secrets.token_hex(6)}"
        self._threads = ThreadPoolExecutor(16)
        self._stack = AsyncExitStack()
        self._members: list[Member] = []

    @classmethod
    @asynccontextmanager
    async def of(cls, flavour: str, url: str, clock: ManualClock) -> AsyncIterator[Crew]:
        crew = cls(flavour, url, clock)
        try:
            yield crew
        finally:
            await crew._stack.aclose()
            for member in crew._members:
                if member.task is not None:
                    await asyncio.wait([member.task])
            crew._threads.shutdown()

    def make(self, consumer: str, **options: Any) -> StreamBalancer:
        """A consumer that is not opened."""
        given: dict[str, Any] = {"service": self.service, "handle_signals": False, "sweep_interval": 0.2}
        given |= {"consumer": consumer, "clock": self.clock, **options}
        if self.flavour == "core":
            return core.StreamBalancer(self.url, **given)
        return cast("StreamBalancer", _Awaited(sync.StreamBalancer(self.url, **given), self._threads))

    async def join(self, consumer: str = "a", *, listen: bool = True, **options: Any) -> Member:
        """A consumer that works until the test ends."""
        member = Member(await self._stack.enter_async_context(self.make(consumer, **options)))
        self._members.append(member)
        if listen:
            member.listen()
        return member
