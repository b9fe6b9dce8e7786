"""Calls of the room, each with every command that it sends: what is there before, and what holds after."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from conquiet import QueueConfig, QueueConsumer, QueueError, QueueMessage, RedisStreamsQueue
from tests.rigs.asking import ask, entries, pending
from tests.rigs.calling import Path
from tests.rigs.tracing import Tracer

__all__ = ["BACKGROUND", "PATHS", "Scene"]

BACKGROUND: Final = {"CLIENT", "HELLO"}
"""What a connection begins with, and what ends a read that waits."""


@dataclass
class Scene:
    """A stream that nobody else has, reached through a proxy by ``queue`` and past it by ``eye``."""

    proxy: Tracer
    url: str
    queue: RedisStreamsQueue
    eye: RedisStreamsQueue
    messages: list[QueueMessage] = field(default_factory=list)
    handled: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    @property
    def config(self) -> QueueConfig:
        return self.queue.config

    async def entries(self) -> list[Any]:
        return list((await entries(self.url, self.config.stream_key)).values())

    async def pending(self) -> list[str]:
        return await pending(self.url, self.config.stream_key, self.config.consumer_group)


# --- before and during ------------------------------------------------------------------------------------------------


async def opened(scene: Scene) -> None:
    await scene.queue.open()


async def filled(scene: Scene) -> None:
    await opened(scene)
    scene.ids = await scene.eye.enqueue_many([{"n": n} for n in range(3)])


async def delivered(scene: Scene) -> None:
    await filled(scene)
    scene.messages = await scene.queue.read(count=3)


async def delivered_and_deleted(scene: Scene) -> None:
    """One of the entries that are pending is gone."""
    await delivered(scene)
    await ask(scene.url, "XDEL", scene.config.stream_key, scene.ids[0])


async def run_once(scene: Scene) -> None:
    """A consumer's whole round: read, handle, commit, acknowledge."""
    consumer = QueueConsumer(scene.queue, handle_signals=False)

    async def handler(message: QueueMessage, tx: object) -> None:
        scene.handled.append(message.id)
        consumer.stop()

    await consumer.run(handler=handler, db_factory=_Database())


class _Database:
    """Keeps nothing: what is committed is not the question here."""

    async def begin(self) -> _Database:
        return self

    async def commit(self) -> None:
        pass

    async def rollback(self) -> None:
        pass


# --- after ------------------------------------------------------------------------------------------------------------


async def the_group_is_there(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    groups = await ask(scene.url, "XINFO GROUPS", scene.config.stream_key)
    assert [group["name"] for group in groups] == [scene.config.consumer_group]


async def is_there_once_more(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    """At most once by each call, and the ID is that of the second call's entry."""
    found = await entries(scene.url, scene.config.stream_key)
    assert len(found) == 1 + done
    assert second == list(found)[-1]


async def are_there_once_more(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    """Whoever asked is told of none that it is there: of those that are, the answers were lost."""
    found = await entries(scene.url, scene.config.stream_key)
    assert list(first.entry_ids) == [None] * 3
    assert len(found) == 3 + 3 * done
    assert second == list(found)[-3:]


async def the_next_is_read(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    """What the first read was given stays pending, and is claimed like anything that is left."""
    assert [message.id for message in second] == [scene.ids[int(done)]]
    assert await scene.pending() == scene.ids[: 1 + done]
    stale = await scene.queue.claim_stale(0)
    assert [message.id for message in stale] == scene.ids[: 1 + done]


async def nothing_is_pending(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert await scene.pending() == []
    assert len(await scene.entries()) == 3


async def all_are_claimed(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert [message.id for message in second] == scene.ids
    assert await scene.pending() == scene.ids
    await scene.queue.ack(*second)
    assert await scene.pending() == []


async def the_rest_is_claimed(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert [message.id for message in second] == scene.ids[1:]
    assert await scene.pending() == scene.ids[1:]


async def it_tells_how_it_is(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert (second.length, second.pending) == (3, 3)


async def is_handled_at_least_once(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    """A message whose delivery was lost is pending, one whose acknowledgment was lost is not."""
    is_read = at == 0
    left = [scene.ids[0]] if is_read and done else []
    if not is_read and not done:
        left = [scene.ids[0]]  # it was handled, and the acknowledgment did not arrive
    assert await scene.pending() == left
    assert scene.handled == ([] if is_read else [scene.ids[0]]) + [scene.ids[0 if is_read and not done else 1]]


# --- the paths --------------------------------------------------------------------------------------------------------

_Call: TypeAlias = Callable[[Scene], Awaitable[Any]]
_BACKLOG: Final = ("XLEN", "XPENDING", "XPENDING", "XINFO")


def _read(scene: Scene) -> Awaitable[Any]:
    return scene.queue.read(count=1)


PATHS: Final[dict[str, Path[Scene]]] = {
    "open": Path(("XGROUP",), lambda s: s.queue.open(), the_group_is_there),
    "enqueue": Path(("XADD",), lambda s: s.queue.enqueue({"n": 1}), is_there_once_more, opened),
    "enqueue many": Path(
        ("XADD",) * 3,
        lambda s: s.queue.enqueue_many([{"n": n} for n in range(3)]),
        are_there_once_more,
        opened,
        together=True,
    ),
    "read": Path(("XREADGROUP",), _read, the_next_is_read, filled),
    "ack": Path(("XACK",), lambda s: s.queue.ack(*s.messages), nothing_is_pending, delivered),
    "claim": Path(("XPENDING", "XCLAIM"), lambda s: s.queue.claim_stale(0), all_are_claimed, delivered),
    "backlog": Path(_BACKLOG, lambda s: s.queue.backlog_stats(), it_tells_how_it_is, delivered, together=True),
    "run": Path(("XREADGROUP", "XACK"), run_once, is_handled_at_least_once, filled),
}
"""The commands of each call, in order."""

GHOSTS: Final = Path(
    ("XPENDING", "XCLAIM", "XRANGE", "XACK"),
    lambda s: s.queue.claim_stale(0),
    the_rest_is_claimed,
    delivered_and_deleted,
)
"""On servers before Redis 7, which leave it to us to remove IDs without an entry."""
