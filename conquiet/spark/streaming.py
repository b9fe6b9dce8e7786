"""A topic as a stream: Spark keeps the offsets in its checkpoint, so a restart goes on exactly where it stopped.

An offset is, for each partition, the ID of the last entry that was read and how many entries had ever been added up
to there (``null`` where that is not known). The second number tells whether entries were removed unread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from conquiet.errors import DataLostError, GroupLostError, QueueError
from conquiet.kit.clock import SYSTEM_CLOCK
from conquiet.kit.entry_ids import BEGINNING, before, order
from conquiet.kit.retrying import patiently
from conquiet.spark.bounding import Bounds
from conquiet.spark.connection import find, opened
from conquiet.spark.failures import briefly
from conquiet.spark.options import ReadOptions
from conquiet.spark.reading import Slice, check_starts, lost, read_slice, split
from conquiet.spark.versions import AvailableNow, read_limit
from conquiet.sync._portal import call
from conquiet.topics.outside import (
    End,
    Instance,
    Position,
    Registry,
    Topic,
    adopt_group,
    ends,
    last_up_to,
    publish_progress,
    removed_after,
)

__all__ = ["TopicStreamReader"]

P = ParamSpec("P")
R = TypeVar("R")

Offset: TypeAlias = "dict[str, list[Any]]"
"""By partition: the last ID, and how many entries were ever added up to it."""

_log = logging.getLogger("conquiet.spark")
_SHOWN: Final = 5.0
"""For how many seconds a group of which nothing new can be told counts as served."""


class TopicStreamReader(DataSourceStreamReader, AvailableNow):
    """Plans the micro-batches in the driver, and reads their slices in the tasks.

    A failing server is asked again for about ten seconds: an error here would end the query.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._instance: Instance | None = None
        self._bounds: Bounds | None = None
        self._target: Offset | None = None
        """Where a query ends that reads what is available now."""
        self._began: Offset | None = None
        """Where a query without a checkpoint has begun."""
        self._reached: Offset | None = None
        """Where the last batch ends that was planned in this run; for versions of Spark that do not tell."""
        self._adopted = 0
        """For how many partitions the group is known to be there."""
        self._published: Offset | None = None
        self._published_at = 0.0

    def __getstate__(self) -> object:
        return (self._options, self._schema)

    def __setstate__(self, state: Any) -> None:
        self.__init__(*state)  # type: ignore[misc]

    # --- what Spark calls in the driver --------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        """Where a query begins that has no checkpoint."""
        if self._began is None:  # it is asked for more than once, and the topic goes on meanwhile
            self._began = self._ask(self._initial)
        if self._reached is None:  # before 4.2, Spark asks where a batch ends before it asks where it begins
            self._reached = self._began
        return self._began

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, Any]:
        """Where the next batch ends."""
        since = self._reached if start is None else dict(start)
        rows = self._options.limit if start is None else getattr(limit, "max_rows", None)
        end = self._ask(self._latest, since, rows)
        self._reached = end
        return end

    def getDefaultReadLimit(self) -> Any:
        """The user's own limit."""
        return read_limit(self._options.limit)

    def reportLatestOffset(self) -> dict[str, Any]:
        """Where the topic ends; for progress reports."""
        return self._ask(self._end_of_all)

    def prepareForTriggerAvailableNow(self) -> None:
        """What is added from now on is not for this query."""
        self._target = self._ask(self._end_of_all)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """What the tasks of a batch read: all between two offsets."""
        slices = self._ask(self._slices, start, end)
        if self._reached is None:  # a batch of the run before is done first
            self._reached = end
        return [*slices]

    def commit(self, end: dict[str, Any]) -> None:
        """A batch is done, and the next one under way: operators can see it."""
        if self._options.group is not None:
            self._ask(self._publish, end)

    def stop(self) -> None:
        """Close the connections."""
        call(self._close)

    # --- what it calls in the tasks --------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The entries of a slice."""
        assert isinstance(partition, Slice)
        return read_slice(self._options, self._schema, partition)

    # --- asking the server -----------------------------------------------------------------------------------------

    @briefly
    def _ask(self, question: Callable[P, Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
        return call(patiently, SYSTEM_CLOCK, partial(question, *args, **kwargs), self._before_retry)

    def _before_retry(self, error: QueueError) -> None:
        # The first question is not repeated: a server that is not there is the user's to see.
        if self._reached is None or isinstance(error, DataLostError | GroupLostError):
            raise error
        _log.warning("topic %r: asked again: %s", self._options.place.topic, error)

    async def _close(self) -> None:
        (instance, self._instance), (bounds, self._bounds) = (self._instance, None), (self._bounds, None)
        if bounds is not None:
            await bounds.aclose()
        if instance is not None:
            await instance.link.aclose()

    async def _look(self) -> tuple[Instance, Topic, list[End]]:
        if self._instance is None:
            self._instance = opened(self._options.place)
        topic = await find(self._instance, self._options.place)
        return self._instance, topic, await ends(self._instance, topic)

    async def _initial(self) -> Offset:
        instance, topic, found = await self._look()
        check_starts(self._options, topic)
        offset: Offset = {}
        for partition, end in enumerate(found):
            place = await self._beginning(instance, topic.stream(instance.keys, partition), partition, end)
            planned = (self._reached or {}).get(str(partition), place)
            offset[str(partition)] = min(place, planned, key=lambda one: order(one[0]))
        await self._adopt(instance, topic, offset)
        return offset

    async def _beginning(self, instance: Instance, stream: str, partition: int, end: End) -> list[Any]:
        """Where a partition is begun: always a place that it has had, so that what is missing later was lost."""
        options = self._options
        given = options.since or (options.starts or {}).get(str(partition))
        if given is None:
            given = end.last if options.start == "latest" else BEGINNING
        if end.first is None or order(given) >= order(end.last):
            return [end.last, end.added]
        if order(given) < order(end.first):
            return [before(end.first), end.gone]
        return [await last_up_to(instance, stream, given) or given, None]

    async def _end_of_all(self) -> Offset:
        _, _, found = await self._look()
        return {str(partition): [end.last, end.added] for partition, end in enumerate(found)}

    async def _latest(self, since: Offset | None, limit: int | None) -> Offset:
        instance, topic, found = await self._look()
        if since is not None and self._options.group is not None:
            await self._adopt(instance, topic, since)
            await self._publish(since)
        whole = _whole(self._target, found, since or {})
        if limit is None or since is None:
            return whole
        if self._bounds is None:
            self._bounds = Bounds(instance)
        offset: Offset = {}
        left = limit
        if limit < len(whole):  # not all get something, so it is their turn who have waited the longest
            turns = sorted(whole, key=lambda partition: order(_position(since, partition)[0]))
        else:  # partitions with little to read leave the rest to the others
            turns = sorted(whole, key=lambda partition: _backlog(since, whole, partition))
        for done, partition in enumerate(turns):
            share = -(-left // (len(turns) - done))
            start = _position(since, partition)
            stream, end = topic.stream(instance.keys, int(partition)), found[int(partition)]
            count, offset[partition] = await _bounded(self._bounds, stream, start, whole[partition], end, share)
            left -= count
        return {partition: offset[partition] for partition in whole}

    async def _slices(self, start: Offset, end: Offset) -> list[Slice]:
        instance, topic, found = await self._look()
        slices: list[Slice] = []
        for partition in sorted(start.keys() | end.keys(), key=int):
            index, (since, read) = int(partition), _position(start, partition)
            until, added = end.get(partition, (None, None))
            if until == since:
                continue
            if until is None or index >= len(found):
                lost(self._options, index, None)  # the topic was made again, with fewer partitions
                continue
            now = found[index]
            if _is_another(now, since, read):
                lost(self._options, index, None)
                since, read = _begin_again(now, since), None
            elif order(until) < order(since):
                # It began at the latest entry and died in its first batch: Spark does not know any more where that was.
                lost(self._options, index, None)
                continue
            elif (gone := removed_after(now, since, read)) != 0:
                lost(self._options, index, gone)
                read = None
            expected = added - read if added is not None and read is not None else None
            whole = Slice(index, topic.stream(instance.keys, index), since, until, expected)
            slices += split(whole, now, self._options.splits)
        return slices

    # --- the group -------------------------------------------------------------------------------------------------

    async def _adopt(self, instance: Instance, topic: Topic, offset: Offset) -> None:
        group = self._options.group
        if group is None or self._adopted >= topic.partitions:
            return
        places = {index: _progress(_position(offset, str(index))) for index in range(topic.partitions)}
        await adopt_group(instance, Registry(instance), topic, group, places)
        self._adopted = topic.partitions

    async def _publish(self, offset: Offset) -> None:
        if self._options.group is None:
            return
        if offset == self._published and time.monotonic() - self._published_at < _SHOWN:
            return
        if self._instance is None:
            self._instance = opened(self._options.place)
        topic = await find(self._instance, self._options.place)
        if not self._adopted:
            await self._adopt(self._instance, topic, offset)
        places = {int(partition): _progress(place) for partition, place in offset.items()}
        there = {partition: place for partition, place in places.items() if partition < topic.partitions}
        await publish_progress(self._instance, topic, self._options.group, there)
        self._published, self._published_at = offset, time.monotonic()


async def _bounded(
    bounds: Bounds, stream: str, start: list[Any], whole: list[Any], end: End, limit: int
) -> tuple[int, list[Any]]:
    """How many entries a batch takes of one partition, at most so many, and where it ends there."""
    since, read = start
    if since == whole[0] or limit <= 0:  # what was lost of a partition is told once something of it is read
        return 0, start
    if _is_another(end, since, read):
        since, read = _begin_again(end, since), end.gone
        bounds.forget(stream)
    if read is not None and whole[1] is not None:
        if end.gone is not None and end.gone > read:  # entries that were never read
            read = end.gone
            bounds.forget(stream)
        if whole[1] - read <= limit:
            return max(0, whole[1] - read), whole
    count, last = await bounds.count(stream, since, whole[0], limit)
    if last == whole[0]:
        return count, whole
    if count:
        bounds.look_ahead(stream, last, whole[0], limit)
    return count, [last, None if read is None else read + count]


def _whole(target: Offset | None, found: list[End], since: Offset) -> Offset:
    """Where everything ends, as far as the query is to read it."""
    whole: Offset = {}
    for index, end in enumerate(found):
        partition = str(index)
        place: list[Any] | None = [end.last, end.added] if target is None else target.get(partition)
        reached = since.get(partition)
        if place is None or (reached is not None and _is_done(reached[0], place[0], target is not None)):
            place = reached
        if place is not None:
            whole[partition] = place
    return whole


def _is_done(reached: str, end: str, is_fixed: bool) -> bool:
    """Whether nothing is left to read; a query may begin behind an end that was fixed before."""
    # What differs in nothing but a count that was not known is no new batch.
    return reached == end or (is_fixed and order(reached) > order(end))


def _is_another(end: End, since: str, read: int | None) -> bool:
    """Whether the partition was made again after it was read up to ``since``, or the server forgot it."""
    fewer = read is not None and end.added is not None and end.added < read
    return fewer or order(end.last) < order(since)


def _begin_again(end: End, since: str) -> str:
    """Where such a partition is begun. IDs tell the time: where they can, all that is new comes after ``since``."""
    return BEGINNING if order(end.last) < order(since) else since


def _position(offset: Mapping[str, Any], partition: str) -> list[Any]:
    """Where a partition stands; one that was not there yet is read from its beginning."""
    return list(offset.get(partition, [BEGINNING, 0]))


def _backlog(since: Offset, whole: Offset, partition: str) -> float:
    (reached, read), (end, added) = _position(since, partition), whole[partition]
    if reached == end:
        return 0
    return float("inf") if read is None or added is None else added - read


def _progress(place: list[Any]) -> Position:
    return Position(place[0], place[1])
