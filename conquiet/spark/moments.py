"""Dates and times as they stand in JSON, read as Spark reads them: ISO 8601, and what is near enough to it.

A ``ValueError`` for whatever is none, or not of the years 1 to 9999.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Final

__all__ = ["days", "local_micros", "micros"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_FIRST_SECOND: Final = -62_135_596_800
_LAST_SECOND: Final = 253_402_300_799
_MICROSECOND: Final = timedelta(microseconds=1)
_TRIMMED: Final = "".join(map(chr, range(0x21))) + "\x7f"

_DATE: Final = re.compile(r"\+?(\d{4})(?:-(\d{1,2})(?:-(\d{1,2})(?:[ T].*)?)?)?", re.ASCII | re.DOTALL)
_TIMESTAMP: Final = re.compile(
    r"""\+?(\d{4}) (?:-(\d{1,2}) (?:-(\d{1,2}) (?:[ T](\d{1,2}) (?: :(\d{1,2}) (?: :(\d{1,2}) (?:\.(\d*))?
        (?P<zone>[ ]*(?: Z | (?:UTC|GMT)?
            (?:(?P<sign>[+-]) (?P<offset>\d{1,2}(?::\d\d:\d\d|:\d{1,2})?|\d{4}(?:\d\d)?))? ))?
    )?)?)?)?)?""",
    re.ASCII | re.VERBOSE,
)
# What nearly all dates and times look like: several times as fast as the patterns of all that Spark takes.
_USUAL: Final = re.compile(
    r"\d{4}-\d\d-\d\d[ T](?:[01]\d|2[0-3]):\d\d:\d\d(?:\.\d{1,6})?(?:Z|[+-](?:0\d|1[0-7]):[0-5]\d)?", re.ASCII
)
_USUAL_DAY: Final = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)


def days(value: object) -> int:
    """The days from the epoch to the date that a text tells; the time behind it is ignored."""
    if not isinstance(value, str):
        raise ValueError("no date")
    if _USUAL_DAY.fullmatch(value):
        return date.fromisoformat(value).toordinal() - _EPOCH_DAY
    match = _DATE.fullmatch(value.strip(_TRIMMED))
    if match is None:
        raise ValueError("no date")
    year, month, day = match.groups("1")
    return date(int(year), int(month), int(day)).toordinal() - _EPOCH_DAY


def micros(value: object) -> int:
    """The microseconds from the epoch to the moment that a text tells, UTC if it names no zone, or seconds."""
    if type(value) is int and _FIRST_SECOND <= value <= _LAST_SECOND:
        return value * 1_000_000
    moment, _ = _moment(value)
    return (moment - _EPOCH) // _MICROSECOND


def local_micros(value: object) -> int:
    """The same of a text that must not name a zone."""
    moment, zoned = _moment(value)
    if zoned:
        raise ValueError("a timestamp without a time zone was expected")
    return (moment - _EPOCH) // _MICROSECOND


def _moment(value: object) -> tuple[datetime, bool]:
    """The moment that a text tells, in UTC if it names no zone, and whether it names one."""
    if not isinstance(value, str):
        raise ValueError("no timestamp")
    if _USUAL.fullmatch(value):
        moment = datetime.fromisoformat(value)
        return (moment, True) if moment.tzinfo else (moment.replace(tzinfo=UTC), False)
    match = _TIMESTAMP.fullmatch(value.strip(_TRIMMED))
    if match is None:
        raise ValueError("no timestamp")
    year, month, day, hour, minute, second, fraction = match.groups()[:7]
    moment = datetime(int(year), int(month or 1), int(day or 1), int(hour or 0), int(minute or 0), int(second or 0))
    micros = int(fraction[:6].ljust(6, "0")) if fraction else 0
    return moment.replace(microsecond=micros, tzinfo=_zone(match)), bool(match["zone"])


def _zone(match: re.Match[str]) -> timezone:
    if not match["sign"]:
        return UTC
    parts = re.findall(r"\d{1,2}", match["offset"])
    hours, minutes, seconds = (*map(int, parts), 0, 0)[:3]
    offset = timedelta(hours=hours, minutes=minutes, seconds=seconds)
    if minutes > 59 or seconds > 59 or offset > timedelta(hours=18):
        raise ValueError("no offset of a time zone")
    return timezone(-offset if match["sign"] == "-" else offset)
