"""A handler is checked when it is given: what could never be called with a message is refused, and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import lru_cache, partial, wraps
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

import pytest

from conquiet import ConfigError
from conquiet.kit.handlers import checked


def plain(message: Any) -> None: ...


async def coroutine(message: Any) -> None: ...


def of_two(message: Any, tx: Any) -> None: ...


def with_default(message: Any, tx: Any = None) -> None: ...


def of_nothing() -> None: ...


def by_name(*, message: Any) -> None: ...


def of_any(*args: Any, **kwargs: Any) -> None: ...


def generator(message: Any) -> Iterator[None]:
    yield


async def async_generator(message: Any) -> AsyncIterator[None]:
    yield


class Methods:
    def one(self, message: Any) -> None: ...

    def two(self, message: Any, tx: Any) -> None: ...

    def yields(self, message: Any) -> Iterator[None]:
        yield

    @classmethod
    def of_class(cls, message: Any) -> None: ...

    @staticmethod
    def of_nobody(message: Any) -> None: ...


class Callable1:
    def __call__(self, message: Any) -> None: ...


class Callable2:
    async def __call__(self, message: Any, tx: Any) -> None: ...


class CallableThatYields:
    def __call__(self, message: Any) -> Iterator[None]:
        yield


class Counting:
    """A decorator that is an object."""

    def __init__(self, handler: Callable[..., Any]) -> None:
        wraps(handler)(self)
        self._handler = handler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._handler(*args, **kwargs)


def logged(handler: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that passes on whatever it is given."""

    @wraps(handler)
    def call(*args: Any, **kwargs: Any) -> Any:
        return handler(*args, **kwargs)

    return call


def in_transaction(handler: Callable[..., Awaitable[None]]) -> Callable[[Any], Awaitable[None]]:
    """A decorator that adds an argument."""

    @wraps(handler)
    async def call(message: Any) -> None:
        await handler(message, "tx")

    return call


def with_options(handler: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that adds an argument, and says only which one it takes."""

    @wraps(handler)
    def call(message: Any, **options: Any) -> Any:
        return handler(message, "tx", **options)

    return call


def with_session(handler: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that adds an argument, and does not say what it takes."""

    @wraps(handler)
    def call(*args: Any, **kwargs: Any) -> Any:
        return handler(*args, tx="tx", **kwargs)

    return call


@logged
def logged_of_none() -> None: ...


@logged
def logged_of_one(message: Any) -> None: ...


@logged
def logged_of_two(message: Any, tx: Any) -> None: ...


@in_transaction
async def given_more(message: Any, tx: Any) -> None: ...


class Decorated:
    @logged
    def none(self) -> None: ...

    @logged
    def one(self, message: Any) -> None: ...

    @logged
    def two(self, message: Any, tx: Any) -> None: ...


class DecoratedCallable:
    @logged
    def __call__(self) -> None: ...


def round_and_round(*args: Any) -> None: ...


round_and_round.__wrapped__ = round_and_round  # type: ignore[attr-defined]


class Bogus:
    __signature__ = "not a signature"

    def __call__(self, message: Any) -> None: ...


@pytest.mark.parametrize(
    "handler",
    [
        plain,
        coroutine,
        with_default,
        of_any,
        lambda message: None,
        Methods().one,
        Methods.of_class,
        Methods.of_nobody,
        Callable1(),
        Mock(),
        AsyncMock(),
        partial(of_two, tx=1),
        partial(of_two, 1),
        partial(Methods().two, tx=1),
        logged_of_one,
        logged(logged_of_one),
        given_more,
        logged(given_more),
        with_options(of_two),
        with_session(of_two),
        logged(with_session(of_two)),
        partial(with_session(of_two)),
        patch.object(Methods, "one")(of_two),
        partial(logged_of_two, tx=1),
        Decorated().one,
        Decorated().two,
        Counting(plain),
        lru_cache(plain),
        round_and_round,
        partial(round_and_round, 1),
        [].append,
        print,
        dict,
        str,
        Bogus(),
    ],
)
def test_what_takes_a_message_passes(handler: Any) -> None:
    assert checked("handler", handler, "message") is handler


@pytest.mark.parametrize(
    ("handler", "named", "signature"),
    [
        (of_two, "of_two", "(message, tx)"),
        (of_nothing, "of_nothing", "()"),
        (by_name, "by_name", "(*, message)"),
        (lambda: None, "<lambda>", "()"),
        (Methods().two, "Methods.two", "(message, tx)"),
        (Methods.one, "Methods.one", "(self, message)"),
        (Callable2(), "Callable2", "(message, tx)"),
        (partial(plain, 1), "plain", "()"),
        (partial(of_two), "of_two", "(message, tx)"),
        (logged_of_none, "logged_of_none", "()"),
        (logged(logged_of_none), "logged_of_none", "()"),
        (partial(logged_of_one, "a"), "logged_of_one", "()"),
        (Decorated().none, "Decorated.none", "()"),
        (DecoratedCallable(), "DecoratedCallable", "()"),
        (Counting(of_nothing), "of_nothing", "()"),
        (lru_cache(of_nothing), "of_nothing", "()"),
        (str.replace, "str.replace", "(self, old, new"),
    ],
)
def test_what_takes_something_else_is_named_with_its_signature(handler: Any, named: str, signature: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked("handler", handler, "message")
    text = str(caught.value)
    assert text.startswith("handler is called with (message)"), text
    assert f"{named}{signature}" in text
    assert f" {__name__}." in text or " builtins." in text


def test_more_than_one_argument_is_checked_alike() -> None:
    assert checked("handler", of_two, "message", "tx") is of_two
    with pytest.raises(ConfigError, match=r"handler is called with \(message, tx\), but .*plain\(message\)"):
        checked("handler", plain, "message", "tx")


@pytest.mark.parametrize(
    "handler",
    [generator, async_generator, Methods().yields, CallableThatYields(), partial(generator), partial(async_generator)],
)
def test_what_would_only_make_a_generator_is_refused(handler: Any) -> None:
    with pytest.raises(ConfigError, match=r"handler must not be a generator function, as .* is: .* never run"):
        checked("handler", handler, "message")


@pytest.mark.parametrize("handler", [None, 7, "handle", object(), b"x"])
def test_what_cannot_be_called_is_refused(handler: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        checked("handler", handler, "message")
    assert str(caught.value) == f"handler must be callable, not {handler!r}"


def test_no_value_that_a_handler_was_bound_to_is_told() -> None:
    """It may be a credential, or long."""

    def handle(message: Any, tx: Any, password: str = "hunter2") -> None: ...

    for handler in (handle, partial(handle, password="hunter3")):
        with pytest.raises(ConfigError) as caught:
            checked("handler", handler, "message")
        assert "password=..." in str(caught.value)
        assert "hunter" not in str(caught.value)


def test_a_handler_is_not_called_by_the_check() -> None:
    calls: list[Any] = []
    checked("handler", calls.append, "message")
    with contextlib.suppress(ConfigError):
        checked("handler", lambda: calls.append(1), "message")
    assert not calls
