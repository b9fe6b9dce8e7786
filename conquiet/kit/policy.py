"""What happens after a failure: whether to try again, how often and after which delay."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast, get_args

from conquiet.errors import ConfigError
from conquiet.kit import rules

__all__ = ["Backoff", "RetryPolicy"]

_Errors: TypeAlias = type[BaseException] | tuple[type[BaseException], ...]
_Kind: TypeAlias = Literal["fixed", "exponential", "full_jitter"]
_Mode: TypeAlias = Literal["park", "requeue"]


@dataclass(frozen=True, slots=True)
class Backoff:
    """The delay before each retry, in seconds.

    ``fixed`` is always ``base``; ``exponential`` doubles it with each retry, up to ``cap``; ``full_jitter`` is
    anything between nothing and that, so that what failed together does not come back together.
    """

    base: float = 0.5
    """The delay before the first retry, or the most that it may be."""
    cap: float = 30.0
    """The most that any delay may be; at least ``base``."""
    kind: _Kind = "full_jitter"

    def __post_init__(self) -> None:
        rules.number("base", self.base, least=0)
        rules.number("cap", self.cap, least=self.base)
        rules.one_of("kind", self.kind, get_args(_Kind))

    def delay(self, retry: int, random: Callable[[], float] = random.random) -> float:
        """The seconds to wait before the retry of that number, from 0; ``random`` gives numbers in [0, 1)."""
        rules.integer("retry", retry, least=0)
        if self.kind == "fixed":
            return float(self.base)
        longest = self._longest(retry)
        return longest if self.kind == "exponential" else random() * longest

    def _longest(self, retry: int) -> float:
        try:
            return float(min(math.ldexp(self.base, retry), self.cap))
        except OverflowError:
            return float(self.cap)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Which failures are tried again, how often, and where the work waits meanwhile.

    There are at most ``max_retries`` further attempts after the first one.
    """

    max_retries: int = 3
    backoff: Backoff = Backoff()
    mode: _Mode = "park"
    """``park`` leaves a message where it is, under its ID; ``requeue`` appends it to its stream once more."""
    retry_on: _Errors = (Exception,)
    """A failure of one of these classes is tried again, ..."""
    give_up_on: _Errors = ()
    """... unless it is of one of these as well."""

    def __post_init__(self) -> None:
        rules.integer("max_retries", self.max_retries, least=0)
        if not isinstance(self.backoff, Backoff):
            raise ConfigError(f"backoff must be a Backoff, not {self.backoff!r}")
        rules.one_of("mode", self.mode, get_args(_Mode))
        object.__setattr__(self, "retry_on", _classes("retry_on", self.retry_on))
        object.__setattr__(self, "give_up_on", _classes("give_up_on", self.give_up_on))

    def retries(self, error: BaseException) -> bool:
        """Whether a failure with ``error`` may be tried again at all; ``give_up_on`` wins over ``retry_on``."""
        return isinstance(error, self.retry_on) and not isinstance(error, self.give_up_on)


def _classes(what: str, value: object) -> tuple[type[BaseException], ...]:
    found = cast("tuple[object, ...]", value if isinstance(value, tuple) else (value,))
    if not all(isinstance(one, type) and issubclass(one, BaseException) for one in found):
        raise ConfigError(f"{what} must be an exception class or a tuple of them, not {value!r}")
    return cast("tuple[type[BaseException], ...]", found)
