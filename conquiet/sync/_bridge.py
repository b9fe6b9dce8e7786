"""From a core class to its synchronous twin: a recipe to build it, and descriptors that run its methods."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from types import FunctionType, TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, get_args, overload

from conquiet.errors import ConquietError
from conquiet.kit.loopthread import PRIVATE_LOOP, forks, outlive_fork
from conquiet.sync._portal import call, close_soon

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

    _closes_when_dropped = False
    """Whether the core is closed when nobody refers to the facade any more: a Spark task may just end with it."""

    def _build(self) -> CM:
        core = super()._build()
        if self._closes_when_dropped:
            weakref.finalize(self, close_soon, cast("Any", core).aclose, forks()).atexit = False
        return core

    def __enter__(self) -> Self:
        call(self._core().__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        call(self._core().__aexit__, kind, error, trace)


class _Bound(partial[Any]):
    """A bridged method of one object, which looks like the core's own to whoever asks."""

    @property
    def _method(self) -> Any:
        return cast("Any", self.func).__self__.method

    @property
    def __name__(self) -> str:
        return str(self._method.__name__)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return inspect.getdoc(self._method)

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self._method)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class Bridge(Generic[P, R]):
    """A descriptor that stands for one method of the core; the parity test compares ``method``."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method: Any = method
        self.__doc__ = inspect.getdoc(method)

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: Twin[Any], owner: type) -> Callable[P, R]: ...

    def __get__(self, instance: Twin[Any] | None, owner: type) -> Self | Callable[P, R]:
        return self if instance is None else _Bound(self._run, instance)

    def _run(self, instance: Twin[Any], *args: P.args, **kwargs: P.kwargs) -> R:
        """The outcome of the method; the core is looked up now, since there may have been a fork after binding."""
        raise NotImplementedError


class blocking(Bridge[P, R], Generic[C, P, R]):
    """A coroutine method, run to its result."""

    def __init__(self, method: Callable[Concatenate[C, P], Awaitable[R]]) -> None:
        super().__init__(method)

    def _run(self, instance: Twin[Any], *args: P.args, **kwargs: P.kwargs) -> R:
        method: Callable[Concatenate[Any, P], Awaitable[R]] = self.method
        return call(method, instance._core(), *args, **kwargs)


class passing(Bridge[P, R], Generic[C, P, R]):
    """A plain method of the core that is safe from any thread, run where it is called."""

    def __init__(self, method: Callable[Concatenate[C, P], R]) -> None:
        super().__init__(method)

    def _run(self, instance: Twin[Any], *args: P.args, **kwargs: P.kwargs) -> R:
        method: Callable[Concatenate[Any, P], R] = self.method
        return method(instance._core(), *args, **kwargs)


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
