"""What becomes of failures: which are waited out, and how the others reach the user.

Spark wraps a report of its own around what went wrong in a task or in a source: here conquiet's words are taken out.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from functools import wraps
from typing import Final, ParamSpec, TypeVar

import conquiet.errors as errors
from conquiet.errors import ConquietError, PayloadError, QueueError
from conquiet.kit.clock import Clock
from conquiet.kit.retrying import Lines, patiently
from conquiet.wire.connections import is_refusal

__all__ = ["Patience", "briefly", "plainly", "said"]

P = ParamSpec("P")
R = TypeVar("R")

_SAID: Final = re.compile(r"^(?:\s*)conquiet\.errors\.(\w+): (.*?)(?=^\s*$|^\s*at |\Z|^Driver stacktrace)", re.M | re.S)
_STATE: Final = re.compile(r"^\s*SQLSTATE: \w+$", re.M)
_PLACE: Final = re.compile(
    r"payload cannot be carried as JSON: (partition \d+, row \d+, column (?:'.*?'|\".*?\")|\S+) (.*)", re.S
)

_QUIET: Final = 5.0
"""Seconds between two warnings about a server that is away."""
_log = logging.getLogger("conquiet.spark")


class Patience:
    """For how long a server may be away. An outage that is shorter is no failure; a refusal is one at once.

    Until something was answered there is no patience, unless the work has ``begun`` elsewhere.
    """

    def __init__(self, seconds: float, *, begun: bool = False) -> None:
        self._seconds = seconds
        self._begun = begun
        self._given_up: set[str] = set()
        """Keys whose server was waited for in vain: whoever asks again after that is answered at once."""
        self._lines = Lines(_log, quiet=_QUIET)

    async def ask(self, clock: Clock, key: str, ask: Callable[[], Awaitable[R]]) -> R:
        """The answer about ``key``. The last try begins when the patience is over, not before."""
        deadline: float | None = None
        asked = 0.0

        async def attempt() -> R:
            nonlocal asked
            asked = clock.monotonic()
            return await ask()

        def before_retry(error: QueueError) -> None:
            nonlocal deadline
            is_new = deadline is None
            deadline = asked + self._seconds if deadline is None else deadline
            if is_refusal(error) or not self._begun or key in self._given_up:
                raise error
            if asked >= deadline:
                self._given_up.add(key)
                raise error
            self._lines.warn("the server is away, asking again", error, is_new=is_new)

        answer = await patiently(clock, attempt, before_retry, retries=None)
        self._begun = True
        self._given_up.discard(key)
        return answer


def said(report: str) -> ConquietError | None:
    """The last error of conquiet's that a report of Spark's quotes; ``None`` if it quotes none."""
    found = _SAID.findall(report)
    if not found:
        return None
    name, text = found[-1]
    text = _STATE.sub("", text).strip()
    kind = getattr(errors, name, ConquietError)
    place = _PLACE.match(text)
    if kind is PayloadError and place is not None:
        return PayloadError(place[1], place[2])
    error = Exception.__new__(kind)  # some take more than the text, which is all that there is
    Exception.__init__(error, text)
    assert isinstance(error, ConquietError)
    if isinstance(error, QueueError):
        error.entry_ids = ()
    return error


@contextmanager
def plainly() -> Generator[None]:
    """Raise what conquiet said in a task instead of Spark's report of it, which stays as its cause."""
    try:
        yield
    except ConquietError:
        raise
    except Exception as report:
        error = said(str(report))
        if error is None:
            raise
        raise error from report


def briefly(function: Callable[P, R]) -> Callable[P, R]:
    """Have errors of conquiet leave ``function`` without their way through it: Spark prints all of that to users."""

    @wraps(function)
    def brief(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except ConquietError as error:
            failure = error.with_traceback(None)
        failure.__cause__ = failure.__context__ = None
        raise failure

    return brief
