"""The consumers of a balanced service of which one is cancelled, and what the others find afterwards."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, TypeAlias

from conquiet.kit.clock import ManualClock
from tests.balance.crew import Crew, Member
from tests.rigs.cancelling import Call, How, cancelled_everywhere, nothing_left
from tests.rigs.proxy import Proxy

__all__ = ["FAR", "SceneOf", "cancelled_at_each_point", "has_left", "heir_gets", "joined"]

FAR: Final = 600.0
"""Seconds of a lease that nobody waits for: what another gets by then was given back."""
SceneOf: TypeAlias = Callable[[Crew, str], AbstractAsyncContextManager[Call]]


async def cancelled_at_each_point(proxy: Proxy, url: str, scene: SceneOf, how: How, at_least: int = 3) -> None:
    """Each time with a service of its own; after each, nothing is left of those who were behind the proxy."""

    @asynccontextmanager
    async def bare() -> AsyncGenerator[Call]:
        async with nothing_left(lambda: proxy.open_connections):
            crew = Crew(url, ManualClock())
            try:
                async with scene(crew, proxy.url) as call:
                    yield call
            finally:
                await crew.aclose()

    await cancelled_everywhere(bare, how, at_least=at_least)


async def joined(crew: Crew, url: str, *streams: str, **options: Any) -> Member:
    """A consumer behind the proxy that owns these and looks for no more."""
    member = await crew.join("member", url=url, listen=False, lease_ttl=FAR, sweep_interval=FAR, **options)
    await crew.add(*streams)
    await member.owns(*streams)
    return member


async def heir_gets(crew: Crew, *streams: str) -> None:
    """Another consumer has them now, though no time has passed."""
    heir = await crew.join("heir", lease_ttl=FAR, auto_claim=True)
    await heir.owns(*streams)


async def has_left(crew: Crew, name: str) -> None:
    """It is no member any more, and no sign of life makes it one."""
    crew.clock.advance(FAR / 2)
    assert await crew.ask("ZSCORE", crew.keys.members, name) is None, f"{name} is still a member"
