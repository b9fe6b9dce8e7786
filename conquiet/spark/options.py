"""The options of ``format("conquiet")``: what each means, and what is said of one that means nothing."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypeVar

from conquiet.errors import ConfigError
from conquiet.kit import rules
from conquiet.kit.entry_ids import LARGEST, before, order
from conquiet.wire.keys import name

__all__ = ["Place", "ReadOptions", "WriteOptions"]

_T = TypeVar("_T")

_SPARKS_OWN: Final = {"checkpointlocation", "queryname", "path", "outputmode"}
"""What Spark passes on though it is not meant for the source."""
_BOTH: Final = ("url", "topic", "namespace")
_READ: Final = (
    *_BOTH,
    "startId",
    "endId",
    "startTime",
    "endTime",
    "startingOffsets",
    "splits",
    "pageSize",
    "maxRowsPerBatch",
    "failOnDataLoss",
    "group",
    "schema",
    "deadLetters",
)
_WRITE: Final = (*_BOTH, "key", "payload", "headers", "idColumn", "nullKeys", "writeId", "batchId")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a topic is."""

    url: str
    topic: str
    namespace: str = ""

    def __post_init__(self) -> None:
        rules.text("url", self.url)
        name("topic", self.topic)
        if self.namespace:
            name("namespace", self.namespace)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What is read. IDs are those after which and up to which, for every partition."""

    place: Place
    since: str | None = None
    """``None``: where ``start`` says."""
    until: str | None = None
    start: Literal["earliest", "latest"] = "earliest"
    starts: Mapping[str, str] | None = None
    """For single partitions: the ID after which. The others are read from the beginning."""
    splits: int = 1
    page: int = 2_000
    limit: int | None = None
    fail_on_loss: bool = True
    group: str | None = None
    schema: str | None = None
    dead_letters: bool = False

    @classmethod
    def of(cls, options: Mapping[str, str]) -> ReadOptions:
        """What a user's options say; ``ConfigError`` that names what cannot be meant."""
        given = _Given(options, _READ)
        start, starts = given.as_("startingOffsets", _starts, ("earliest", None))
        found = cls(
            given.place(),
            given.one_of_two("startId", _since_id, "startTime", lambda text: before(f"{_time_ms(text)}-0")),
            given.one_of_two("endId", _entry_id, "endTime", lambda text: before(f"{_time_ms(text)}-0")),
            start,
            starts,
            given.as_("splits", _positive, 1),
            given.as_("pageSize", _positive, 2_000),
            given.as_("maxRowsPerBatch", _positive, None),
            given.as_("failOnDataLoss", _flag, True),
            given.as_("group", lambda text: name("group", text), None),
            given.text("schema"),
            given.as_("deadLetters", _flag, False),
        )
        if found.dead_letters and (found.group or found.schema or found.until or found.since or start != "earliest"):
            raise ConfigError("deadLetters cannot be combined with group, schema, or a range of IDs or times")
        if found.since is not None and "startingOffsets" in given:
            raise ConfigError("startingOffsets and startId or startTime say the same: give one of them")
        return found


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """What is written, and which columns it is made of."""

    place: Place
    key: str | None = None
    payload: str | None = None
    headers: str | None = None
    id_column: str | None = None
    null_keys: Literal["refuse", "allow"] = "refuse"
    write_id: str | None = None
    batch_id: int = 0

    @classmethod
    def of(cls, options: Mapping[str, str]) -> WriteOptions:
        """What a user's options say; ``ConfigError`` that names what cannot be meant."""
        given = _Given(options, _WRITE)
        found = cls(
            given.place(),
            given.text("key"),
            given.text("payload"),
            given.text("headers"),
            given.text("idColumn"),
            given.as_("nullKeys", lambda text: rules.one_of("nullKeys", text, ("refuse", "allow")), "refuse"),
            given.as_("writeId", lambda text: name("writeId", text), None),
            given.as_("batchId", lambda text: rules.integer("batchId", _integer(text), least=0), 0),
        )
        if "batchId" in given and found.write_id is None:
            raise ConfigError("batchId needs a writeId: the name that a repeated write is known by")
        return found


class _Given:
    """A user's options, whose names Spark does not keep in the case they were written in."""

    def __init__(self, options: Mapping[str, str], known: tuple[str, ...]) -> None:
        self._values = {key.lower(): value for key, value in options.items() if key.lower() not in _SPARKS_OWN}
        names = {option.lower(): option for option in known}
        for key in self._values:
            if key not in names:
                raise ConfigError(_unknown(key, names))

    def __contains__(self, option: str) -> bool:
        return option.lower() in self._values

    def text(self, option: str) -> str | None:
        value = self._values.get(option.lower())
        return None if value is None else rules.text(option, value)

    def place(self) -> Place:
        url, topic = self.text("url"), self.text("topic")
        for option, value in (("url", url), ("topic", topic)):
            if value is None:
                raise ConfigError(f"the option {option!r} is missing")
        assert url is not None
        assert topic is not None
        return Place(url, topic, self._values.get("namespace", ""))

    def as_(self, option: str, read: Callable[[str], Any], default: Any) -> Any:
        value = self._values.get(option.lower())
        if value is None:
            return default
        try:
            return read(value)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"the option {option} is {value!r}: {error}") from None

    def one_of_two(self, first: str, read: Callable[[str], str], second: str, read_second: Callable[[str], str]) -> Any:
        if first in self and second in self:
            raise ConfigError(f"{first} and {second} say the same: give one of them")
        return self.as_(first, read, None) or self.as_(second, read_second, None)


def _unknown(key: str, names: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    hint = f"did you mean {names[near[0]]!r}?" if near else f"there are {', '.join(names.values())}"
    return f"there is no option {key!r}: {hint}"


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("it must be true or false")
    return text.lower() == "true"


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("it must be an integer") from None


def _positive(text: str) -> int:
    number = _integer(text)
    if number < 1:
        raise ValueError("it must be at least 1")
    return number


def _entry_id(text: str) -> str:
    ms, dash, seq = text.partition("-")
    if not (ms.isascii() and ms.isdigit() and (not dash or (seq.isascii() and seq.isdigit()))):
        raise ValueError("it must be an entry ID such as 1700000000000-0")
    if int(ms) > LARGEST or int(seq or 0) > LARGEST:
        raise ValueError(f"the numbers of an entry ID are at most {LARGEST}")
    return text


def _since_id(text: str) -> str:
    """The ID after which a read begins that begins with this one."""
    return before(_whole(_entry_id(text)))


def _time_ms(text: str) -> int:
    """An instant, as ISO 8601 (UTC unless it says otherwise) or as milliseconds since 1970, rounded up."""
    if text.isascii() and text.isdigit():
        return min(int(text), LARGEST)  # later than anything either way
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("it must be a time such as 2030-12-31T23:59:59Z, or milliseconds since 1970") from None
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return max(0, math.ceil(moment.timestamp() * 1000))


def _starts(text: str) -> tuple[str, Mapping[str, str] | None]:
    if text in ("earliest", "latest"):
        return text, None
    wrong = ValueError('it must be earliest, latest, or a JSON object such as {"0": "1700000000000-0"}')
    try:
        found = json.loads(text)
    except ValueError:
        raise wrong from None
    if not isinstance(found, dict):
        raise wrong
    starts: dict[Any, Any] = found  # pyright: ignore[reportUnknownVariableType]
    for partition, id in starts.items():
        if not (partition.isascii() and partition.isdigit() and isinstance(id, str)):
            raise wrong
        _entry_id(id)
    return "earliest", {str(int(partition)): _whole(id) for partition, id in starts.items()}


def _whole(id: str) -> str:
    ms, seq = order(id)
    return f"{ms}-{seq}"
