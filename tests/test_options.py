"""Options that several functions take: each list of them says the same, and nobody has to look for it."""

from __future__ import annotations

import datetime as dt
import importlib
import inspect
import pickle
import pkgutil
import pydoc
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Final, Required, TypedDict, Unpack, get_origin, get_type_hints, is_typeddict

import pytest

import conquiet
import conquiet.sync
from conquiet.balance.options import BalanceOptions
from conquiet.jobs.options import JobQueueOptions, JobWorkerOptions, PostgresStoreOptions, RedisStoreOptions
from conquiet.kit import rules
from conquiet.kit.options import check, instance, takes
from conquiet.topics.options import BrokerOptions

RECORDS: Final[dict[str, type]] = {
    "Broker": BrokerOptions,
    "JobQueue": JobQueueOptions,
    "JobWorker": JobWorkerOptions,
    "PostgresStore": PostgresStoreOptions,
    "RedisStore": RedisStoreOptions,
    "StreamBalancer": BalanceOptions,
}
URL: Final = "redis://localhost:1"


def _keywords() -> list[type]:
    """Every ``TypedDict`` of the package that stands for options."""
    found = (module.name for module in pkgutil.walk_packages(conquiet.__path__, "conquiet."))
    rooms = [importlib.import_module(name) for name in found if name.endswith(".options") and "spark" not in name]
    members = [member for room in rooms for member in vars(room).values()]
    return [member for member in members if is_typeddict(member)]


def _takers() -> list[tuple[str, Callable[..., Any], type]]:
    return [
        (f"{api.__name__}.{name}.{method}", getattr(getattr(api, name), method), record)
        for api in (conquiet, conquiet.sync)
        for name, record in RECORDS.items()
        for method in ("__init__", "connect")
        if hasattr(getattr(api, name), method)
    ]


def test_each_record_has_its_keywords() -> None:
    assert sorted(keywords.__name__ for keywords in _keywords()) == sorted(
        record.__name__.replace("Options", "Keywords") for record in RECORDS.values()
    )


@pytest.mark.parametrize("keywords", _keywords(), ids=lambda keywords: keywords.__name__)
def test_keywords_are_those_of_the_record(keywords: Any) -> None:
    """Type checkers see the keywords; what is taken and checked are the fields of the record."""
    record = getattr(importlib.import_module(keywords.__module__), keywords.__name__.replace("Keywords", "Options"))
    assert list(get_type_hints(keywords).items()) == list(get_type_hints(record).items())
    as_written = get_type_hints(keywords, include_extras=True)
    required = {name for name, hint in as_written.items() if get_origin(hint) is Required}
    assert required == {one.name for one in fields(record) if one.default is MISSING}


@pytest.mark.parametrize(("function", "record"), [taker[1:] for taker in _takers()], ids=[one[0] for one in _takers()])
def test_a_signature_shows_every_option(function: Callable[..., Any], record: type) -> None:
    hints = get_type_hints(record)
    shown = {name: one for name, one in inspect.signature(function).parameters.items() if one.kind == one.KEYWORD_ONLY}
    assert list(shown) == list(hints)
    for one in fields(record):
        assert shown[one.name].annotation == hints[one.name]
        assert shown[one.name].default == (inspect.Parameter.empty if one.default is MISSING else one.default)
    assert {name: get_type_hints(function)[name] for name in shown} == hints


def test_help_shows_the_options() -> None:
    page = pydoc.plain(pydoc.render_doc(conquiet.sync.StreamBalancer))
    assert "connect(url: str, *, service: str, consumer: str | None = None, lease_ttl: float = 15.0," in page


def _calls() -> list[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    found: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = []
    for api in (conquiet, conquiet.sync):
        queue: Any = api.JobQueue(api.MemoryStore(), "q")
        given = {"JobQueue": (queue.store, "q"), "JobWorker": (queue, print)}
        for name in RECORDS:
            taker = getattr(api, name)
            ways = [taker, taker.connect] if hasattr(taker, "connect") else [taker]
            found += [(f"{api.__name__}.{name}-{at}", way, given.get(name, (URL,))) for at, way in enumerate(ways)]
    return found


@pytest.mark.parametrize(("call", "given"), [one[1:] for one in _calls()], ids=[one[0] for one in _calls()])
def test_an_unknown_keyword_is_refused_by_its_name(call: Callable[..., Any], given: tuple[Any, ...]) -> None:
    needed = {} if "service" not in inspect.signature(call).parameters else {"service": "s"}
    with pytest.raises(TypeError, match="unexpected keyword argument 'lease_tll'"):
        call(*given, **needed, lease_tll=5.0)
    with pytest.raises(TypeError, match="positional argument"):
        call(*given, "one more", **needed)


def test_a_missing_one_is_named() -> None:
    for taker in (conquiet.StreamBalancer, conquiet.sync.StreamBalancer):
        with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'service'"):
            taker(URL)  # type: ignore[call-arg]


def test_a_facade_travels_with_what_it_was_given() -> None:
    made = conquiet.sync.StreamBalancer(URL, service="s", consumer="me", handle_signals=False)
    copy = pickle.loads(pickle.dumps(made))
    assert (
        copy._core()._options
        == made._core()._options
        == BalanceOptions(service="s", consumer="me", handle_signals=False)
    )
    assert not copy._wants_signals()
    assert conquiet.sync.StreamBalancer(URL, service="s")._wants_signals()


class Keywords(TypedDict, total=False):
    """Made up."""

    size: int


def test_only_the_looks_of_a_function_change() -> None:
    def plain(self: object, where: str = "here", **options: Unpack[Keywords]) -> tuple[str, int]:
        """Says."""
        return where, options["size"]

    shown = takes(RedisStoreOptions)(plain)
    assert shown is plain
    assert shown(None, size=5) == ("here", 5)
    assert shown.__doc__ == "Says."
    parameters = inspect.signature(shown).parameters
    assert list(parameters) == ["self", "where", "namespace", "clock"]
    assert parameters["where"].default == "here"
    assert get_type_hints(shown)["return"] == tuple[str, int]


@dataclass(frozen=True)
class Sized:
    """Made up."""

    most: int | None = None
    least: int = 1
    near: dt.date = field(default_factory=dt.date.today)

    def __post_init__(self) -> None:
        check(self, rules.integer, "most", "least", least=0)
        check(self, instance, "near", of=dt.date)


def test_fields_are_held_to_rules_and_none_is_one_where_it_is_the_default() -> None:
    assert Sized(None, 3).least == 3
    for arguments, message in (
        ({"most": -1}, "most must be an integer of at least 0, not -1"),
        ({"least": None}, "least must be an integer of at least 0, not None"),
        ({"near": None}, "near must be a date, not None"),
    ):
        with pytest.raises(conquiet.ConfigError, match=f"^{message}$"):
            Sized(**arguments)
