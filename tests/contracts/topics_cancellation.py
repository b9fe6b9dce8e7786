"""Scenes for cancelling calls of topics: what is there before a call, what goes on beside it, and what holds after it.

The broker that is cancelled reaches the server through a proxy, which counts its connections. Another broker, which
nobody disturbs, prepares and looks.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, TypeAlias

import pytest

from conquiet import Broker
from conquiet.errors import QueueError
from conquiet.kit.clock import ManualClock
from conquiet.topics.server.topics import Registry, Topic
from conquiet.wire.keys import Keys
from conquiet.wire.streams import entries_of
from tests.rigs.cancelling import HOWS, Call, How, Scene, nothing_left
from tests.rigs.proxy import Proxy
from tests.rigs.sizing import IS_FULL
from tests.rigs.waiting import LONG, eventually
from tests.topics.staging import Stage

__all__ = [
    "EVERYWHERE",
    "IS_FULL",
    "SOMEWHERE",
    "Case",
    "Ground",
    "Place",
    "each",
    "ground_at",
    "says_closed",
    "scene_of",
    "servers",
]

"""Whether all ways of cancelling are tried, in all places and on all servers."""

servers: Final = [] if IS_FULL else [pytest.mark.any_server]
"""For ``pytestmark``."""

Place: TypeAlias = Literal["ahead", "behind"]
"""Where a call stands: it opens the connection, and others come behind it; or it comes behind others."""

EVERYWHERE: Final[tuple[Place, ...]] = ("ahead", "behind")
SOMEWHERE: Final[tuple[Place, ...]] = EVERYWHERE if IS_FULL else ("ahead",)

_QUIET: Final = "quiet"
_HURRY: Final = 0.005


def each(kinds: Sequence[type[Case]], *places: Place) -> pytest.MarkDecorator:
    """The cases of a suite: all at full size, else one way of cancelling, and two where something is taken."""
    chosen = [
        pytest.param(kind, how, place, id=f"{kind.__name__}-{how}-{place}".replace(" ", "_"))
        for kind, how, place in itertools.product(kinds, HOWS, places)
        if how in kind.hows and (IS_FULL or how == "scope" or (how == "late task" and kind.takes))
    ]
    return pytest.mark.parametrize(("kind", "how", "place"), chosen)


@dataclass
class Ground:
    """Where scenes take place."""

    url: str
    proxy: Proxy
    namespace: str
    clock: ManualClock
    other: Broker
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def keys(self) -> Keys:
        return Keys(self.namespace)

    @property
    def stage(self) -> Stage:
        """To set up what takes consumers otherwise."""
        return Stage(self.other._instance, Registry(self.other._instance))

    def broker(self, **options: Any) -> Broker:
        """Another one to be cancelled, not yet connected."""
        return Broker(self.proxy.url, namespace=self.namespace, clock=self.clock, **options)

    async def payloads(self, topic: str, partitions: int = 1) -> dict[str, Any]:
        """What was sent to a topic, by entry IDs."""
        found: dict[str, Any] = {}
        for partition in range(partitions):
            stream = self.keys.partition(topic, partition)
            for id, fields in entries_of(await self.stage.call(stream, "XRANGE", stream, "-", "+")):
                found[f"{partition}/{id.decode()}"] = dict(zip(fields[::2], fields[1::2], strict=True))[b"payload"]
        return found


@asynccontextmanager
async def ground_at(url: str) -> AsyncGenerator[Ground]:
    """A namespace of its own at a server, with a proxy before it."""
    namespace, clock = f"t{secrets.token_hex(6)}", ManualClock()
    async with Proxy(url) as proxy, Broker(url, namespace=namespace, clock=clock) as other:
        await other.create_topic(_QUIET)
        yield Ground(url, proxy, namespace, clock, other)


class Case:
    """One call, made once on a topic of its own. What it needs and what it promises are said by its subclasses."""

    hows: ClassVar[tuple[How, ...]] = HOWS
    takes: ClassVar = False
    """Whether something may be in its hands when it is cancelled."""
    sleeps: ClassVar = False
    """Whether it waits for times that need not be lived through."""
    least: ClassVar = 3
    """How many points it has at least, where it opens a connection."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.other = ground.other
        self.topic = f"t{next(ground.numbers)}"
        self.broker = ground.broker()
        self.is_done = False
        """Whether the call came to its end."""
        self.result: Any = None

    @classmethod
    def points(cls, place: Place) -> int:
        """At how many points it is cancelled at least: behind others, a call of one round trip waits once."""
        return cls.least if place == "ahead" else 1

    async def prepare(self) -> None:
        """What is there before."""
        await self.other.create_topic(self.topic)

    async def call(self) -> Any:
        """What is cancelled."""
        raise NotImplementedError

    async def check(self) -> None:
        """What holds after it, whether it was cancelled or not."""
        raise NotImplementedError

    async def end(self) -> None:
        """Close what is open."""
        await self.broker.aclose()

    async def made(self) -> Any:
        """The call, which notes its end."""
        self.result = await self.call()
        self.is_done = True
        return self.result

    async def found(self) -> Topic:
        """The topic as it is."""
        return await self.ground.stage.registry.fetch(self.topic)


def scene_of(ground: Ground, kind: type[Case], place: Place | None = None) -> Scene:
    """The call of a new case, with others before or behind it unless it is alone; all of them get their own replies."""

    @asynccontextmanager
    async def scene() -> AsyncGenerator[Call]:
        case = kind(ground)
        async with nothing_left(lambda: ground.proxy.open_connections), _no_task_left():
            try:
                await case.prepare()
                async with _beside(case, place) as call, _time_passes(case):
                    yield call
                await case.check()
            finally:
                await case.end()

    return scene


@asynccontextmanager
async def _beside(case: Case, place: Place | None) -> AsyncGenerator[Call]:
    sending: list[asyncio.Task[str]] = []

    def others() -> None:
        sending.extend(asyncio.create_task(case.broker.send(_QUIET, f"{case.topic}-{n}")) for n in range(3))

    async def followed() -> Any:
        others()  # they begin when the call has begun to wait
        return await case.made()

    if place == "behind":
        await case.broker.send(_QUIET, "the first")
        others()
    yield followed if place == "ahead" else case.made
    async with asyncio.timeout(LONG):
        ids = await asyncio.gather(*sending)
    if ids:
        written = await case.ground.payloads(_QUIET)
        assert [written[f"0/{id}"] for id in ids] == [f'"{case.topic}-{n}"'.encode() for n in range(3)]


@asynccontextmanager
async def _time_passes(case: Case) -> AsyncGenerator[None]:
    async def pass_on() -> None:
        while True:
            await asyncio.sleep(_HURRY)  # what it is: time that passes by itself, but faster
            case.ground.clock.advance(0.5)

    passing = asyncio.create_task(pass_on()) if case.sleeps else None
    yield
    if passing is not None:
        passing.cancel()
        with suppress(asyncio.CancelledError):
            await passing


@asynccontextmanager
async def _no_task_left() -> AsyncGenerator[None]:
    """As ``nothing_left``, of tasks by any name: those of ``gather`` have none of the library's."""
    before = asyncio.all_tasks()
    yield
    await eventually(lambda: not asyncio.all_tasks() - before, "no task of any name is left")


async def says_closed(broker: Broker) -> None:
    """A closed broker refuses to be used, at once."""
    with pytest.raises(QueueError, match="closed"):
        await broker.admin.list_topics()
