"""Times and entry IDs, as Redis writes them and as users read them."""

from __future__ import annotations

import datetime as dt
import re
from typing import Final

from conquiet.errors import ConfigError

__all__ = ["before", "entry_id", "moment", "place"]

_ID: Final = re.compile(r"(\d{1,20})-(\d{1,20})", re.ASCII)
_LARGEST: Final = 2**64 - 1


def moment(ms: int | bytes | str) -> dt.datetime:
    """Milliseconds since 1970 as a time in UTC."""
    return dt.datetime.fromtimestamp(int(ms) / 1000, dt.UTC)


def place(id: str) -> tuple[int, int]:
    """What entry IDs are ordered by."""
    ms, seq = id.split("-")  # not partition, which an EntryId has another meaning for
    return int(ms), int(seq)


def entry_id(what: str, value: object) -> str:
    """``value`` if it is an entry's ID."""
    match = _ID.fullmatch(value) if isinstance(value, str) else None
    if match is None or max(int(match[1]), int(match[2])) > _LARGEST:
        raise ConfigError(f"{what} must be an entry's ID, 'ms-seq', not {value!r}")
    return f"{int(match[1])}-{int(match[2])}"


def before(what: str, time: dt.datetime) -> str:
    """The last ID that an entry can have before ``time``."""
    if time.tzinfo is None:
        raise ConfigError(f"{what} must be an aware datetime, not {time!r}")
    ms = int(time.timestamp() * 1000)
    return "0-0" if ms <= 0 else f"{ms - 1}-{_LARGEST}"
