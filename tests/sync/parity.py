"""Whether a facade says the same as its core: the check itself, which returns what it finds wrong."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, get_args, get_type_hints

from conquiet.sync._bridge import Bridge, Facade, Twin, blocking, passing
from conquiet.wire import address

__all__ = ["Freedom", "drift"]

_EVERY_CLASS: Final = frozenset(
    {
        *("__annotations__", "__dict__", "__doc__", "__init__", "__module__", "__orig_bases__", "__parameters__"),
        *("__slots__", "__weakref__", "__firstlineno__", "__static_attributes__", "__annotations_cache__"),
    }
)
_SYNC_NAMES: Final = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
}


@dataclass(frozen=True)
class Freedom:
    """The differences that are meant; one that is not there is a problem too."""

    renames: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names of the core, and what they are called in the facade."""
    annotations: Mapping[str, tuple[object, object]] = field(default_factory=dict[str, tuple[object, object]])
    """``Class.method.parameter``, and how it is annotated in the core and in the facade."""
    twins: Mapping[object, object] = field(default_factory=dict[object, object])
    """Core classes that stand in annotations, and the facades that stand there instead."""
    hidden: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    """By class, names of the core that only other parts of the core call."""
    made_by_others: frozenset[str] = frozenset()
    """Classes that users get from another object and never make, so that it does not matter how."""


def drift(core: type, facade: type, freedom: Freedom) -> list[str]:
    """Every way in which ``facade`` is not ``core`` without ``await``."""
    return list(_Check(core, facade, freedom).problems())


class _Check:
    def __init__(self, core: type, facade: type, freedom: Freedom) -> None:
        self.core = core
        self.facade = facade
        self.freedom = freedom

    def problems(self) -> Iterator[str]:
        if self.core not in _bridged_by(self.facade):
            yield f"{self.facade.__name__} is no Facade[{self.core.__name__}]"
        hidden = self.freedom.hidden.get(self.core.__name__, frozenset())
        yield from (f"{name} is hidden, but not there" for name in sorted(hidden - _public(self.core)))
        expected = {self._renamed(name): name for name in _public(self.core) - hidden}
        found = _public(self.facade)
        yield from (f"{name} is missing" for name in sorted(expected.keys() - found))
        yield from (f"{name} is extra" for name in sorted(found - expected.keys()))
        for name in sorted(expected.keys() & found):
            for problem in self._compare(name, expected[name]):
                yield f"{name}: {problem}"
        if self.core.__name__ not in self.freedom.made_by_others:
            for problem in self._compare_plain("__init__", self.core.__init__, self.facade.__init__):  # type: ignore[misc]
                yield f"__init__: {problem}"

    def _renamed(self, name: str) -> str:
        return self.freedom.renames.get(name, _SYNC_NAMES.get(name, name))

    def _compare(self, name: str, core_name: str) -> Iterator[str]:
        core, facade = inspect.getattr_static(self.core, core_name), inspect.getattr_static(self.facade, name)
        if core_name in ("__aenter__", "__aexit__"):
            return  # one implementation for all, in Facade
        if isinstance(facade, Bridge):
            yield from _compare_bridge(core, facade)
        elif isinstance(core, property) and isinstance(facade, property):
            yield from self._compare_properties(name, core, facade)
        elif isinstance(core, classmethod | staticmethod) and type(core) is type(facade):
            yield from self._compare_plain(name, core.__func__, facade.__func__)
        elif inspect.isfunction(core) and inspect.isfunction(facade):
            yield from self._compare_plain(name, core, facade)
        elif core is not facade:
            yield f"a {type(core).__name__} in the core, a {type(facade).__name__} in the facade"

    def _compare_properties(self, name: str, core: property, facade: property) -> Iterator[str]:
        for part in ("fget", "fset", "fdel"):
            ours, theirs = getattr(core, part), getattr(facade, part)
            if (ours is None) != (theirs is None):
                yield f"{part} is only in {'the core' if theirs is None else 'the facade'}"
            elif ours is not None:
                yield from self._compare_plain(name, ours, theirs)

    def _compare_plain(self, name: str, core: Any, facade: Any) -> Iterator[str]:
        if inspect.iscoroutinefunction(facade) or inspect.isasyncgenfunction(facade):
            yield "is async in the facade"
        if inspect.isasyncgenfunction(core) and not inspect.isgeneratorfunction(facade):
            yield "iterates in the core only"
        ours, theirs = inspect.signature(core).parameters, inspect.signature(facade).parameters
        if list(ours) != list(theirs):
            yield f"takes {list(theirs)} instead of {list(ours)}"
            return
        for parameter in ours:
            if ours[parameter].kind != theirs[parameter].kind:
                yield f"{parameter} is {theirs[parameter].kind.description}, not {ours[parameter].kind.description}"
            if ours[parameter].default != theirs[parameter].default:
                yield f"{parameter} defaults to {theirs[parameter].default!r}, not {ours[parameter].default!r}"
        yield from self._compare_annotations(name, core, facade)

    def _compare_annotations(self, name: str, core: Any, facade: Any) -> Iterator[str]:
        ours, theirs = _hints(core), _hints(facade)
        for parameter in (*inspect.signature(core).parameters, "return"):
            if parameter == "self":
                continue
            mine, twin = ours.get(parameter), theirs.get(parameter)
            same = (mine, self.freedom.twins.get(mine, mine))
            meant = self.freedom.annotations.get(f"{self.facade.__name__}.{name}.{parameter}", same)
            # By their looks: a type variable is another object in each module.
            if (repr(mine), repr(twin)) != (repr(meant[0]), repr(meant[1])):
                yield f"{parameter} is annotated {twin}, and in the core {mine}"


def _compare_bridge(core: Any, facade: Bridge[..., Any]) -> Iterator[str]:
    if facade.method is not core:
        yield "bridges another function than the core's"
    if not inspect.isfunction(core):
        yield f"bridges a {type(core).__name__}, not a method"
    elif inspect.isasyncgenfunction(core) or inspect.isgeneratorfunction(core):
        yield "bridges an iterator, which needs a def"
    else:
        right = blocking if inspect.iscoroutinefunction(core) else passing
        if type(facade) is not right:
            yield f"is {type(facade).__name__}, not {right.__name__}"
    if not facade.__doc__:
        yield "has lost its docstring"


def _public(owner: type) -> set[str]:
    """What users see of a class, its operators included, wherever in its ancestry it comes from."""
    names = {
        name for ancestor in owner.__mro__ if ancestor not in (object, Facade, Twin, Generic) for name in vars(ancestor)
    }
    visible = {name for name in names if not name.startswith("_") or (name.endswith("__") and name not in _EVERY_CLASS)}
    if issubclass(owner, Twin):
        visible |= {name for name in vars(Twin) if not name.startswith("_")}
    if issubclass(owner, Facade):
        visible |= {"__enter__", "__exit__"}
    return visible


def _hints(function: Any) -> dict[str, Any]:
    return get_type_hints(function, localns=vars(address))  # some aliases are text that means something only there


def _bridged_by(facade: type) -> tuple[Any, ...]:
    return tuple(argument for base in getattr(facade, "__orig_bases__", ()) for argument in get_args(base))
