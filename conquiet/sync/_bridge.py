"""From a core class to its synchronous twin: a recipe to build it, and descriptors that run its methods."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, suppress
from functools import wraps
from types import FunctionType, MethodType, TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, get_args, overload

from conquiet.errors import ConquietError
from conquiet.kit.loopthread import PRIVATE_LOOP, forks, outlive_fork
from conquiet.sync._portal import call

__all__ = ["Bridge", "Facade", "Twin", "blocking", "items", "passing"]

C = TypeVar("C")
CM = TypeVar("CM", bound=AbstractAsyncContextManager[Any])
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Twin(Generic[T]):
    """A core object behind synchronous methods.

    What is kept is the *recipe*, the core's class and arguments. It is what pickling carries, so a facade can
    be closed over by a Spark function; and a forked child builds its own core from it, leaving the parent's
    connections alone.
    """

    _core_is_inherited = False
    """Whether a forked child goes on with the parent's core, because it holds nothing that belongs to a loop."""

    def __init__(self, build: Callable[..., T], *args: object, **kwargs: object) -> None:
        self._recipe = (build, args, kwargs)
        self._built: tuple[T, int] | None = None
        self._core()  # bad arguments are the caller's to see now

    def __init_subclass__(cls) -> None:
        """What a facade defines itself is documented by the core's own words."""
        core = get_args(cls.__orig_bases__[0])[0]  # type: ignore[attr-defined]
        for name, member in vars(cls).items():
            own: Any = getattr(member, "__func__", member)  # a classmethod's function
            if isinstance(own, property | FunctionType) and not own.__doc__ and hasattr(core, name):
                own.__doc__ = member.__doc__ = inspect.getdoc(getattr(core, name))

    def _core(self) -> T:
        """The core object, built once in each process."""
        built = self._built
        if built is not None and (built[1] == forks() or self._core_is_inherited):
            return built[0]
        with PRIVATE_LOOP.building:
            if self._built is None or self._built[1] != forks():
                self._built = (self._build(), forks())
            return self._built[0]

    def _build(self) -> T:
        build, args, kwargs = self._recipe
        own: list[Any] = [cast("Twin[Any]", arg)._core() if isinstance(arg, Twin) else arg for arg in args]
        core = build(*own, **kwargs)
        outlive_fork(core)
        return core

    def __getstate__(self) -> object:
        return self._recipe

    def __setstate__(self, recipe: Any) -> None:
        self._recipe = recipe
        self._built = None


class Facade(Twin[CM]):
    """A core object behind synchronous methods, with the core's own context manager."""

    def __enter__(self) -> Self:
        call(self._core().__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        call(self._core().__aexit__, kind, error, trace)


class Bridge(Generic[P, R]):
    """A method of the facade that has the name, the words and the signature of the core's own ``method``.

    On the class it is a plain function, and on an object a bound method: ``help()``, ``inspect.signature`` and
    notebooks show what is called.
    """

    def __init__(self, method: Callable[..., Any], run: Callable[Concatenate[Any, P], R]) -> None:
        self.method: Any = method
        self._function = wraps(method)(run)
        self.__doc__ = inspect.getdoc(method)

    @overload
    def __get__(self, instance: None, owner: type) -> Callable[Concatenate[Any, P], R]: ...

    @overload
    def __get__(self, instance: Twin[Any], owner: type) -> Callable[P, R]: ...

    def __get__(self, instance: Twin[Any] | None, owner: type) -> Callable[..., R]:
        return self._function if instance is None else MethodType(self._function, instance)


class blocking(Bridge[P, R], Generic[C, P, R]):
    """A coroutine method, run to its result."""

    def __init__(self, method: Callable[Concatenate[C, P], Awaitable[R]]) -> None:
        def run(twin: Twin[Any], /, *args: P.args, **kwargs: P.kwargs) -> R:
            return call(method, twin._core(), *args, **kwargs)

        super().__init__(method, run)


class passing(Bridge[P, R], Generic[C, P, R]):
    """A plain method of the core that is safe from any thread, run where it is called."""

    def __init__(self, method: Callable[Concatenate[C, P], R]) -> None:
        def run(twin: Twin[Any], /, *args: P.args, **kwargs: P.kwargs) -> R:
            return method(twin._core(), *args, **kwargs)

        super().__init__(method, run)


def items(iterator: AsyncIterator[T]) -> Iterator[T]:
    """An async iterator as a plain one, with one hop to the loop an item; it belongs to one thread."""
    try:
        while True:
            try:
                item = call(iterator.__anext__)
            except StopAsyncIteration:
                return
            yield item
    finally:
        close = getattr(iterator, "aclose", None)
        if close is not None:
            with suppress(ConquietError):  # the interpreter is ending, and the loop with it
                call(close)
