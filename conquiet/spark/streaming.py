"""Topics as a stream: Spark keeps the offsets in its checkpoint, so a restart goes on exactly where it stopped."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, ParamSpec, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from conquiet.kit.entry_ids import order
from conquiet.spark.bounding import Bounds
from conquiet.spark.connection import find, heard, opened
from conquiet.spark.cutting import Slice, by_time, cuts, pieces
from conquiet.spark.failures import briefly
from conquiet.spark.marks import backlog, beginning, between, bounded, first_of, left, whole_of
from conquiet.spark.offsets import Mark, Offset, Spot, as_json, is_of_one_topic, of_json
from conquiet.spark.options import ReadOptions
from conquiet.spark.reading import Seen, check_places, look, read_slice, tasks_of
from conquiet.spark.versions import AvailableNow, is_unlimited, read_limit
from conquiet.sync._portal import call
from conquiet.topics.outside import Instance, Position, Registry, Topic, adopt_group, publish_progress

__all__ = ["TopicStreamReader"]

P = ParamSpec("P")
R = TypeVar("R")

_SHOWN: Final = 5.0
"""For how many seconds a group of which nothing new can be told counts as served."""
_LULL: Final = 0.6
"""For how many seconds a query without news waits for some: as long as it may take to stop it."""


class TopicStreamReader(DataSourceStreamReader, AvailableNow):
    """Plans the micro-batches in the driver, and reads their slices in the tasks.

    A server that is away is waited for, as long as the user's patience lasts: an error here would end the query.
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
        self._adopted: dict[str, int] = {}
        """For how many partitions of a topic the group is known to be there."""
        self._published: Offset | None = None
        self._published_at = 0.0
        self._seen: dict[Spot, Seen] = {}
        """How the partitions stood when they were looked at last."""
        self._is_idle = False
        """Whether the last question for news found none, and nothing has happened since."""

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
        return as_json(self._began)

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, Any]:
        """Where the next batch ends."""
        since = self._reached if start is None else self._of(start)
        is_limited = self._options.is_limited and (start is None or not is_unlimited(limit))
        end = self._ask(self._latest, since, is_limited)
        if end == since and self._is_idle and self._target is None and self._ask(self._has_news):
            end = self._ask(self._latest, since, is_limited)
        self._is_idle = end == since
        self._reached = end
        # Spark compares texts: where nothing is new, that of an earlier version has to stay as it is.
        return as_json(end) if start is None or end != since else dict(start)

    def getDefaultReadLimit(self) -> Any:
        """The user's own limit."""
        return read_limit(self._options.limit, self._options.size)

    def reportLatestOffset(self) -> dict[str, Any]:
        """Where the topics ended when the last batch was planned; for progress reports."""
        return as_json(_ends_of(self._seen) if self._seen else self._ask(self._end_of_all))

    def prepareForTriggerAvailableNow(self) -> None:
        """What is added from now on is not for this query."""
        self._target = self._ask(self._end_of_all)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """What the tasks of a batch read: all between two offsets."""
        until = self._of(end)
        slices = self._ask(self._slices, self._of(start), until, is_of_one_topic(end))
        if self._reached is None:  # a batch of the run before is done first
            self._reached = until
        return [*slices]

    def commit(self, end: dict[str, Any]) -> None:
        """A batch is done, and the next one under way: operators can see it."""
        self._is_idle = False  # another source of the same query has news: it is not to wait for this one
        if self._options.group is not None:
            self._ask(self._publish, self._of(end))

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
        return call(question, *args, **kwargs)

    async def _close(self) -> None:
        (instance, self._instance), (bounds, self._bounds) = (self._instance, None), (self._bounds, None)
        if bounds is not None:
            await bounds.aclose()
        if instance is not None:
            await instance.link.aclose()

    def _of(self, raw: Mapping[str, Any]) -> Offset:
        return of_json(raw, self._options.place.topic)

    def _opened(self) -> Instance:
        if self._instance is None:
            self._instance = opened(self._options.place)
        return self._instance

    async def _look(self) -> dict[Spot, Seen]:
        self._seen = await look(self._opened(), self._options.places)
        return self._seen

    async def _has_news(self) -> bool:
        """Wait a moment for something new; whether there is. Else Spark would ask again a hundred times a second."""
        return await heard(self._opened(), {now.stream: now.end.last for now in self._seen.values()}, _LULL)

    async def _initial(self) -> Offset:
        instance, seen = self._opened(), await self._look()
        check_places(self._options, seen)
        offset: Offset = {}
        for spot, now in seen.items():
            mark = await beginning(instance, self._options, spot, now)
            planned = (self._reached or {}).get(spot, mark)
            offset[spot] = replace(min(mark, planned, key=lambda one: order(one.id)), cuts=())
        await self._adopt(seen, offset)
        return offset

    async def _end_of_all(self) -> Offset:
        return _ends_of(await self._look())

    async def _latest(self, since: Offset | None, is_limited: bool) -> Offset:
        seen = await self._look()
        if since is None:
            return whole_of(self._target, seen, {})
        if self._options.group is not None:
            await self._adopt(seen, since)
            await self._publish(since)
        end = whole_of(self._target, seen, since)
        if is_limited:
            end = await self._limited(seen, since, end)
        return await self._cut(seen, since, end)

    async def _limited(self, seen: Mapping[Spot, Seen], since: Offset, whole: Offset) -> Offset:
        """Where a batch ends that has a bound, which the partitions share."""
        if self._bounds is None:
            self._bounds = Bounds(self._opened())
        rows, size = self._options.limit, self._options.size
        if rows is not None and rows < len(whole):  # not all get something: it is their turn who have waited longest
            turns = sorted(whole, key=lambda spot: order(since.get(spot, Mark()).id))
        else:  # partitions with little to read leave the rest to the others
            turns = sorted(whole, key=lambda spot: backlog(since, whole, spot))
        offset: Offset = {}
        for done, spot in enumerate(turns):
            most, share = (None if rest is None else -(-rest // (len(turns) - done)) for rest in (rows, size))
            share = None if share is None else max(share, 1)  # one entry each, lest one waits for ever
            start = self._position(since, spot, seen[spot])
            count, took, offset[spot] = await bounded(self._bounds, seen[spot], start, whole[spot], most, share)
            rows, size = (None if rows is None else rows - count), (None if size is None else max(0, size - took))
        return {spot: offset[spot] for spot in whole}

    async def _cut(self, seen: Mapping[Spot, Seen], since: Offset, end: Offset) -> Offset:
        """The same, with how the batch is cut for its tasks."""
        tasks = tasks_of(self._options, len(seen))
        if not tasks:
            return end
        starts = {spot: self._position(since, spot, seen[spot]) for spot in end}
        parts = {
            spot: Slice(*spot, seen[spot].stream, starts[spot].id, mark.id, between(starts[spot], mark))
            for spot, mark in end.items()
            if order(starts[spot].id) < order(mark.id)
        }
        found = await cuts(self._opened(), list(parts.values()), tasks)
        return end | {spot: replace(end[spot], cuts=tuple(ids)) for spot, ids in zip(parts, found, strict=True)}

    async def _slices(self, start: Offset, end: Offset, is_old: bool) -> list[Slice]:
        # An interrupted batch may have topics that are not subscribed to any more.
        gone = {topic for topic, _ in end} - set(self._options.topics)
        places = [*self._options.places, *(replace(self._options.place, topic=topic) for topic in sorted(gone))]
        seen = await look(self._opened(), places)
        named = {topic for topic, _ in end}
        slices: list[Slice] = []
        for spot in sorted(start.keys() | end.keys()):
            if spot[0] not in named:
                continue  # it was left out of the subscription
            now = seen.get(spot)
            begin = start.get(spot, Mark()) if now is None else self._position(start, spot, now)
            whole = left(self._options, spot, now, begin, end.get(spot))
            if whole is None or now is None or now.end.first is None:
                continue
            is_by_time = is_old and self._options.splits > 1
            slices += by_time(whole, now.end, self._options.splits) if is_by_time else pieces(whole, end[spot].cuts)
        return slices

    def _position(self, offset: Offset, spot: Spot, now: Seen) -> Mark:
        """Where a partition stands; one that was not there yet is read from its beginning."""
        if spot in offset or any(topic == spot[0] for topic, _ in offset):
            return offset.get(spot, Mark())
        return first_of(now.end)  # the topic was not subscribed to: what it had removed before is no loss

    # --- the group -------------------------------------------------------------------------------------------------

    async def _adopt(self, seen: Mapping[Spot, Seen], offset: Offset) -> None:
        group = self._options.group
        if group is None:
            return
        instance, topics = self._opened(), {topic: now.topic for (topic, _), now in seen.items()}
        for name, topic in topics.items():
            if self._adopted.get(name, 0) < topic.partitions:
                marks = {index: offset.get((name, index), Mark()) for index in range(topic.partitions)}
                places = {index: Position(mark.id, mark.added) for index, mark in marks.items()}
                await adopt_group(instance, Registry(instance), topic, group, places)
                self._adopted[name] = topic.partitions

    async def _publish(self, offset: Offset) -> None:
        if self._options.group is None:
            return
        if offset == self._published and time.monotonic() - self._published_at < _SHOWN:
            return
        if not self._adopted:
            await self._adopt(await self._look(), offset)
        for place in self._options.places:
            topic = await find(self._opened(), place)
            await self._publish_topic(topic, place.topic, offset)
        self._published, self._published_at = offset, time.monotonic()

    async def _publish_topic(self, topic: Topic, name: str, offset: Offset) -> None:
        assert self._options.group is not None
        marks = {index: mark for (of, index), mark in offset.items() if of == name and index < topic.partitions}
        places = {index: Position(mark.id, mark.added) for index, mark in marks.items()}
        await publish_progress(self._opened(), topic, self._options.group, places)


def _ends_of(seen: Mapping[Spot, Seen]) -> Offset:
    return {spot: Mark(now.end.last, now.end.added) for spot, now in seen.items()}
