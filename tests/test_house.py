"""The order of the house, as far as linters do not see to it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final, get_type_hints

import pytest

import conquiet

ROOT: Final = Path(conquiet.__file__).parent
LONGEST: Final = 400
SCRIPTS: Final = ("conquiet.wire._warden",)
"""Run as programs, never imported."""


def _names() -> list[str]:
    found = (module.name for module in pkgutil.walk_packages(conquiet.__path__, "conquiet.", onerror=lambda _: None))
    return ["conquiet", *sorted(name for name in found if not name.endswith("__main__") and name not in SCRIPTS)]


MODULES: Final = _names()


def _offers(module: ModuleType) -> list[str]:
    """Its ``__all__``; a room without a door of its own, which only holds modules, needs none."""
    is_package = hasattr(module, "__path__")
    return list(getattr(module, "__all__", ())) if is_package else list(module.__all__)


def _own_members(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """What ``module`` offers and defines itself."""
    for name in _offers(module):
        member = getattr(module, name)
        if (inspect.isclass(member) or inspect.isfunction(member)) and member.__module__ == module.__name__:
            yield name, member


def _public_methods(owner: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(owner).items():
        callable_member = inspect.isfunction(member) or isinstance(member, property | classmethod | staticmethod)
        if not name.startswith("_") and callable_member:
            yield name, member


def test_the_public_names_are_sorted_and_unique() -> None:
    assert conquiet.__all__ == sorted(set(conquiet.__all__))


def test_the_public_names_are_complete() -> None:
    there = {name for name, value in vars(conquiet).items() if not (name.startswith("_") or inspect.ismodule(value))}
    assert there - {"annotations"} == set(conquiet.__all__)


def test_former_names_stay() -> None:
    assert conquiet.Keep is conquiet.JobRetention
    store = conquiet.RedisStore("redis://localhost:1", namespace="blue")
    assert store.apart()._namespace == "blue"
    memory = conquiet.MemoryStore()
    assert memory.apart() is memory


def test_every_error_is_public() -> None:
    errors = importlib.import_module("conquiet.errors")
    assert set(errors.__all__) <= set(conquiet.__all__)
    trees = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert trees == set(errors.__all__)


@pytest.mark.parametrize("room", ["conquiet.queue"])
def test_everything_that_a_room_offers_is_public(room: str) -> None:
    assert set(importlib.import_module(room).__all__) <= set(conquiet.__all__)


def test_every_module_says_what_it_is_and_what_it_offers() -> None:
    modules = {name: importlib.import_module(name) for name in MODULES}
    assert [name for name, module in modules.items() if not module.__doc__] == [], "without a docstring"
    assert [name for name, module in modules.items() if not _is_sorted(_offers(module))] == [], "not sorted"
    missing = [
        f"{name}.{one}" for name, module in modules.items() for one in _offers(module) if not hasattr(module, one)
    ]
    assert missing == []


def _is_sorted(offers: list[str]) -> bool:
    return offers == sorted(set(offers), key=_isort_key)


def _isort_key(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest, as ruff sorts ``__all__``."""
    kind = 0 if name.isupper() else 1 if name[:1].isupper() else 2
    return kind, name


def test_everything_public_is_documented() -> None:
    assert [bare for name in MODULES for bare in _undocumented(name)] == []


def _undocumented(name: str) -> Iterator[str]:
    for member, value in _own_members(importlib.import_module(name)):
        if not value.__doc__:
            yield f"{name}.{member}"
        # The methods of the facade are those of the core, see tests/sync/test_parity.py.
        methods = _public_methods(value) if inspect.isclass(value) and name != "conquiet.sync" else ()
        yield from (f"{name}.{member}.{method}" for method, one in methods if not inspect.getdoc(one))


def test_annotations_mean_something_at_run_time() -> None:
    """To tools that read them: documentation, dependency injection, command lines."""
    unreadable = [problem for name in conquiet.__all__ for problem in _unreadable_annotations(name)]
    assert unreadable == []


def _unreadable_annotations(name: str) -> Iterator[str]:
    for api in ("conquiet", "conquiet.sync"):
        owner = getattr(importlib.import_module(api), name)
        for method in ("__init__", *(member for member, _ in _public_methods(owner))):
            member = inspect.getattr_static(owner, method)
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if inspect.isfunction(function):
                try:
                    get_type_hints(function)
                except Exception as error:
                    yield f"{api}.{name}.{method}: {error!r}"


def test_no_module_is_too_long() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in ROOT.rglob("*.py")}
    assert {name: count for name, count in lines.items() if count > LONGEST} == {}


def test_the_marker_for_type_checkers_is_there() -> None:
    assert (ROOT / "py.typed").exists()


def test_what_is_run_here_is_the_house_itself() -> None:
    assert Path(sys.modules["conquiet"].__file__ or "").parents[1] == Path(__file__).parents[1]
