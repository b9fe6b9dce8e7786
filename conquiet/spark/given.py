"""What a user's options say, one by one: numbers, flags, entry IDs, times and offsets, out of texts."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

from conquiet.errors import ConfigError
from conquiet.kit import rules
from conquiet.kit.entry_ids import LARGEST, before, order

__all__ = [
    "Given",
    "Offsets",
    "entry_id",
    "flag",
    "integer",
    "offsets",
    "positive",
    "seconds",
    "since_id",
    "time_bound",
    "topics",
]

Offsets: TypeAlias = Mapping[str, Mapping[int, str]]
"""By topic and partition: an entry ID, or ``earliest`` or ``latest``."""

_SPARKS_OWN: Final = {"checkpointlocation", "queryname", "path", "outputmode"} | {
    *("provider", "owner", "location", "external", "comment", "collation", "is_managed_location"),
    *("transient_lastddltime", "numrows", "totalsize", "serialization.format"),
}
"""What Spark passes on though it is not meant for the source: the second half comes with CREATE TABLE."""
_TABLES: Final = "option."
"""How the options of a table begin, which CREATE TABLE gives a second time."""
_MOVED: Final = {"schema": "conquiet.spark.parsed(frame, schema) parses the payload"}
_EXAMPLE: Final = '{"orders": {"0": "1700000000000-0"}}'


class Given:
    """A user's options, whose names Spark does not keep in the case they were written in.

    ``aliases`` are older names of ``known`` ones. A name that is not known is refused, with the nearest that is.
    """

    def __init__(self, options: Mapping[str, str], known: Sequence[str], aliases: Mapping[str, str]) -> None:
        names = {option.lower(): option for option in (*known, *aliases)}
        self._values: dict[str, str] = {}
        self._called: dict[str, str] = {}
        for key, value in options.items():
            option = key.lower()
            if option in _SPARKS_OWN or option.startswith(_TABLES):
                continue
            if option not in names:
                raise ConfigError(_unknown(option, names))
            name = aliases.get(names[option], names[option])
            if name in self._values:
                raise ConfigError(f"{self._called[name]} and {names[option]} say the same: give one of them")
            self._values[name], self._called[name] = value, names[option]

    def __contains__(self, option: str) -> bool:
        return option in self._values

    def text(self, option: str) -> str | None:
        """An option that may be anything but empty."""
        value = self._values.get(option)
        return None if value is None else rules.text(self._called[option], value)

    def needed(self, option: str) -> str:
        """The same; ``ConfigError`` if it is missing."""
        value = self.text(option)
        if value is None:
            hint = (
                ""
                if self._values
                else (
                    "; Spark hands the options of a table to CREATE TABLE only: give them again with "
                    "SELECT ... WITH (url = '...', subscribe = '...'), or make a TEMPORARY VIEW"
                )
            )
            raise ConfigError(f"the option {option!r} is missing{hint}")
        return value

    def as_(self, option: str, read: Callable[[str], Any], default: Any) -> Any:
        """What ``read`` makes of an option; a ``ValueError`` of it becomes a ``ConfigError`` that names the option."""
        value = self._values.get(option)
        if value is None:
            return default
        try:
            return read(value)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"the option {self._called[option]} is {value!r}: {error}") from None

    def one_of(self, *options: str) -> None:
        """``ConfigError`` if more than one of these is given."""
        given = [self._called[option] for option in options if option in self._values]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} say the same: give one of them")


def _unknown(key: str, names: Mapping[str, str]) -> str:
    if key in _MOVED:
        return f"there is no option {key!r}: {_MOVED[key]}"
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    hint = f"did you mean {names[near[0]]!r}?" if near else f"there are {', '.join(names.values())}"
    return f"there is no option {key!r}: {hint}"


def flag(text: str) -> bool:
    """True or false."""
    if text.lower() not in ("true", "false"):
        raise ValueError("it must be true or false")
    return text.lower() == "true"


def integer(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise ValueError("it must be an integer") from None


def positive(text: str) -> int:
    """A whole number of at least 1."""
    number = integer(text)
    if number < 1:
        raise ValueError("it must be at least 1")
    return number


def seconds(text: str) -> float:
    """A time span."""
    try:
        return rules.number("it", float(text), least=0)
    except (ValueError, ConfigError):
        raise ValueError("it must be a number of seconds") from None


def topics(text: str) -> tuple[str, ...]:
    """Names with commas between them."""
    names = tuple(name.strip() for name in text.split(","))
    if len(set(names)) < len(names):
        raise ValueError("a topic is named twice")
    return names


def entry_id(text: str) -> str:
    """An entry ID; without its second number it means all of a millisecond."""
    ms, dash, seq = text.partition("-")
    if not (ms.isascii() and ms.isdigit() and (not dash or (seq.isascii() and seq.isdigit()))):
        raise ValueError("it must be an entry ID such as 1700000000000-0")
    if int(ms) > LARGEST or int(seq or 0) > LARGEST:
        raise ValueError(f"the numbers of an entry ID are at most {LARGEST}")
    return text


def since_id(text: str) -> str:
    """The ID after which a read begins that begins with this one."""
    return before(_whole(entry_id(text)))


def time_bound(text: str) -> str:
    """The last ID before an instant: ISO 8601 (UTC unless it says otherwise), or milliseconds since 1970."""
    return before(f"{_time_ms(text)}-0")


def _time_ms(text: str) -> int:
    if text.isascii() and text.isdigit():
        return min(int(text), LARGEST)  # later than anything either way
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("it must be a time such as 2030-12-31T23:59:59Z, or milliseconds since 1970") from None
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return max(0, math.ceil(moment.timestamp() * 1000))


def offsets(words: Sequence[str], subscribed: Sequence[str]) -> Callable[[str], tuple[str, Offsets]]:
    """What reads ``startingOffsets`` and ``endingOffsets``: one of ``words`` for all, or JSON by topic and partition.

    With one topic its name may be left out, as older versions had it.
    """

    def read(text: str) -> tuple[str, Offsets]:
        if text in words:
            return text, {}
        wrong = ValueError(f"it must be {', '.join(words)}, or a JSON object such as {_EXAMPLE}")
        try:
            found = json.loads(text)
        except ValueError:
            raise wrong from None
        if not isinstance(found, dict):
            raise wrong
        named: dict[str, Any] = found  # pyright: ignore[reportUnknownVariableType]
        if len(subscribed) == 1 and not any(isinstance(value, dict) for value in named.values()):
            named = {subscribed[0]: named}
        for topic in named:
            if topic not in subscribed:
                raise ValueError(f"{topic!r} is not subscribed to")
        return "", {topic: _partitions(places, words, wrong) for topic, places in named.items()}

    return read


def _partitions(places: Any, words: Sequence[str], wrong: ValueError) -> Mapping[int, str]:
    if not isinstance(places, dict):
        raise wrong
    named: dict[str, Any] = places  # pyright: ignore[reportUnknownVariableType]
    for partition, id in named.items():
        if not (partition.isascii() and partition.isdigit() and isinstance(id, str)):
            raise wrong
    return {int(partition): id if id in words else _whole(entry_id(id)) for partition, id in named.items()}


def _whole(id: str) -> str:
    ms, seq = order(id)
    return f"{ms}-{seq}"
