"""Leaving, cancelled wherever it waits, on another loop, and in a forked child: who has left has left."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import pytest

from conquiet import Message
from tests.contracts import topics_processes
from tests.contracts.topics_cancellation import Case, Ground, Place, each, ground_at, scene_of, servers
from tests.contracts.topics_consumers import Consumed
from tests.rigs.cancelling import How, cancelled_everywhere
from tests.rigs.waiting import LONG, eventually
from tests.sync.programs import run

pytestmark = servers

_A_WHILE: Final = 0.2
"""Seconds that a handler takes."""


@pytest.fixture
async def ground(url: str) -> AsyncIterator[Ground]:
    async with ground_at(url) as ground:
        yield ground


class Block(Consumed):
    """Entering, handling all and leaving."""

    hows = ("scope",)  # a task's one cancellation tears it at one point, which moves: below it is the second
    subscribes = True

    async def call(self) -> Any:
        async with self.consumer:
            await self.all_handled.wait()


class Leaving(Consumed):
    least = 1

    async def call(self) -> Any:
        await self.consumer.aclose()


class Leave(Leaving):
    """With a message in hand, which nobody settles any more."""

    async def prepare(self) -> None:
        await super().prepare()
        await self.consumer.__aenter__()
        assert await self.messages.next(LONG) is not None


class LeaveSubscription(Leaving):
    subscribes = True

    async def prepare(self) -> None:
        await super().prepare()
        await self.consumer.__aenter__()
        await self.all_handled.wait()


class LeavePaused(LeaveSubscription):
    async def prepare(self) -> None:
        await super().prepare()
        self.consumer.pause()
        self.sent.append(await self.other.send(self.topic, "not taken"))


class LeaveBusy(Leaving):
    """While a handler runs, its message is nobody else's."""

    subscribes = True
    count = 1

    async def prepare(self) -> None:
        self.inside, self.entered, self.opened = 0, asyncio.Event(), asyncio.Event()
        await super().prepare()
        await self.consumer.__aenter__()
        await self.entered.wait()

    async def handle(self, message: Message) -> None:
        self.inside += 1
        self.entered.set()
        try:
            await self.opened.wait()
            await super().handle(message)
        finally:
            self.inside -= 1

    async def call(self) -> Any:
        asyncio.get_running_loop().call_later(_A_WHILE, self.opened.set)
        await super().call()

    async def check(self) -> None:
        info = await self.other.admin.describe_group(self.topic, "g")
        assert info.unowned == () or not self.inside
        self.opened.set()
        await eventually(lambda: not self.inside, "the handler has ended")
        await super().check()

    async def end(self) -> None:
        self.opened.set()
        await super().end()


class LeaveBroker(Leave):
    """The broker is closed over the head of its consumer."""

    async def call(self) -> Any:
        await self.broker.aclose()


@each([Block, Leave, LeaveSubscription, LeavePaused, LeaveBusy, LeaveBroker], "ahead")
async def test_who_is_cancelled_while_it_leaves_has_left(
    ground: Ground, kind: type[Case], how: How, place: Place
) -> None:
    await cancelled_everywhere(scene_of(ground, kind), how, at_least=kind.least)


@pytest.mark.parametrize("name", topics_processes.__all__)
def test_in_a_process_of_its_own(url: str, name: str) -> None:
    scenario: Callable[..., None] = getattr(topics_processes, name)
    assert run(scenario, url, f"t{secrets.token_hex(6)}") == ["fine"]
