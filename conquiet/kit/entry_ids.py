"""Entry IDs of Redis Streams, ``ms-seq``: their order, their neighbours and the times that they tell."""

from __future__ import annotations

import datetime as dt
import re
from typing import Final

from conquiet.errors import ConfigError

__all__ = [
    "BEGINNING",
    "LARGEST",
    "LAST",
    "after",
    "before",
    "checked",
    "is_entry_id",
    "moment",
    "order",
    "start",
    "until",
]

BEGINNING: Final = "0-0"
"""The ID before all entries: the last ID of a stream that never gave one."""
LARGEST: Final = 2**64 - 1
"""Of both numbers of an ID."""
LAST: Final = f"{LARGEST}-{LARGEST}"
_ID: Final = re.compile(r"(\d{1,20})-(\d{1,20})", re.ASCII)


def order(id: str) -> tuple[int, int]:
    """The two numbers of an ID, which compare as the entries do; a missing number is 0."""
    ms, _, seq = str.partition(id, "-")  # an EntryId has an attribute of that name
    return int(ms or 0), int(seq or 0)


def after(id: str) -> str:
    """The ID that comes next after ``id``."""
    ms, seq = order(id)
    return f"{ms + 1}-0" if seq == LARGEST else f"{ms}-{seq + 1}"


def before(id: str) -> str:
    """The ID that comes just before ``id``."""
    ms, seq = order(id)
    if seq:
        return f"{ms}-{seq - 1}"
    return f"{ms - 1}-{LARGEST}" if ms else BEGINNING


def is_entry_id(value: object) -> bool:
    """Whether ``value`` is a whole entry ID."""
    return isinstance(value, str) and _ID.fullmatch(value) is not None and max(order(value)) <= LARGEST


def checked(what: str, value: object) -> str:
    """``value`` without leading zeros if it is an entry ID; else ``ConfigError`` that names ``what``."""
    if not isinstance(value, str) or not is_entry_id(value):
        raise ConfigError(f"{what} must be an entry's ID, 'ms-seq', not {value!r}")
    ms, seq = order(value)
    return f"{ms}-{seq}"


def until(what: str, time: dt.datetime) -> str:
    """The last ID that an entry can have before ``time``; ``ConfigError`` if that has no time zone."""
    if time.tzinfo is None:
        raise ConfigError(f"{what} must be an aware datetime, not {time!r}")
    return before(f"{max(int(time.timestamp() * 1000), 0)}-0")


def start(what: str, place: object) -> str:
    """The ID after which to begin: ``"earliest"``, ``"latest"`` (as ``$``), a time, or seconds since 1970."""
    if place in ("earliest", "latest"):
        return BEGINNING if place == "earliest" else "$"
    if isinstance(place, dt.datetime):
        return until(what, place)
    if isinstance(place, bool) or not isinstance(place, int | float) or not 0 <= place * 1000 <= LARGEST:
        rule = "'earliest', 'latest', an aware datetime or seconds since 1970"
        raise ConfigError(f"{what} must be {rule}, not {place!r}")
    return before(f"{int(place * 1000)}-0")


def moment(ms: int | bytes | str) -> dt.datetime:
    """Milliseconds since 1970 as a time in UTC."""
    return dt.datetime.fromtimestamp(int(ms) / 1000, dt.UTC)
