"""The rules that arguments are held to; each breach is a ``ConfigError`` that names the value and the rule."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Final

from conquiet.errors import ConfigError

__all__ = ["YEAR", "flag", "integer", "name", "number", "one_of", "seconds", "text"]

_LARGEST: Final = sys.float_info.max
YEAR: Final = 365 * 86_400.0
"""In seconds."""
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,200}", re.ASCII)


def integer(what: str, value: object, *, least: int) -> int:
    """``value`` if it is an ``int`` (a bool is not) of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{what} must be an integer of at least {least}, not {value!r}")
    return value


def flag(what: str, value: object) -> bool:
    """``value`` if it is a ``bool``."""
    if not isinstance(value, bool):
        raise ConfigError(f"{what} must be True or False, not {value!r}")
    return value


def name(what: str, value: object) -> str:
    """``value`` if it can be part of a key: the name of a topic, a group, a consumer or a queue."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ConfigError(f"{what} must be 1 to 200 letters, digits, '.', '_' or '-', not {value!r}")
    return value


def number(what: str, value: object, *, least: float) -> float:
    """``value`` if it is a finite number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= _LARGEST:
        raise ConfigError(f"{what} must be a finite number of at least {least:g}, not {value!r}")
    return float(value)


def one_of(what: str, value: object, choices: Sequence[str]) -> str:
    """``value`` if it is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{what} must be one of {', '.join(map(repr, choices))}, not {value!r}")
    return value


def seconds(what: str, value: object, *, most: float = _LARGEST) -> float:
    """``value`` if it is a positive, finite number of seconds, of at most ``most``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST:
        raise ConfigError(f"{what} must be a positive number of seconds, not {value!r}")
    if value > most:
        raise ConfigError(f"{what} must be at most {most:g} seconds, not {value!r}")
    return float(value)


def text(what: str, value: object) -> str:
    """``value`` if it is a non-empty ``str`` that UTF-8 can carry."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{what} must be a non-empty string, not {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{what} must be valid Unicode, not {value!r}") from None
    return value
