"""Options that several functions take: one record has their names, types, defaults and checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from conquiet.errors import ConfigError

__all__ = ["check", "instance", "takes"]

F = TypeVar("F", bound=Callable[..., Any])


def check(record: Any, rule: Callable[..., object], *names: str, **bounds: object) -> None:
    """Hold fields of ``record`` to one of the rules; a field whose default is ``None`` may be ``None``."""
    for name in names:
        value = getattr(record, name)
        if value is not None or record.__dataclass_fields__[name].default is not None:
            rule(name, value, **bounds)


def instance(what: str, value: object, *, of: type) -> None:
    """The rule that ``value`` is of that class."""
    if not isinstance(value, of):
        raise ConfigError(f"{what} must be a {of.__name__}, not {value!r}")


def takes(record: type) -> Callable[[F], F]:
    """Show the fields of ``record`` as keywords of a function that ends in ``**options`` and makes the record of them.

    ``inspect.signature``, ``help`` and ``get_type_hints`` then see each option with its type and its default. Type
    checkers see the ``TypedDict`` with which ``**options`` is annotated; a test holds it to the record.
    """
    options = inspect.signature(record, eval_str=True).parameters.values()

    def show(function: F) -> F:
        own = inspect.signature(function, eval_str=True)
        shown = own.replace(parameters=[*list(own.parameters.values())[:-1], *options])
        hints = {one.name: one.annotation for one in shown.parameters.values() if one.annotation is not one.empty}
        cast("Any", function).__signature__ = shown
        function.__annotations__ = {**hints, "return": shown.return_annotation}
        return function

    return show
