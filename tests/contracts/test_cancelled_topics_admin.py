"""The operator's calls, cancelled wherever they wait: repeated they are completed, and nothing stays half done."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final

import pytest

from conquiet import Outgoing, Retention
from conquiet.errors import ConfigError, UnknownTopicError
from conquiet.topics.server.group import look_at
from conquiet.topics.server.growth import OVERDUE
from tests.contracts.topics_cancellation import SOMEWHERE, Case, Ground, Place, each, ground_at, scene_of, servers
from tests.rigs.asking import lasting_keys
from tests.rigs.cancelling import How, cancelled_everywhere
from tests.rigs.waiting import LONG
from tests.topics.consuming import impatient
from tests.topics.staging import TTL, hurried

pytestmark = servers

_FOR_EVER: Final = 10_000.0
"""Seconds of a lease that is not to run out while time is skipped."""


@pytest.fixture
async def ground(url: str) -> AsyncIterator[Ground]:
    async with ground_at(url) as ground:
        yield ground


class Administered(Case):
    """A topic of two partitions with eight messages, of which a group has four in hand and has given two up."""

    async def prepare(self) -> None:
        await self.other.create_topic(self.topic, partitions=2)
        topic, stage = await self.found(), self.ground.stage
        self.letters: list[str] = []
        for partition in range(2):
            await stage.create_group(topic, "g", partition=partition)
            [dead] = await stage.dead(topic, "g", 1, partition)
            self.letters.append(f"{partition}/{dead}")
            await stage.add(topic, 3, partition)
            await stage.read(topic, "g", 2, partition)

    async def pending(self) -> list[str]:
        """What the group has in hand."""
        topic, stage = await self.found(), self.ground.stage
        return [f"{partition}/{id}" for partition in range(2) for id in await stage.pending(topic, "g", partition)]

    async def consumed(self, *wanted: str) -> list[str]:
        """What a new consumer gets and acknowledges, once other leases have run out, until it has all of these."""
        self.ground.clock.advance(TTL + 1)
        return await hurried(self.ground.clock, self._consumed(set(wanted)))

    async def _consumed(self, wanted: set[str]) -> list[str]:
        found: list[str] = []
        options = impatient(lease_ttl=_FOR_EVER)
        async with self.other.consume(self.topic, group="g", options=options) as messages:
            while missing := wanted.difference(found):
                message = await messages.next(LONG)
                assert message is not None, f"these are lost: {missing}"
                await message.ack()
                found.append(f"{message.partition}/{message.id}")
        return sorted(found)


# --- looking ----------------------------------------------------------------------------------------------------------


class Looking(Administered):
    """Once more, it tells what anybody else is told."""

    async def check(self) -> None:
        theirs = type(self)(self.ground)
        theirs.topic, theirs.broker = self.topic, self.other
        assert await self.call() == await theirs.call()


class ListTopics(Looking):
    async def call(self) -> Any:
        return await self.broker.admin.list_topics()


class DescribeTopic(Looking):
    async def call(self) -> Any:
        return await self.broker.admin.describe_topic(self.topic)


class ListGroups(Looking):
    async def call(self) -> Any:
        return await self.broker.admin.list_groups(self.topic)


class DescribeGroup(Looking):
    async def call(self) -> Any:
        info = await self.broker.admin.describe_group(self.topic, "g")
        return info.lag, info.pending, info.unowned


class Pending(Looking):
    async def call(self) -> Any:
        page = await self.broker.admin.pending(self.topic, "g", count=3)
        return [(entry.partition, entry.id) for entry in page.entries], page.cursor


class DeadLetters(Looking):
    """With one that is still on its way to where it is found."""

    async def prepare(self) -> None:
        await super().prepare()
        topic, stage = await self.found(), self.ground.stage
        held = await stage.acquire(topic, "g")
        ids, _ = await stage.take(held)
        await stage.bury(held, *ids)

    async def call(self) -> Any:
        return [letter.original_id for letter in await self.broker.admin.dead_letters(self.topic)]

    async def check(self) -> None:
        await super().check()
        assert len(await self.call()) == 3


class DescribeLegacy(Looking):
    async def call(self) -> Any:
        legacy = self.broker.legacy(self.ground.keys.partition(self.topic, 0))
        return await self.broker.admin.describe_topic(legacy)


@each([ListTopics, DescribeTopic, ListGroups, DescribeGroup, Pending, DeadLetters, DescribeLegacy], *SOMEWHERE)
async def test_a_cancelled_look_disturbs_nobody(ground: Ground, kind: type[Case], how: How, place: Place) -> None:
    await cancelled_everywhere(scene_of(ground, kind, place), how, at_least=kind.points(place))


# --- dead letters -----------------------------------------------------------------------------------------------------


class Replay(Administered):
    """Of one letter the entry is gone, so that a copy is given back; twice would be two copies."""

    takes = True

    async def prepare(self) -> None:
        await super().prepare()
        partition, id = self.letters[1].split("/")
        stream = self.ground.keys.partition(self.topic, int(partition))
        await self.ground.stage.call(stream, "XDEL", stream, id)
        self.before = await self.ground.payloads(self.topic, 2)

    async def call(self) -> Any:
        return await self.broker.admin.replay(self.topic)

    async def check(self) -> None:
        found = await self.broker.admin.replay(self.topic)
        assert found <= 2
        assert not self.is_done or (self.result, found) == (2, 0)
        assert await self.other.admin.dead_letters(self.topic) == []
        after = await self.ground.payloads(self.topic, 2)
        [copy] = after.keys() - self.before.keys()
        given = sorted([*self.before.keys(), copy])
        assert await self.consumed(*given) == given


class ReplaySome(Replay):
    """By their IDs."""

    async def call(self) -> Any:
        letters = await self.other.admin.dead_letters(self.topic)
        return await self.broker.admin.replay(self.topic, ids=[letter.id for letter in letters])


class Purge(Administered):
    async def call(self) -> Any:
        return await self.broker.admin.purge(self.topic)

    async def check(self) -> None:
        before = await self.pending()
        found = await self.broker.admin.purge(self.topic)
        assert not self.is_done or (self.result, found) == (2, 0)
        assert await self.other.admin.dead_letters(self.topic) == []
        assert await self.pending() == before
        assert len(before) == 4


# --- changing ---------------------------------------------------------------------------------------------------------


class Trim(Administered):
    """The unfinished stays, however few are asked to be kept."""

    async def call(self) -> Any:
        return await self.broker.admin.trim(self.topic, max_len=1)

    async def check(self) -> None:
        found = await self.broker.admin.trim(self.topic, max_len=1)
        assert not self.is_done or (self.result, found) == (2, 0)
        left = sorted(await self.ground.payloads(self.topic, 2))
        assert len(left) == 6
        assert await self.consumed(*left) == left


class Configure(Administered):
    async def call(self) -> Any:
        await self.broker.admin.configure(self.topic, Retention(max_len=7))

    async def check(self) -> None:
        found = await self.broker.admin.configure(self.topic, Retention(max_len=7))
        assert found.retention.max_len == 7
        assert (await self.found()).retention == Retention(max_len=7)


class Grow(Administered):
    """Repeated, it is completed; who sends meanwhile is not held up for ever, and the group misses nothing."""

    sleeps = True

    async def call(self) -> Any:
        return await self.broker.admin.grow(self.topic, partitions=4)

    async def check(self) -> None:
        await self.complete()
        assert (await self.found()).partitions == 4
        assert (await self.found()).next_count is None
        for partition in range(4):  # else retention would not know of it there
            stand = await look_at(self.other._instance, self.ground.keys.partition(self.topic, partition))
            assert b"g" in stand.groups
        messages = [Outgoing(n, key=f"k{n}") for n in range(20)]
        ids = await self.broker.send_batch(self.topic, messages)
        assert {id.partition for id in ids} == {0, 1, 2, 3}
        unfinished = set(await self.ground.payloads(self.topic, 4)).difference(self.letters)
        assert await self.consumed(*unfinished) == sorted(unfinished)

    async def complete(self) -> None:
        """Whoever planned it does it again."""
        if (await self.found()).partitions < 4:
            with suppress(ConfigError):  # what was sent last may have arrived at this moment
                await hurried(self.ground.clock, self.broker.admin.grow(self.topic, partitions=4))


class GrowThenSend(Grow):
    """Not repeated, it is completed by whoever sends when it is overdue, if it was announced."""

    async def complete(self) -> None:
        was_announced = self.is_done or (await self.found()).span == 4
        self.ground.clock.advance(OVERDUE + 2)
        await hurried(self.ground.clock, self.other.send(self.topic, {}))
        assert not was_announced or (await self.found()).partitions == 4
        await super().complete()


class GrowThenConsume(Grow):
    """The same by whoever consumes."""

    async def complete(self) -> None:
        was_announced = self.is_done or (await self.found()).span == 4
        self.ground.clock.advance(OVERDUE + 2)
        async with self.other.consume(self.topic, group="h", options=impatient()):
            pass
        assert not was_announced or (await self.found()).partitions == 4
        await super().complete()
        await self.other.admin.delete_group(self.topic, "h", force=True)


class ResetGroup(Administered):
    """Repeated, the group begins where it was asked to."""

    async def call(self) -> Any:
        await self.broker.admin.reset_group(self.topic, "g", "earliest")

    async def check(self) -> None:
        await self.broker.admin.reset_group(self.topic, "g", "earliest")
        assert await self.pending() == []
        everything = sorted(await self.ground.payloads(self.topic, 2))
        assert await self.consumed(*everything) == everything


class ResetGroupOnce(ResetGroup):
    """Not repeated, each partition is reset or is not: what was unfinished is delivered either way."""

    async def check(self) -> None:
        wanted = set(await self.ground.payloads(self.topic, 2))
        await self.consumed(*(wanted if self.is_done else wanted.difference(self.letters)))
        await self.broker.admin.reset_group(self.topic, "g", "latest")
        info = await self.other.admin.describe_group(self.topic, "g")
        assert (info.lag, info.pending) == (0, 0)


class DeleteGroup(Administered):
    """Another of that name begins anew; the dead letters stay."""

    async def call(self) -> Any:
        await self.broker.admin.delete_group(self.topic, "g")

    async def check(self) -> None:
        with suppress(ConfigError):  # it is gone already
            await self.broker.admin.delete_group(self.topic, "g")
        assert await self.other.admin.list_groups(self.topic) == []
        assert len(await self.other.admin.dead_letters(self.topic)) == 2
        everything = sorted(await self.ground.payloads(self.topic, 2))
        assert await self.consumed(*everything) == everything


class DeleteTopic(Administered):
    """Repeated, nothing is left, and one of that name can be made again."""

    sleeps = True

    async def call(self) -> Any:
        await self.broker.admin.delete_topic(self.topic)

    async def check(self) -> None:
        with suppress(UnknownTopicError):  # it is gone already
            await hurried(self.ground.clock, self.broker.admin.delete_topic(self.topic))
        assert await lasting_keys(self.ground.url, f"*{self.ground.namespace}*:{self.topic}[:}}]*") == []
        await self.broker.create_topic(self.topic, partitions=1)
        id = await self.broker.send(self.topic, "new")
        assert await self.consumed(f"0/{id}") == [f"0/{id}"]


CHANGES: Final = [Replay, ReplaySome, Purge, Trim, Configure, ResetGroup, ResetGroupOnce, DeleteGroup]
SLOW: Final = [Grow, GrowThenSend, GrowThenConsume, DeleteTopic]


@each(CHANGES, *SOMEWHERE)
async def test_a_change_that_is_cancelled_can_be_repeated(
    ground: Ground, kind: type[Case], how: How, place: Place
) -> None:
    await cancelled_everywhere(scene_of(ground, kind, place), how, at_least=kind.points(place))


@each(SLOW, "ahead")
async def test_a_change_that_takes_its_time_is_completed_though_it_was_cancelled(
    ground: Ground, kind: type[Case], how: How, place: Place
) -> None:
    await cancelled_everywhere(scene_of(ground, kind), how)
