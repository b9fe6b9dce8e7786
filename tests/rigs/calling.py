"""Calls whose answers are lost: each with the commands that it sends, what is there before, and what holds after.

A room lists its calls as paths. A path is walked on a scene of the room, by an object whose connections lead through a
tracer. Struck at one of its commands, the call fails and is made again by the same object.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Generic, Protocol, TypeVar

import pytest

from conquiet.errors import QueueError
from tests.rigs.sizing import IS_FULL
from tests.rigs.tracing import Striker, Way
from tests.rigs.waiting import LONG

__all__ = [
    "IS_FULL",
    "Path",
    "at_each",
    "boundaries",
    "sends_what_is_listed",
    "struck_and_goes_on",
    "struck_and_made_again",
]


class Scene(Protocol):
    """What a path is walked on."""

    @property
    def proxy(self) -> Striker:
        """Through which the walker's connections lead."""
        ...


_S = TypeVar("_S", bound=Scene)
_S_contra = TypeVar("_S_contra", bound=Scene, contravariant=True)


class Check(Protocol[_S_contra]):
    """Holds after the call was made again. ``done`` tells whether the server had done what the first call asked for,
    up to the command at which it was struck; ``first`` is a failed call's error, ``second`` the other's result.
    """

    def __call__(self, scene: _S_contra, *, done: bool, at: int, first: QueueError, second: Any) -> Awaitable[None]: ...


async def _nothing(scene: object) -> None:
    """No preparation."""


@dataclass(frozen=True)
class Path(Generic[_S]):
    """A call and all commands that it sends, in order."""

    commands: tuple[str, ...]
    call: Callable[[_S], Awaitable[Any]]
    check: Check[_S]
    prepare: Callable[[_S], Awaitable[Any]] = _nothing
    may_repeat: bool = False
    """Whether a command may come more often in a row than it is listed: one that is asked again and again."""
    together: bool = False
    """Whether all are sent before the first is answered: none can be kept from the server after an answer."""


def boundaries(paths: Mapping[str, Path[Any]]) -> list[tuple[str, int]]:
    """Each command of each path."""
    return [(name, at) for name, path in paths.items() for at in range(len(path.commands))]


def at_each(paths: Mapping[str, Path[Any]], chosen: Iterable[tuple[str, int]]) -> pytest.MarkDecorator:
    """The test's ``path`` and ``at``."""
    found = list(chosen)
    ids = [f"{path}-{at}-{paths[path].commands[at]}".replace(" ", "_") for path, at in found]
    return pytest.mark.parametrize(("path", "at"), found, ids=ids)


async def sends_what_is_listed(scene: _S, path: Path[_S], background: Collection[str]) -> None:
    """Fails if the call sends a command that is not listed, or not one that is; ``background`` may always come."""
    await path.prepare(scene)
    scene.proxy.arm()
    await asyncio.wait_for(path.call(scene), LONG)
    sent = [name for name in scene.proxy.trace if name not in background]
    listed = [name for name in path.commands if name not in background]
    if path.may_repeat:
        sent, listed = [[name for name, _ in groupby(names)] for names in (sent, listed)]
    assert sent == listed, f"it sends {sent}, not {listed}"


async def struck_and_made_again(scene: _S, path: Path[_S], at: int, way: Way) -> None:
    """The call is struck at one of its commands: it fails, and what is promised holds after it was made again."""
    await path.prepare(scene)
    scene.proxy.arm()
    after = () if path.together and way == "unsent" else path.commands[:at]
    struck = scene.proxy.strike(path.commands[at], after, way)
    with pytest.raises(QueueError) as failure:
        await asyncio.wait_for(path.call(scene), LONG)
    assert struck.is_set()
    assert type(failure.value) is QueueError, "a lost connection is nothing but that"
    second = await asyncio.wait_for(path.call(scene), LONG)
    await path.check(scene, done=way == "unanswered", at=at, first=failure.value, second=second)


async def struck_and_goes_on(scene: _S, path: Path[_S], at: int, way: Way) -> Any:
    """The result of a call that is struck and does not fail: it asks again by itself."""
    await path.prepare(scene)
    scene.proxy.arm()
    struck = scene.proxy.strike(path.commands[at], path.commands[:at], way)
    result = await asyncio.wait_for(path.call(scene), LONG)
    assert struck.is_set()
    return result
