"""What went wrong in a task or in a source, as conquiet said it, out of the report that Spark wraps around it."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from typing import Final, ParamSpec, TypeVar

import conquiet.errors as errors
from conquiet.errors import ConquietError, PayloadError, QueueError

__all__ = ["briefly", "plainly", "said"]

P = ParamSpec("P")
R = TypeVar("R")

_SAID: Final = re.compile(r"^(?:\s*)conquiet\.errors\.(\w+): (.*?)(?=^\s*$|^\s*at |\Z|^Driver stacktrace)", re.M | re.S)
_STATE: Final = re.compile(r"^\s*SQLSTATE: \w+$", re.M)
_PLACE: Final = re.compile(
    r"payload cannot be carried as JSON: (partition \d+, row \d+, column (?:'.*?'|\".*?\")|\S+) (.*)", re.S
)


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
